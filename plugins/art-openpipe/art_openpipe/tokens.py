"""``art.tokenize`` and ``art.tensorize`` return the tokens that were recorded; nothing is tokenized again."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Iterable, Sequence
from enum import IntFlag
from fnmatch import fnmatchcase
from types import SimpleNamespace
from typing import Any

from openai.types.chat.chat_completion import Choice

from art_core.errors import CaptureError, ConfigError
from art_core.plugin_api import model_folder
from art_core.types import Call
from art_openpipe.record import key_of, records


class TokenFlag(IntFlag):
    """What is known of a token; flags are combined. A logprob is that of the request's temperature: processed."""

    EXACT = 1
    SAMPLED = 2
    ASSISTANT = 4
    STOP = 8
    OUTPUT = 16
    RAW_LOGPROBS = 32
    PROCESSED_LOGPROBS = 64


_OUTPUT = TokenFlag.EXACT | TokenFlag.SAMPLED | TokenFlag.ASSISTANT | TokenFlag.OUTPUT | TokenFlag.PROCESSED_LOGPROBS


async def tokenize(items: Iterable[Any], **options: Any) -> list[Any]:
    """Return, for each trajectory or group, ``tokens``, ``logprobs`` (NaN where nothing was sampled) and ``flags``.

    A group has them in its ``trajectories`` and, with ``multi_history=True``, a trajectory in its ``histories``. ``model``
    selects models by name or shell pattern.
    """
    return await asyncio.to_thread(lambda: [item.tokenize(**options) for item in items])


async def tensorize(items: Iterable[Any], **options: Any) -> list[Any]:
    """Return what ``tokenize`` does as tensors on ``device``."""
    return await asyncio.to_thread(lambda: [item.tensorize(**options) for item in items])


def tokenized(item: Any, *, multi_history: bool = False, model: str = "*", to: Any = list, **others: Any) -> Any:
    """Tokenize a trajectory, a history or a group; ``to`` converts each sequence."""
    for name in others:
        raise ConfigError(f"tokenize: {name} is not supported by art, which has recorded the tokens; remove it")
    if hasattr(item, "trajectories"):
        each = [tokenized(trajectory, multi_history=multi_history, model=model, to=to) for trajectory in item]
        return SimpleNamespace(trajectory_group=item, trajectories=each, metrics=item.metrics, metadata=item.metadata)
    found = [_sequence(name, chain, to) for name, chain in _chains(item.choices(), model)]
    if not multi_history and len(found) != 1:
        raise ConfigError(f"there are {len(found)} sequences of tokens, not one: pass multi_history=True, or a model=")
    fields = {name: getattr(item, name, None) for name in ("reward", "metrics", "metadata")}
    return SimpleNamespace(**{"histories": found} if multi_history else vars(found[0]), trajectory=item, **fields)


def _chains(choices: Sequence[Choice], model: str) -> list[tuple[str, list[Call]]]:
    """Return the choices' calls: one whose prompt starts with all tokens of another follows it."""
    keys = dict.fromkeys(key_of(choice) for choice in choices)
    found = {record.model: record.recorded(set(keys) - {None}) for record in list(records)}
    if unknown := len(keys) - sum(map(len, found.values())):
        raise CaptureError(f"{unknown} answers were not recorded by the registered models ({', '.join(found)})")
    chains: list[tuple[str, list[Call]]] = []
    for name, key in [(name, key) for name in found if fnmatchcase(name, model) for key in keys if key in found[name]]:
        call = found[name][key]
        for owner, chain in chains:
            before = chain[-1].prompt_ids + chain[-1].sampled_ids
            if owner == name and call.prompt_ids[: len(before)] == before:
                chain.append(call)
                break
        else:
            chains.append((name, [call]))
    return chains


def _sequence(model: str, chain: list[Call], to: Any) -> SimpleNamespace:
    last = chain[-1]
    tokens = [*last.prompt_ids, *last.sampled_ids]
    logprobs, flags = [math.nan] * len(tokens), [TokenFlag.EXACT] * len(tokens)
    for call in chain:
        start, end = len(call.prompt_ids), len(call.prompt_ids) + len(call.sampled_ids)
        logprobs[start:end], flags[start:end] = call.logprobs, [_OUTPUT] * (end - start)
        if call.finish_reason in ("stop", "tool_calls") and end > start:
            flags[end - 1] |= TokenFlag.STOP
    return SimpleNamespace(model=model, tokens=to(tokens), logprobs=to(logprobs), flags=to(flags))


def get_tokenizer(base_model: str, *, revision: str | None = None, **options: Any) -> Any:
    """Return the tokenizer of a model, which the environment variable ART_MODEL replaces; ``options`` go to transformers."""
    from transformers import AutoTokenizer

    folder = base_model if revision else model_folder(os.environ.get("ART_MODEL") or base_model)
    return AutoTokenizer.from_pretrained(folder, revision=revision or "main", **options)
