"""Call -> digest of what was sampled: ids, logprobs and how they came about, not the request's and answer's text.

Whoever changes a call in the file can write a new digest too, so a digest finds accidents and careless hands; that the weights
give the stored logprobs is the stronger proof (``art audit``). Knows nothing about SQLite.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import orjson

from art_core.store.values import floats_to_bytes, ids_to_bytes
from art_core.types import Call

SIZE = 16
"""Bytes."""


class Parts(NamedTuple):
    """A call's numbers as the file holds them."""

    prompt: bytes
    sampled: bytes
    logprobs: bytes
    forced: bytes


def parts_of(call: Call) -> Parts:
    """Return a call's numbers as bytes."""
    return Parts(
        ids_to_bytes(call.prompt_ids),
        ids_to_bytes(call.sampled_ids),
        floats_to_bytes(call.logprobs),
        ids_to_bytes(call.forced),
    )


def call_digest(call: Call, parts: Parts | None = None) -> bytes:
    """Return BLAKE2b of a call's prompt ids, sampled ids, logprobs, forced positions, policy version, temperature, finish
    reason, request id and choice; ``parts`` are ``parts_of(call)`` where they are known."""
    parts = parts or parts_of(call)
    head = (
        int(call.policy_version), float(call.temperature), call.finish_reason, call.request_id, int(call.choice),
        *map(len, parts),
    )  # fmt: skip
    digest = hashlib.blake2b(orjson.dumps(head), digest_size=SIZE)
    for part in parts:
        digest.update(part)
    return digest.digest()


def chained(rollout_id: str, previous: bytes | None, digest: bytes) -> bytes:
    """Return what is stored beside a call: its digest after that of the rollout's call before it, None for the first."""
    before = rollout_id.encode("utf-8", "surrogatepass") if previous is None else previous
    return hashlib.blake2b(before + digest, digest_size=SIZE).digest()
