"""Call -> digest of its numbers: ids, logprobs and how they were sampled, not the text of request and answer.

Whoever changes a stored call can store a new digest too, so digests find accidents; the stronger proof is that the weights give
the stored logprobs (``art audit``).
"""

from __future__ import annotations

import hashlib

import orjson

from art_core.store.values import floats_to_bytes, ids_to_bytes
from art_core.types import Call

SIZE = 16
"""Bytes per digest."""

Parts = tuple[bytes, bytes, bytes, bytes]


def parts_of(call: Call) -> Parts:
    """Return a call's prompt ids, sampled ids, logprobs and forced positions as the file holds them."""
    return (
        ids_to_bytes(call.prompt_ids),
        ids_to_bytes(call.sampled_ids),
        floats_to_bytes(call.logprobs),
        ids_to_bytes(call.forced),
    )


def call_digest(call: Call, parts: Parts | None = None) -> bytes:
    """Return BLAKE2b of a call's prompt ids, sampled ids, logprobs, forced positions, policy version, temperature, finish
    reason, request id and choice; ``parts`` saves computing ``parts_of(call)`` again."""
    parts = parts or parts_of(call)
    head = (
        int(call.policy_version), float(call.temperature), call.finish_reason, call.request_id, int(call.choice),
        *map(len, parts),
    )  # fmt: skip
    return hashlib.blake2b(b"".join((orjson.dumps(head), *parts)), digest_size=SIZE).digest()


def chain_digest(rollout_id: str, previous: bytes | None, digest: bytes) -> bytes:
    """Return what is stored with a call: its digest chained to that of the rollout's call before it, None for the first."""
    before = rollout_id.encode("utf-8", "surrogatepass") if previous is None else previous
    return hashlib.blake2b(before + digest, digest_size=SIZE).digest()
