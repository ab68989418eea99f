"""Calls <-> rows. A prompt is a parent call's tokens plus a suffix, a conversation a path of messages, so that a long run
takes room for what is new in each call only. Knows nothing about threads or rollouts' results.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections import OrderedDict, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from art_core.errors import StoreError
from art_core.store.digest import call_digest, chained, parts_of
from art_core.store.values import (
    floats_from_bytes,
    from_json,
    ids_from_bytes,
    request_to_json,
    text_from_column,
    text_to_column,
)
from art_core.types import Call, JsonDict

Key = TypeVar("Key")

CANDIDATES = 8
"""Calls of a rollout that are tried as parents: enough for a few sub-agents taking turns."""
TOKENS_REMEMBERED = 2_000_000
"""Of possible parents, over all rollouts; 4 bytes each. A rollout whose calls are forgotten has its last one read again."""
REFERENCES_REMEMBERED = 10_000
"""Ids of messages and other content that is likely to come again, twice: the newer and the older ones."""
SHORTEST_SHARED = 16
"""Tokens; a shorter common start is not worth a parent in another rollout."""


@dataclass(frozen=True, eq=False)
class _Parent:
    seq: int
    tokens: np.ndarray
    """Prompt and sampled ids, int32."""

    def shared(self, prompt: np.ndarray) -> int:
        """Return how many tokens the two have in common at their start."""
        length = min(len(self.tokens), len(prompt))
        differ = self.tokens[:length] != prompt[:length]
        place = int(differ.argmax()) if length else 0
        return place if length and differ[place] else length


class _References(Generic[Key]):
    """Rows' ids by what they hold, those that were asked for least recently forgotten first, a half at a time."""

    def __init__(self) -> None:
        self._newer: dict[Key, int] = {}
        self._older: dict[Key, int] = {}

    def get(self, key: Key) -> int | None:
        found = self._newer.get(key)
        if found is None and (found := self._older.get(key)) is not None:
            self.put(key, found)
        return found

    def put(self, key: Key, row: int) -> int:
        self._newer[key] = row
        if len(self._newer) >= REFERENCES_REMEMBERED:
            self._newer, self._older = {}, self._newer
        return row


class CallWriter:
    """Writes calls inside the transaction it is given, and remembers what later calls may build on."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Drop all that is remembered: it may stem from a transaction that was rolled back."""
        self._recent: OrderedDict[str, deque[_Parent]] = OrderedDict()
        self._roots: deque[_Parent] = deque(maxlen=CANDIDATES)
        self._tokens = 0
        self._blobs: _References[bytes] = _References()
        self._messages: _References[tuple[int, int]] = _References()

    def write(self, db: sqlite3.Connection, rollout_id: str, call: Call) -> None:
        """Add a call. An aborted predecessor with its request id is marked as replaced."""
        parts = parts_of(call)
        prompt = np.frombuffer(parts.prompt, dtype=np.int32)
        db.execute(
            "UPDATE calls SET replaced = 1 WHERE rollout_id = ? AND request_id = ? AND choice = ? AND request_id != '' "
            "AND finish_reason = 'aborted'",
            (rollout_id, call.request_id, call.choice),
        )
        previous = db.execute(
            "SELECT seq, digest FROM calls WHERE rollout_id = ? ORDER BY seq DESC LIMIT 1", (rollout_id,)
        ).fetchone()
        if previous and rollout_id not in self._recent:
            self._recall(db, rollout_id, previous[0])
        parent, shared = self._parent(rollout_id, prompt)
        values = (
            chained(rollout_id, previous and previous[1], call_digest(call, parts)),
            rollout_id,
            parent.seq if parent else None,
            shared,
            prompt[shared:].tobytes(),
            parts.sampled,
            parts.logprobs,
            parts.forced,
            int(call.policy_version),
            text_to_column(call.agent),
            call.request_id,
            int(call.choice),
            None if call.reward is None else float(call.reward),
            float(call.temperature),
            call.finish_reason,
            *self._request(db, dict(call.request)),
            self._blob(db, call.response),
        )
        added = db.execute(
            "INSERT INTO calls (digest, rollout_id, parent, shared, suffix, sampled, logprobs, forced, policy_version, agent, "
            "request_id, choice, reward, temperature, finish_reason, messages, tools, settings, response) "
            f"VALUES ({', '.join('?' * len(values))})",
            values,
        )
        sampled = np.frombuffer(parts.sampled, dtype=np.int32)
        this = _Parent(added.lastrowid, np.concatenate([prompt, sampled]))
        if parent is None:
            self._roots.append(this)
        # What this call begins with entirely is not needed any more: whatever shares tokens with that shares them with this.
        self._remember(rollout_id, this, instead_of=parent if parent and shared == len(parent.tokens) else None)

    def _parent(self, rollout_id: str, prompt: np.ndarray) -> tuple[_Parent | None, int]:
        best, longest = None, 0
        for parent in reversed(self._recent.get(rollout_id, ())):
            if (shared := parent.shared(prompt)) > longest:
                best, longest = parent, shared
        if best is None:
            # Only calls without a parent of their own: a chain then never leads through more than one other rollout.
            for parent in self._roots:
                if (shared := parent.shared(prompt)) > max(longest, SHORTEST_SHARED):
                    best, longest = parent, shared
        return best, longest

    def _recall(self, db: sqlite3.Connection, rollout_id: str, last: int) -> None:
        """Remember a rollout's last call, of another process or forgotten meanwhile, so that the next one can build on it."""
        # What is damaged is for the audit to tell; the next call is then stored whole.
        with suppress(StoreError):
            tokens = CallReader(db, rollout_id).tokens_of(last)
            self._remember(rollout_id, _Parent(last, np.frombuffer(tokens, dtype=np.int32)))

    def _remember(self, rollout_id: str, parent: _Parent, *, instead_of: _Parent | None = None) -> None:
        recent = self._recent.setdefault(rollout_id, deque())
        self._recent.move_to_end(rollout_id)
        if instead_of in recent:
            recent.remove(instead_of)
            self._tokens -= len(instead_of.tokens)
        recent.append(parent)
        self._tokens += len(parent.tokens)
        if len(recent) > CANDIDATES:
            self._tokens -= len(recent.popleft().tokens)
        while self._tokens > TOKENS_REMEMBERED and len(self._recent) > 1:
            _, oldest = self._recent.popitem(last=False)
            self._tokens -= sum(len(parent.tokens) for parent in oldest)

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
            db.execute("INSERT OR IGNORE INTO messages (parent, blob) VALUES (?, ?)", (parent, blob))
            row = db.execute("SELECT id FROM messages WHERE parent = ? AND blob = ?", (parent, blob)).fetchone()
            found = self._messages.put((parent, blob), row[0])
        return found

    def _blob(self, db: sqlite3.Connection, value: object) -> int:
        content = request_to_json(value)
        digest = hashlib.blake2b(content, digest_size=16).digest()
        found = self._blobs.get(digest)
        if found is None:
            db.execute("INSERT OR IGNORE INTO blobs (digest, json) VALUES (?, ?)", (digest, content))
            found = self._blobs.put(
                digest, db.execute("SELECT id FROM blobs WHERE digest = ?", (digest,)).fetchone()[0]
            )
        return found


def reward_calls(db: sqlite3.Connection, rollout_id: str, rewards: Sequence[float | None]) -> None:
    """Set the rewards of a rollout's calls, in the order of ``CallReader.calls``; None leaves one as it is."""
    found = db.execute(
        "SELECT seq FROM calls WHERE rollout_id = ? AND replaced = 0 ORDER BY seq", (rollout_id,)
    ).fetchall()
    given = [(float(reward), seq) for (seq,), reward in zip(found, rewards, strict=False) if reward is not None]
    db.executemany("UPDATE calls SET reward = ? WHERE seq = ?", given)


_COLUMNS = (
    "seq, parent, shared, suffix, sampled, logprobs, forced, policy_version, agent, request_id, choice, reward, "
    "temperature, finish_reason, messages, tools, settings, response, replaced, digest"
)
_PATHS = """
WITH RECURSIVE path (id, parent, blob) AS (
    SELECT id, parent, blob FROM messages WHERE id IN (SELECT messages FROM calls WHERE rollout_id = :rollout)
    UNION SELECT messages.id, messages.parent, messages.blob FROM messages JOIN path ON messages.id = path.parent
) SELECT path.id, path.parent, path.blob, blobs.json FROM path JOIN blobs ON blobs.id = path.blob
"""
_BLOBS = """
SELECT id, json FROM blobs WHERE id IN (
    SELECT tools FROM calls WHERE rollout_id = :rollout UNION SELECT settings FROM calls WHERE rollout_id = :rollout
    UNION SELECT response FROM calls WHERE rollout_id = :rollout
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
    """Reads the calls of one rollout."""

    def __init__(self, db: sqlite3.Connection, rollout_id: str) -> None:
        self._db = db
        self._rollout = {"rollout": rollout_id}
        self._tokens: dict[int, bytes] = {}
        """By call: its prompt and sampled ids, int32."""

    def calls(self) -> tuple[Call, ...]:
        """Return the calls in the order in which they were answered, without those that a retry replaced."""
        rows = self._rows()
        self._blobs = {id: from_json(data) for id, data in self._db.execute(_BLOBS, self._rollout)}
        self._path: dict[int, tuple[int, int]] = {}
        for id, parent, blob, data in self._db.execute(_PATHS, self._rollout):
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
        return self._db.execute(
            f"SELECT {_COLUMNS} FROM calls WHERE rollout_id = :rollout ORDER BY seq", self._rollout
        ).fetchall()

    def _call(self, row: tuple, *, texts: bool = True) -> Call:
        seq, parent, shared, suffix, sampled, logprobs, forced, *plain, messages, tools, settings, response, _, _ = row
        version, agent, request_id, choice, reward, temperature, finish_reason = plain
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
                policy_version=version,
                agent=text_from_column(agent),
                request_id=request_id,
                choice=choice,
                reward=reward,
                temperature=temperature,
                finish_reason=finish_reason,
                forced=positions,
                request=self._request(messages, tools, settings) if texts else {},
                response=self._blobs[response] if texts else {},
            )
        except (TypeError, ValueError) as error:
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
        blobs = []
        while last:
            last, blob = self._path[last]
            blobs.append(blob)
        return [self._blobs[blob] for blob in reversed(blobs)]
