"""The classic API: an agent that calls the policy to choose actions.

Inside a rollout, its calls go to the rollout's address and are recorded like any other agent's. Outside, an embedded engine in
this process answers (``art_embedded.local_models``). The environment variable ``ART_MODEL`` overrides the model in the code.
"""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from art_core import caller_headers, destination
from art_core.errors import ArtError, ConfigError, UpstreamError
from art_core.store.run_folder import last_checkpoint
from art_embedded import local_models

if TYPE_CHECKING:
    from art_core.types import JsonDict, RolloutAddress, Upstream

ASKED = """You act in an environment. This is its state, as JSON:

{state}

Answer with your next action and nothing else: one JSON object, {{"type": NAME OF THE ACTION, ...}}, with all that the action
needs."""
CALL_SECONDS = 600.0
"""Timeout of one model call."""
RETRIES = 2
"""Retries after a temporary failure, as in OpenAI's clients."""
LONGEST_PAUSE = 8.0
"""Most seconds to wait before a retry."""
DECODER = json.JSONDecoder()
_asked: ContextVar[list[str]] = ContextVar("art_asked")


class ModelCallError(ArtError):
    """A model call of a classic agent was refused or failed.

    Not a CaptureError: like any error of an agent, it ends that rollout and not the training.
    """

    def __init__(self, message: str, *, status: int | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        """The HTTP status of the answer; None without an answer."""
        self.code = code
        """OpenAI's error code, such as ``TOO_LONG``."""


class Agent:
    """Chooses an action for every state of an environment with a model. Subclasses define ``select_action``.

    ``model_name`` is the model that answers outside rollouts: anything that ``train`` accepts as ``model``, or a run folder.
    Inside a rollout it is only compared with ``passthrough``. If ``engine`` is passed, it answers instead; the caller starts and
    stops it.
    """

    def __init__(self, model_name: str = "tiny", *, engine: Upstream | None = None) -> None:
        self.model_name: str = os.environ.get("ART_MODEL") or model_name
        self.engine = engine
        self._served: local_models.Served | None = None
        self._followed: Path | None = None
        self._user = local_models.User()

    async def generate_response(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        max_tokens: int | None = None,
        temperature: float | None = None,
        **request: Any,
    ) -> str:
        """Return the model's answer to ``prompt``, a string or a list of OpenAI messages, without its reasoning.

        ``request`` has further fields of a chat completion, such as ``stop`` or ``response_format``. None means the engine's
        default; training rollouts override the temperature. Raises ModelCallError if the call is refused or fails, ConfigError
        if the model cannot be loaded.
        """
        texts = isinstance(prompt, str)
        messages = [{"role": "user", "content": prompt}] if texts else [dict(message) for message in prompt]
        body: JsonDict = {"messages": messages, "max_tokens": max_tokens, "temperature": temperature, **request}
        body = {name: value for name, value in body.items() if value is not None}
        address = destination(self.model_name)
        answer = await (self._ask_here(body) if address is None else _ask(address, body))
        try:
            return answer["choices"][0]["message"].get("content") or ""
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ModelCallError(f"the answer is not a chat completion ({error!r}): {answer!r:.200}") from error

    async def select_action(self, state: dict[str, Any]) -> dict[str, Any]:
        """Show the model ``state`` as JSON and return the action in its answer, read by ``parse_action``."""
        response = await self.generate_response(ASKED.format(state=as_json(state)))
        return self.parse_action(response, state)

    def parse_action(self, response: str, state: dict[str, Any]) -> dict[str, Any]:
        """Return the last JSON object in ``response`` that has a ``type``, else the last one, with type ``"unknown"``.

        Without any, returns ``{"type": "none", "error": why, "response": response}``: an unusable answer is for the environment
        to handle, not an exception.
        """
        actions = list(_objects(response))
        for action in reversed(actions):
            if isinstance(action.get("type"), str):
                return action
        if actions:
            return {**actions[-1], "type": "unknown", "error": "the action has no type"}
        return {"type": "none", "error": "the model's answer has no JSON object", "response": response}

    def load_checkpoint(self, path: str | Path) -> None:
        """Answer calls outside rollouts with these weights instead of ``model_name``'s, from the next call on.

        ``path`` is a run folder (its newest checkpoint is loaded), a checkpoint, a model folder, an adapter folder, or what
        ``save_checkpoint`` wrote. Nothing is unpickled. Raises ConfigError if it is none of these, StoreError if it is damaged.
        """
        if self.engine is not None:
            raise ConfigError(f"this agent has its own engine=, so it can't load {path}; load it into that engine")
        self._serve(local_models.find_checkpoint(path, self.model_name))
        self._followed = None

    def follow(self, run_dir: str | Path) -> None:
        """Answer calls outside rollouts with this run's newest checkpoint at the time of the call, once it has one."""
        self._followed = Path(run_dir)

    def _serve(self, served: local_models.Served) -> None:
        if served != self._served:
            self._served, self._user = served, local_models.User()  # dropping the old user lets its engine end

    def start_model(self) -> str:
        """Return the model that training this agent starts from.

        Raises ConfigError if the agent answers with an adapter or a single file, because training needs a whole model.
        """
        trained = self._followed or (self._served.weights if self._served else None)
        if trained is not None:
            raise ConfigError(
                f"this agent answers with {trained}, but training starts from a whole model: resume its run with run_dir=, or "
                "pass a model folder as model="
            )
        return self._served.model if self._served else self.model_name

    async def aclose(self) -> None:
        """End the engine that answers outside rollouts, unless another agent uses it. The next call starts one again."""
        await local_models.leave(self._user)

    async def _ask_here(self, body: JsonDict) -> JsonDict:
        upstream, user = self.engine, None
        if upstream is None:
            if self._followed is not None and last_checkpoint(self._followed) is not None:
                self._serve(local_models.find_checkpoint(self._followed, self.model_name))
            if self._served is None:
                self._serve(local_models.find_model(self.model_name))
            user = self._user  # this reference keeps the engine alive while it answers
            upstream = await local_models.upstream(self._served, user)
        task = asyncio.current_task()
        before = task.cancelling() if task else 0
        try:
            answer = await upstream.chat({"model": self.model_name, **body})
        except UpstreamError as error:
            raise ModelCallError(str(error), status=error.status, code=error.code) from error
        if task and task.cancelling() > before:
            raise asyncio.CancelledError  # when cancelled, an engine may return a partial answer
        return answer


@contextmanager
def request_ids() -> Iterator[list[str]]:
    """Collect the ``Call.request_id`` of each call that agents make in this block, in order."""
    token = _asked.set(ids := [])
    try:
        yield ids
    finally:
        _asked.reset(token)


async def _ask(address: RolloutAddress, body: JsonDict) -> JsonDict:
    """Call the policy at a rollout's address, with retries; the common id lets a retry replace its predecessor."""
    request_id = uuid.uuid4().hex
    _asked.get([]).append(request_id)
    headers = {"authorization": f"Bearer {address.api_key}", "x-art-request-id": request_id, **caller_headers()}
    for retry in range(RETRIES + 1):
        answer = await _post(f"{address.base_url}/chat/completions", {"model": address.model, **body}, headers)
        if not isinstance(answer, _Failed):
            return answer
        if retry == RETRIES or not answer.temporary:
            break
        await asyncio.sleep(min(0.5 * 2**retry if answer.after is None else answer.after, LONGEST_PAUSE))
    raise answer.error


class _Failed:
    """A failed call. ``temporary``: a retry may succeed, in ``after`` seconds if that is known."""

    def __init__(self, error: ModelCallError, temporary: bool, after: float | None = None) -> None:
        self.error, self.temporary, self.after = error, temporary, after


async def _post(url: str, body: JsonDict, headers: Mapping[str, str]) -> JsonDict | _Failed:
    """Send one request over a new connection, because agents run in short-lived event loops."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=CALL_SECONDS, sock_connect=10.0)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()) as session,
            session.post(url, json=body, headers=headers, allow_redirects=False) as response,
        ):
            content, status, answered_headers = await response.read(), response.status, response.headers
    except TimeoutError as error:
        return _failed(f"{url} did not answer in time", error, temporary=False)  # it may still be sampling
    except (aiohttp.ClientError, OSError) as error:
        return _failed(f"the connection to {url} failed ({type(error).__name__}: {error})", error, temporary=True)
    try:
        answer = json.loads(content)
    except ValueError:
        answer = None
    if status == 200 and isinstance(answer, dict):
        return answer
    refusal = answer.get("error") if isinstance(answer, dict) else None
    refusal = refusal if isinstance(refusal, dict) else {}
    text = refusal.get("message") or f"{url} answered with status {status}: {content[:200]!r}"
    error = ModelCallError(str(text), status=status, code=refusal.get("code"))
    temporary = (status in (408, 409, 429) or status >= 500) and answered_headers.get("x-should-retry") != "false"
    return _Failed(error, temporary, _seconds(answered_headers.get("retry-after")))


def _failed(text: str, cause: Exception, *, temporary: bool) -> _Failed:
    error = ModelCallError(f"{text}; is the policy's server running?")
    error.__cause__ = cause
    return _Failed(error, temporary)


def _seconds(retry_after: str | None) -> float | None:
    return float(retry_after) if retry_after and retry_after.isdecimal() else None


def as_json(state: Any) -> str:
    """Return a state as JSON: numpy arrays and numbers become lists and numbers; other values and keys become strings."""
    return json.dumps(_keyed(state), ensure_ascii=False, default=_plain)


def _keyed(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else str(key): _keyed(item) for key, item in value.items()}
    return [_keyed(item) for item in value] if isinstance(value, list | tuple) else value


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    return list(value) if isinstance(value, set | frozenset | tuple) else str(value)


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """Yield the outermost JSON objects in a text, except those that can't be encoded as JSON and UTF-8 again."""
    start = text.find("{")
    while start >= 0:
        end = start + 1
        try:
            value, end = DECODER.raw_decode(text, start)
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, RecursionError):
            pass
        else:
            yield value
        start = text.find("{", end)
