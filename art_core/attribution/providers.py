"""Which HTTP requests ask a model for text? The hosts and paths of model providers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote

HOSTS = re.compile(
    r"""api\.(openai|anthropic|mistral|groq|deepseek|x|together|fireworks|cohere|perplexity|cerebras|moonshot|minimax|ai21)
        \.(com|ai|xyz|cn|io|chat)
    | (.+\.)?(openai|services\.ai|cognitiveservices|inference\.ml|models\.ai)\.azure\.com
    | generativelanguage\.googleapis\.com | (.+-)?aiplatform\.googleapis\.com
    | bedrock(-mantle|-runtime(-fips)?)?\..+\.amazonaws\.com(\.cn)? | bedrock-mantle\..+\.api\.aws
    | codestral\.mistral\.ai | api\.sambanova\.ai | integrate\.api\.nvidia\.com | models\.github\.ai
    | openrouter\.ai | api\.together\.ai | api\.studio\.nebius\.(ai|com) | api\.deepinfra\.com | api\.novita\.ai
    | (router|api-inference)\.huggingface\.co | (.+\.)?endpoints\.huggingface\.cloud
    | dashscope(-intl|-us)?\.aliyuncs\.com | open\.bigmodel\.cn | api\.z\.ai | ark\..+\.volces\.com
    | ollama\.com | gateway\.ai\.cloudflare\.com | ai-gateway\.vercel\.sh""",
    re.VERBOSE,
)
"""Hosts of known providers."""
PATHS = re.compile(
    r"""/(chat/completions | completions | responses(/compact|/input_tokens)? | chat | runs | decisions | interactions
        | v1/messages(/count_tokens|/batches)? | api/generate | v1/generate | conversations)
    | /(models|endpoints)/(?P<google>[^/]+):(generateContent|streamGenerateContent|batchGenerateContent|countTokens)
    | /models/(?P<partner>[^/]+):(rawPredict|streamRawPredict)
    | /model/(?P<bedrock>[^/]+)/(converse|converse-stream|invoke|invoke-with-response-stream|count-tokens)""",
    re.VERBOSE,
)
"""Ends of the paths that request text or count a prompt's tokens. Embeddings, audio, images, files and traces are not matched."""
DEPLOYMENT = re.compile(r"/deployments/(?P<azure>[^/]+)/")
PROMPTS = frozenset({"messages", "prompt", "input", "contents", "inputText"})
"""Keys of bodies that request text."""


class ModelCall(NamedTuple):
    model: str | None
    at_provider: bool


def at_provider(host: str | None) -> bool:
    """Whether the host is a known provider's."""
    return host is not None and HOSTS.fullmatch(host.lower()) is not None


def model_call(method: str, host: str, path: str, body: Callable[[], Any]) -> ModelCall | None:
    """Return the model that a request asks for text, or None if it asks none.

    At a known provider the path decides. Elsewhere the body must look like a model call too, because agents' tools have the
    same paths. ``body`` returns JSON as bytes, text or a mapping; anything else is ignored.
    """
    path = path.partition("?")[0].rstrip("/")
    ends = re.search(f"(?:{PATHS.pattern})$", path, re.VERBOSE)
    if method.upper() != "POST" or ends is None:
        return None
    named = ends["google"] or ends["partner"] or ends["bedrock"]
    if ends["bedrock"] and "embed" in named:
        return None
    content, known = _mapping(body()), at_provider(host)
    deployment = DEPLOYMENT.search(path)
    model = content.get("model") or named or (deployment and deployment["azure"])
    if not known and not (model and content.keys() & PROMPTS):
        return None
    return ModelCall(unquote(model) if isinstance(model, str) else None, known)


def _mapping(body: Any) -> Mapping[str, Any]:
    if isinstance(body, bytes | bytearray | str):
        try:
            body = json.loads(body)
        except ValueError:
            return {}
    return body if isinstance(body, Mapping) else {}
