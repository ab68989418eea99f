"""Calls <-> rows. A prompt is a parent call's tokens plus a suffix, a conversation a path of messages, so that a long run
takes room for what is new in each call only. Knows nothing about threads or rollouts' results.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import NoneType

import numpy as np

from art_core.errors import StoreError
from art_core.store.digest import call_digest, chained, parts_of
from art_core.store.recent import Line, Recent, References, Written
from art_core.store.values import (
    Damaged,
    column,
    floats_from_bytes,
    from_json,
    ids_from_bytes,
    request_to_json,
    text_from_column,
    text_to_column,
)
from art_core.types import Call, JsonDict


class CallWriter:
    """Writes calls inside the transaction it is given, and remembers what later calls may build on."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Drop all that is remembered: it may stem from a transaction that was rolled back."""
        self._recent = Recent()
        self._blobs: References[bytes] = References()
        self._messages: References[tuple[int, int]] = References()

    def write(self, db: sqlite3.Connection, rollout_id: str, call: Call) -> None:
        """Add a call. The one that it is a retry of, whose answer was cut off or lost on its way, is marked as replaced."""
        parts = parts_of(call)
        prompt = np.frombuffer(parts.prompt, dtype=np.int32)
        line = self._recent.line(rollout_id) or self._recalled(db, rollout_id)
        request = self._request(db, dict(call.request))
        if call.request_id:
            db.execute(
                "UPDATE calls SET replaced = 1 WHERE rollout_id = ? AND request_id = ? AND choice = ? AND replaced = 0 AND "
                "(finish_reason = 'aborted' OR (messages = ? AND settings = ?))",
                (rollout_id, call.request_id, call.choice, request[0], request[2]),
            )
        parent, shared = self._recent.parent(line, prompt)
        digest = chained(rollout_id, line.digest, call_digest(call, parts))
        values = (
            digest,
            rollout_id,
            parent.seq if parent else None,
            shared,
            prompt[shared:].tobytes(),
            parts.sampled,
            parts.logprobs,
            parts.forced,
            int(call.policy_version),
            text_to_column(call.agent),
            text_to_column(call.thread),
            call.request_id,
            int(call.choice),
            None if call.reward is None else float(call.reward),
            float(call.temperature),
            call.finish_reason,
            *request,
            self._blob(db, call.response),
        )
        added = db.execute(
            "INSERT INTO calls (digest, rollout_id, parent, shared, suffix, sampled, logprobs, forced, policy_version, agent, "
            "thread, request_id, choice, reward, temperature, finish_reason, messages, tools, settings, response) "
            f"VALUES ({', '.join('?' * len(values))})",
            values,
        )
        sampled = np.frombuffer(parts.sampled, dtype=np.int32)
        line.digest = digest
        written = Written(added.lastrowid, np.concatenate([prompt, sampled]))
        self._recent.add(rollout_id, line, written, parent, shared)

    def _recalled(self, db: sqlite3.Connection, rollout_id: str) -> Line:
        """Read what the next call of a rollout needs that is new, was written by another process, or has been forgotten."""
        line = Line()
        previous = db.execute(
            "SELECT seq, digest FROM calls WHERE rollout_id = ? ORDER BY seq DESC LIMIT 1", (rollout_id,)
        ).fetchone()
        if previous is not None:
            # Where it is none, the chain ends there, as the audit says.
            line.digest = previous[1] if isinstance(previous[1], bytes) else b""
            # What is damaged is for the audit to tell; the next call is then stored whole.
            with suppress(StoreError, TypeError, ValueError):
                tokens = CallReader(db, rollout_id).tokens_of(previous[0])
                line.calls.append(Written(previous[0], np.frombuffer(tokens, dtype=np.int32)))
        return line

    def _request(self, db: sqlite3.Connection, request: JsonDict) -> tuple[int, int | None, int]:
        """Return the ids of the request's last message (0: it has none), of its tools and of the rest."""
        path = 0
        if isinstance(request.get("messages"), list | tuple):
            for message in request.pop("messages"):
                path = self._message(db, path, self._blob(db, message))
            if path == 0:
                request["messages"] = []
        tools = self._blob(db, request.pop("tools")) if request.get("tools") else None
        return path, tools, self._blob(db, request)

    def _message(self, db: sqlite3.Connection, parent: int, blob: int) -> int:
        found = self._messages.get((parent, blob))
        if found is None:
            added = db.execute("INSERT OR IGNORE INTO messages (parent, blob) VALUES (?, ?)", (parent, blob))
            row = added.lastrowid
            if not added.rowcount:
                row = _there(
                    db.execute("SELECT id FROM messages WHERE parent = ? AND blob = ?", (parent, blob)).fetchone()
                )
            found = self._messages.put((parent, blob), row)
        return found

    def _blob(self, db: sqlite3.Connection, value: object) -> int:
        content = request_to_json(value)
        digest = hashlib.blake2b(content, digest_size=16).digest()
        found = self._blobs.get(digest)
        if found is None:
            added = db.execute("INSERT OR IGNORE INTO blobs (digest, json) VALUES (?, ?)", (digest, content))
            row = added.lastrowid
            if not added.rowcount:
                row = _there(db.execute("SELECT id FROM blobs WHERE digest = ?", (digest,)).fetchone())
            found = self._blobs.put(digest, row)
        return found


def _there(row: tuple[int] | None) -> int:
    """Return the id of a row that SQLite has just refused to add because it is there."""
    if row is None:  # a fault of the file, not of the call, which is kept for a better one
        raise sqlite3.DatabaseError("database disk image is malformed: a row that it has cannot be found")
    return row[0]


def reward_calls(db: sqlite3.Connection, rollout_id: str, rewards: Sequence[float | None]) -> None:
    """Set the rewards of a rollout's calls, in the order of ``CallReader.calls``; None leaves one as it is."""
    found = db.execute(
        "SELECT seq FROM calls WHERE rollout_id = ? AND replaced = 0 ORDER BY seq", (rollout_id,)
    ).fetchall()
    given = [(float(reward), seq) for (seq,), reward in zip(found, rewards, strict=False) if reward is not None]
    db.executemany("UPDATE calls SET reward = ? WHERE seq = ?", given)


_COLUMNS = (
    "seq, parent, shared, suffix, sampled, logprobs, forced, policy_version, agent, thread, request_id, choice, reward, "
    "temperature, finish_reason, messages, tools, settings, response, replaced, digest"
)
_PATHS = """
WITH RECURSIVE path (id, parent, blob) AS (
    SELECT id, parent, blob FROM messages WHERE id IN (SELECT messages FROM calls WHERE {wanted})
    UNION SELECT messages.id, messages.parent, messages.blob FROM messages JOIN path ON messages.id = path.parent
) SELECT path.id, path.parent, path.blob, blobs.json FROM path JOIN blobs ON blobs.id = path.blob
"""
_BLOBS = """
SELECT id, json FROM blobs WHERE id IN (
    SELECT tools FROM calls WHERE {wanted} UNION SELECT settings FROM calls WHERE {wanted}
    UNION SELECT response FROM calls WHERE {wanted}
)
"""


@dataclass(frozen=True)
class RecordedCall:
    """A row of ``calls``, for those who check the file."""

    seq: int
    replaced: bool
    """A retry took its place; it is no part of the trajectory."""
    digest: bytes
    call: Call
    """Without request and response."""


class CallReader:
    """Reads the calls of one rollout; with ``request_ids`` those that these requests made."""

    def __init__(self, db: sqlite3.Connection, rollout_id: str, request_ids: Collection[str] | None = None) -> None:
        self._db = db
        self._rollout = {"rollout": rollout_id}
        self._wanted = "rollout_id = :rollout"
        if request_ids is not None:
            self._rollout["requests"] = json.dumps(list(request_ids))
            self._wanted += " AND request_id IN (SELECT value FROM json_each(:requests))"
        self._tokens: dict[int, bytes] = {}
        """By call: its prompt and sampled ids, int32."""

    def calls(self) -> tuple[Call, ...]:
        """Return the calls in the order in which they were answered, without those that a retry replaced."""
        rows = self._rows()
        self._blobs = {id: from_json(data) for id, data in self._db.execute(self._of(_BLOBS), self._rollout)}
        self._path: dict[int, tuple[int, int]] = {}
        for id, parent, blob, data in self._db.execute(self._of(_PATHS), self._rollout):
            self._path[id] = (parent, blob)
            if blob not in self._blobs:
                self._blobs[blob] = from_json(data)
        # Every row is read, a replaced one too: others may build on its tokens.
        read = [(self._call(row), row[-2]) for row in rows]
        return tuple(call for call, replaced in read if not replaced)

    def recorded(self) -> tuple[RecordedCall, ...]:
        """Return all the rows, in the order in which they were answered."""
        return tuple(RecordedCall(row[0], bool(row[-2]), row[-1], self._call(row, texts=False)) for row in self._rows())

    def _rows(self) -> list[tuple]:
        rows = self._of(f"SELECT {_COLUMNS} FROM calls WHERE {{wanted}} ORDER BY seq")
        return self._db.execute(rows, self._rollout).fetchall()

    def _of(self, query: str) -> str:
        return query.format(wanted=self._wanted)

    def _call(self, row: tuple, *, texts: bool = True) -> Call:
        seq, parent, shared, suffix, sampled, logprobs, forced, *plain, messages, tools, settings, response, _, _ = row
        version, agent, thread, request_id, choice, reward, temperature, finish_reason = plain
        try:
            prompt = self._prompt(seq, parent, shared, suffix)
            self._tokens[seq] = prompt + sampled
            positions = ids_from_bytes(forced)
            if any(not 0 <= position < len(sampled) // 4 for position in positions):
                raise ValueError(f"it has {len(sampled) // 4} sampled tokens and forced ones at {positions}")
            return Call(
                prompt_ids=ids_from_bytes(prompt),
                sampled_ids=ids_from_bytes(sampled),
                logprobs=floats_from_bytes(logprobs, len(sampled) // 4),
                policy_version=column(version, int),
                agent=text_from_column(agent),
                thread=text_from_column(thread),
                request_id=column(request_id, str),
                choice=column(choice, int),
                reward=column(reward, float, NoneType),
                temperature=column(temperature, float),
                finish_reason=column(finish_reason, str),
                forced=positions,
                request=self._request(messages, tools, settings) if texts else {},
                response=column(self._blobs[response], dict) if texts else {},
            )
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise StoreError(f"call {seq} of rollout {self._rollout['rollout']} is damaged: {error}") from error

    def _request(self, messages: int, tools: int | None, settings: int) -> JsonDict:
        request = dict(self._blobs[settings])
        if messages:
            request["messages"] = self._conversation(messages)
        if tools is not None:
            request["tools"] = self._blobs[tools]
        return request

    def _prompt(self, seq: int, parent: int | None, shared: int, suffix: bytes) -> bytes:
        """Return a call's prompt ids; StoreError where the parent that they start with cannot have been there."""
        if parent is None:
            return suffix
        start = self.tokens_of(parent)[: 4 * shared] if 0 < parent < seq else b""
        if not 0 < 4 * shared == len(start):
            raise StoreError(
                f"call {seq} of rollout {self._rollout['rollout']} is damaged: its prompt starts with {shared} tokens of "
                f"call {parent}, which has {len(start) // 4} or did not come before it"
            )
        return start + suffix

    def tokens_of(self, seq: int) -> bytes:
        """Return the tokens of a call as int32; it may belong to another rollout."""
        if seq not in self._tokens:
            row = self._db.execute("SELECT parent, shared, suffix, sampled FROM calls WHERE seq = ?", (seq,)).fetchone()
            if row is None:
                return b""
            parent, shared, suffix, sampled = row
            self._tokens[seq] = self._prompt(seq, parent, shared, suffix) + sampled
        return self._tokens[seq]

    def _conversation(self, last: int) -> list[JsonDict]:
        blobs, child = [], last + 1
        while last:
            if last >= child:
                raise Damaged(f"message {child} goes on from message {last}, which came after it")
            child, (last, blob) = last, self._path[last]
            blobs.append(blob)
        return [self._blobs[blob] for blob in reversed(blobs)]
