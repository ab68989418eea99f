"""The plugin for agents with any HTTP client: inside a rollout, their requests to a model go to the rollout's address.

It sends what the clients of other plugins do not redirect, whichever library or SDK made it. Imports no client.
"""

from __future__ import annotations

import functools
import importlib.util
import re

from art_core import hookimpl
from art_core.plugin_api import redirect_requests
from art_http.caches import wrap_caches
from art_http.clients import SENDERS

__all__ = ["redirect_clients"]

CHAT = "/chat/completions"
TRANSLATED = re.compile(
    r"""/(completions | responses(/input_tokens)? | v1/messages(/count_tokens)? | api/chat)
    | /(models|endpoints)/[^/]+:(generateContent|streamGenerateContent|countTokens)
    | /model/[^/]+/(converse|converse-stream|invoke|invoke-with-response-stream|count-tokens)""",
    re.VERBOSE,
)
"""Ends of the paths that art-gateway translates."""
CLAUDE_CODE = {
    "CLAUDE_CODE_PROVIDER_MANAGED_BY_HOST": "1",  # otherwise an address in the user's settings wins over this one
    "CLAUDE_CODE_USE_BEDROCK": "",
    "CLAUDE_CODE_USE_FOUNDRY": "",
    "CLAUDE_CODE_USE_VERTEX": "",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",  # telemetry, titles, updates
    "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",  # tools that are found by a search at Anthropic
    "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # a line in the prompt for Anthropic's accounting
    "CLAUDE_CODE_GATEWAY_HINT_HEADERS": "1",  # name who is calling
}
"""What keeps Claude Code, as a program that a rollout starts, at the address, and its calls to what art-gateway translates."""
UNLIKE = ("/agents/completions", "/fim/completions")
"""Mistral's, which are not OpenAI's completions."""


@hookimpl
def redirect_clients() -> None:
    """Send the requests of httpx, urllib3, aiohttp and http.client to the rollout that they belong to; and Claude Code's."""
    redirect_requests(path_of, SENDERS, CLAUDE_CODE)
    wrap_caches()


def path_of(path: str) -> str | None:
    """Return the path below a rollout's address that answers a provider's ``path``; None if there is none."""
    path = path.rstrip("/")
    if path.endswith(CHAT):
        return CHAT
    end = re.search(f"(?:{TRANSLATED.pattern})$", path, re.VERBOSE)
    if end is None or path.endswith(UNLIKE) or not _gateway():
        return None
    # A tuned model of Vertex AI is at an endpoint.
    return end[0].removeprefix("/v1").replace("/endpoints/", "/models/")


@functools.cache
def _gateway() -> bool:
    """Whether art-gateway is installed, with which a rollout's address answers more than chat completions."""
    return importlib.util.find_spec("art_gateway") is not None
