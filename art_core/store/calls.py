"""Calls <-> rows. A prompt is a parent call's tokens plus a suffix, a conversation a path of messages, so that a call takes
space only for what is new in it."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from art_core.store.digest import call_digest, chain_digest, parts_of
from art_core.store.recent import CANDIDATES, Recent, References, RolloutTail, WrittenCall
from art_core.store.schema import DAMAGED
from art_core.store.values import (
    floats_from_bytes,
    from_json,
    ids_from_bytes,
    object_from_json,
    request_to_json,
    text_to_column,
    to_json,
)  # fmt: skip
from art_core.types import Call, JsonDict


def insert(db: sqlite3.Connection, table: str, values: Mapping[str, Any]) -> sqlite3.Cursor:
    """Add a row to a table; ``values`` by column, whose names are trusted."""
    return db.execute(_insertion(table, tuple(values)), tuple(values.values()))


@cache
def _insertion(table: str, names: tuple[str, ...]) -> str:
    return f"INSERT INTO {table} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"


class CallWriter:
    """Writes calls in the transaction it is passed, and remembers what later calls may extend."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Drop all that is remembered: it may stem from a transaction that was rolled back."""
        self._recent = Recent()
        self._blobs: References[bytes] = References()
        self._messages: References[tuple[int, int]] = References()

    def write(self, db: sqlite3.Connection, rollout_id: str, call: Call) -> None:
        """Add a call. If it retries a request whose answer was aborted or lost in transit, the earlier call is marked as
        replaced."""
        prompt_bytes, sampled_bytes, logprobs, forced = parts = parts_of(call)
        prompt, sampled = np.frombuffer(prompt_bytes, dtype=np.int32), np.frombuffer(sampled_bytes, dtype=np.int32)
        line = self._recent.line(rollout_id) or _read_tail(db, rollout_id)
        messages, tools, settings = self._request(db, dict(call.request))
        if call.request_id:
            db.execute(
                "UPDATE calls SET replaced = 1 WHERE rollout_id = ? AND request_id = ? AND choice = ? AND replaced = 0 AND "
                "(finish_reason = 'aborted' OR (messages = ? AND settings = ?))",
                (rollout_id, call.request_id, call.choice, messages, settings),
            )
        parent, shared = self._recent.parent(line, prompt)
        line_digest = chain_digest(rollout_id, line.digest, call_digest(call, parts))
        values = {
            "digest": line_digest,
            "rollout_id": rollout_id,
            "parent": parent.seq if parent else None,
            "shared": shared,
            "suffix": prompt[shared:].tobytes(),
            "sampled": sampled_bytes,
            "logprobs": logprobs,
            "forced": forced,
            "policy_version": int(call.policy_version),
            "agent": text_to_column(call.agent),
            "thread": text_to_column(call.thread),
            "request_id": call.request_id,
            "choice": int(call.choice),
            "reward": None if call.reward is None else float(call.reward),
            "temperature": float(call.temperature),
            "finish_reason": call.finish_reason,
            "messages": messages,
            "tools": tools,
            "settings": settings,
            "response": self._blob(db, call.response),
            "usage": to_json(dict(call.usage)) if call.usage else None,
        }
        seq = insert(db, "calls", values).lastrowid
        line.digest = line_digest
        self._recent.add(rollout_id, line, WrittenCall(seq, np.concatenate([prompt, sampled])), parent, shared)

    def _request(self, db: sqlite3.Connection, request: JsonDict) -> tuple[int, int | None, int]:
        """Return the ids of the request's last message (0 if it has none), of its tools and of the rest."""
        last = 0
        if isinstance(request.get("messages"), list | tuple):
            for message in request.pop("messages"):
                last = self._message(db, last, self._blob(db, message))
            if last == 0:
                request["messages"] = []
        tools = self._blob(db, request.pop("tools")) if request.get("tools") else None
        return last, tools, self._blob(db, request)

    def _message(self, db: sqlite3.Connection, parent: int, blob: int) -> int:
        key = parent, blob
        row = self._messages.get(key)
        if row is None:
            added = db.execute("INSERT OR IGNORE INTO messages (parent, blob) VALUES (?, ?)", key)
            query = "SELECT id FROM messages WHERE parent = ? AND blob = ?"
            row = self._messages.put(key, _row_id(db, added, query, key))
        return row

    def _blob(self, db: sqlite3.Connection, value: object) -> int:
        content = request_to_json(value)
        digest = hashlib.blake2b(content, digest_size=16).digest()
        row = self._blobs.get(digest)
        if row is None:
            added = db.execute("INSERT OR IGNORE INTO blobs (digest, json) VALUES (?, ?)", (digest, content))
            row = self._blobs.put(digest, _row_id(db, added, "SELECT id FROM blobs WHERE digest = ?", (digest,)))
        return row


def _row_id(db: sqlite3.Connection, added: sqlite3.Cursor, query: str, key: tuple) -> int:
    """Return the id of the row that was ``added``, or that ``query`` finds if it existed."""
    if added.rowcount:
        return added.lastrowid
    row = db.execute(query, key).fetchone()
    if row is None:  # the file's fault, not the call's, which waits until it is fixed
        raise sqlite3.DatabaseError("database disk image is malformed: an existing row can't be found")
    return row[0]


def _read_tail(db: sqlite3.Connection, rollout_id: str) -> RolloutTail:
    """Read what the next call needs of a rollout that is new, was written by another process, or has been forgotten."""
    line, reader = RolloutTail(), CallReader(db, rollout_id)
    query = "SELECT seq, digest FROM calls WHERE rollout_id = ? ORDER BY seq DESC LIMIT ?"
    for seq, digest in db.execute(query, (rollout_id, CANDIDATES)).fetchall():
        if line.digest is None:
            line.digest = digest if isinstance(digest, bytes) else b""
        # The audit reports what is damaged; the chain then restarts here, and the call is stored whole.
        with suppress(*DAMAGED):
            tokens = np.array(reader.tokens_of(seq), dtype=np.int32)
            if all(later.shared(tokens) < len(tokens) for later in line.calls):  # the later one begins with all of it
                line.calls.insert(0, WrittenCall(seq, tokens))
    return line


def reward_calls(db: sqlite3.Connection, rollout_id: str, calls: Sequence[Call]) -> None:
    """Store the rewards of some of a rollout's calls, None too; only their order tells those without a request id apart."""
    query = "SELECT seq FROM calls WHERE rollout_id = ? AND request_id = '' ORDER BY seq"
    unnamed = iter(db.execute(query, (rollout_id,)).fetchall())
    which = "rollout_id = ? AND request_id = ? AND choice = ? AND replaced = 0 AND (request_id <> '' OR seq = ?)"
    for c in calls:
        reward = None if c.reward is None else float(c.reward)
        [seq] = [None] if c.request_id else next(unnamed, [None])
        db.execute(f"UPDATE calls SET reward = ? WHERE {which}", (reward, rollout_id, c.request_id, c.choice, seq))


@dataclass(frozen=True)
class RecordedCall:
    """A row of ``calls``, for audits."""

    seq: int
    replaced: bool
    """Replaced by a retry, so not part of the trajectory."""
    digest: bytes
    call: Call
    """Without request and response."""


_COLUMNS = (
    "seq, parent, shared, suffix, sampled, logprobs, forced, policy_version, agent, thread, request_id, choice, reward, "
    "temperature, finish_reason, messages, tools, settings, response, usage, replaced, digest"
)


class CallReader:
    """Reads the calls of one rollout, or only those that ``request_ids`` made. Raises ``BROKEN`` (schema.py) for damage."""

    def __init__(self, db: sqlite3.Connection, rollout_id: str, request_ids: Collection[str] | None = None) -> None:
        self._db = db
        self._rollout_id = rollout_id
        self._request_ids = request_ids
        self._tokens: dict[int, tuple[int, ...]] = {}
        """By call: its prompt and sampled ids. Calls share the integers of a common start."""
        self._blobs: dict[int, Any] = {}
        self._messages: dict[int, tuple[int, Any]] = {}
        """By id: the message before it (0: none) and its content."""

    def calls(self) -> tuple[Call, ...]:
        """Return the calls in the order of their answers, without those replaced by a retry."""
        # Replaced rows are read too: others may extend their tokens.
        calls = [(self._call(row), row[-2]) for row in self._rows()]
        return tuple(call for call, replaced in calls if not replaced)

    def recorded(self) -> tuple[RecordedCall, ...]:
        """Return all rows, in the order of their answers."""
        return tuple(RecordedCall(row[0], bool(row[-2]), row[-1], self._call(row, texts=False)) for row in self._rows())

    def _rows(self) -> list[tuple]:
        where, values = "rollout_id = ?", [self._rollout_id]
        if self._request_ids is not None:
            where += " AND request_id IN (SELECT value FROM json_each(?))"
            values.append(json.dumps(list(self._request_ids)))
        return self._db.execute(f"SELECT {_COLUMNS} FROM calls WHERE {where} ORDER BY seq", values).fetchall()

    def _call(self, row: tuple, *, texts: bool = True) -> Call:
        seq, parent, shared, suffix, sampled, logprobs, forced, *plain = row[:15]
        messages, tools, settings, response, usage = row[15:20]
        version, agent, thread, request_id, choice, reward, temperature, finish_reason = plain
        try:
            prompt, sampled = self._prompt(parent, shared, suffix, seq), ids_from_bytes(sampled)
            self._tokens[seq] = prompt + sampled
            count, positions = len(sampled), ids_from_bytes(forced)
            if any(not 0 <= position < count for position in positions):
                raise ValueError(f"it has {count} sampled tokens and forced ones at {positions}")
            return Call(
                prompt_ids=prompt,
                sampled_ids=sampled,
                logprobs=floats_from_bytes(logprobs, count),
                policy_version=version,
                agent=agent,
                thread=thread,
                request_id=request_id,
                choice=choice,
                reward=reward,
                temperature=temperature,
                finish_reason=finish_reason,
                forced=positions,
                request=self._request(messages, tools, settings) if texts else {},
                response={**self._blob(response)} if texts else {},
                usage=object_from_json(usage),
            )
        except DAMAGED as error:
            raise ValueError(f"call {seq} of rollout {self._rollout_id!r}: {error}") from error

    def _request(self, last_message: int, tools: int | None, settings: int) -> JsonDict:
        request = {**self._blob(settings)}
        if last_message:
            request["messages"] = self._conversation(last_message)
        if tools is not None:
            request["tools"] = self._blob(tools)
        return request

    def _conversation(self, last: int) -> list[JsonDict]:
        conversation = []
        while last:
            if last not in self._messages:
                query = "SELECT parent, json FROM messages JOIN blobs ON blobs.id = blob WHERE messages.id = ?"
                before, content = self._db.execute(query, (last,)).fetchone()
                if before >= last:
                    raise ValueError(f"message {last} follows message {before}, which is newer")
                self._messages[last] = before, from_json(content)
            last, message = self._messages[last]
            conversation.append(message)
        return conversation[::-1]

    def _blob(self, id: int) -> Any:
        if id not in self._blobs:
            [content] = self._db.execute("SELECT json FROM blobs WHERE id = ?", (id,)).fetchone()
            self._blobs[id] = from_json(content)
        return self._blobs[id]

    def _prompt(self, parent: int | None, shared: int, suffix: bytes, seq: int) -> tuple[int, ...]:
        """Return the prompt ids of call ``seq``. Raises ValueError if it cannot start with its parent's tokens."""
        if parent is None:
            return ids_from_bytes(suffix)
        start = self.tokens_of(parent)[:shared] if 0 < parent < seq else ()
        if not 0 < shared == len(start):
            raise ValueError(f"the first {shared} tokens should be of call {parent}, which has {len(start)}")
        return start + ids_from_bytes(suffix)

    def tokens_of(self, seq: int) -> tuple[int, ...]:
        """Return prompt and sampled ids of a call, which may belong to another rollout."""
        unread: list[tuple] = []
        ancestor: int | None = seq
        while ancestor is not None and ancestor not in self._tokens:
            query = "SELECT parent, shared, suffix, seq, sampled FROM calls WHERE seq = ?"
            row = self._db.execute(query, (ancestor,)).fetchone()
            if row is None or (row[0] is not None and row[0] >= ancestor):
                raise ValueError(f"call {ancestor}, whose tokens it starts with, is missing or has a later parent")
            unread.append(row)
            ancestor = row[0]
        for parent, shared, suffix, ancestor, sampled in reversed(unread):
            self._tokens[ancestor] = self._prompt(parent, shared, suffix, ancestor) + ids_from_bytes(sampled)
        return self._tokens[seq]
