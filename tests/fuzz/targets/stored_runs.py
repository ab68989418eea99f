"""A run's file and a checkpoint's manifest with damage in them -> what was written, or StoreError (``art_core.store``)."""

from __future__ import annotations

import json
import sqlite3
import tempfile
from collections.abc import Callable
from contextlib import closing, suppress
from functools import cache
from pathlib import Path
from typing import Any

from art_audit.ledger import gaps
from art_core.errors import StoreError
from art_core.learner.checkpoint import read_manifest, read_state
from art_core.store import Store
from art_core.store.digest import call_digest, chain_digest
from art_core.types import Call, Trajectory
from art_server.decision import decision_of
from art_server.store_view import RolloutFilter, StoreView, read_snapshot
from fuzz.choices import ODD, Choices, changed, written

ROLLOUTS = ("r0", "r1")
MANIFEST = {
    "version": 3,
    "model": "tiny",
    "files": {"config.json": "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"},
}
CELLS = (
    *(it for it in ODD if not isinstance(it, list | dict)),
    b"",
    b"\x00\x00",
    b"\xff" * 9,
    b"[]",
    b"{",
    b"null",
    b'"a"',
    b"[" * 2000,
)
"""What a cell of SQLite can hold; a bool is a number there."""
TABLES = {
    "meta": ("key", "value"), "blobs": ("digest", "json"), "messages": ("id", "parent", "blob"),
    "rollouts": ("rollout_id", "step", "split", "task_id", "task", "grp", "started", "finished", "output", "error",
    "seconds"),
    "calls": ("seq", "digest", "rollout_id", "replaced", "parent", "shared", "suffix", "sampled", "logprobs",
    "forced", "policy_version",
              "agent", "thread", "request_id", "choice", "reward", "temperature", "finish_reason", "messages",
              "tools", "settings", "response"),
    "scores": ("rollout_id", "reward", "metrics", "advantage", "scored_by", "at", "notes", "aside"),
    "steps": ("step", "metrics", "at"), "updates": ("step", "version", "targets", "trained"), "openings": ("version",
    "at"),
}  # fmt: skip

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""A store waits for its disk; here it need not have one."""

SEEDS = [
    b"\x00\x00", b"\x00\x01\x08\x00\x40", b"\x01\x01\x02\x01\x01\x04", b"\x01\x01\x04\x04\x01\x02",
    b"\x01\x02\x01\x01\x02\x07\x04\x0c\x01\x03",
    b"\x02\x00", b"\x02\x02\x01\x01\x05\x00", b"\x03\x01\x03\x08\x01\x01",
]  # fmt: skip


def one_input(data: bytes) -> None:
    choices = Choices(data)
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        file = Path(folder) / "run.sqlite"
        match choices.byte() % 4:
            case 2:
                _check_manifest(Path(folder), written(changed(MANIFEST, choices)))
            case 0:
                file.write_bytes(_damaged(choices))
                _check(file, opens=choices.byte() % 2 == 1, writes=choices.byte() % 2 == 1)
            case way:
                file.write_bytes(_whole())
                for _ in range(choices.byte() % 4):
                    _change_cell(file, choices)
                _check(file, opens=choices.byte() % 2 == 1, writes=way == 3)


def _check_manifest(folder: Path, text: bytes) -> None:
    (folder / "learner.json").write_bytes(text)
    (folder / "config.json").write_text("{}")
    for read in (read_manifest, read_state):
        with suppress(StoreError):
            state = read(folder)
            assert type(state["version"]) is int and isinstance(state.get("files", {}), dict)


def _damaged(choices: Choices) -> bytes:
    """Return the file with bytes of it changed, or cut."""
    content = bytearray(_whole())
    telling = _telling()
    for _ in range(choices.byte() % 16):
        content[telling[choices.below(len(telling))]] ^= 1 + choices.byte() % 255
    if choices.byte() % 8 == 7:
        del content[choices.below(len(content)) :]
    return bytes(content)


def _change_cell(file: Path, choices: Choices) -> None:
    table = choices.pick(list(TABLES))
    name = choices.pick(TABLES[table])
    row, value = 1 + choices.below(8), choices.pick(CELLS)
    with closing(sqlite3.connect(file)) as db, suppress(sqlite3.Error, OverflowError, UnicodeEncodeError):
        db.execute(f"UPDATE {table} SET {name} = ? WHERE rowid = ?", (value, row))  # the names are of TABLES
        db.commit()


def _check(file: Path, *, opens: bool, writes: bool) -> None:
    for question in QUESTIONS:
        with suppress(StoreError):
            json.dumps(read_snapshot(file, question), default=str)
    if not opens:
        return
    try:
        store = Store(file)
    except StoreError:
        return
    try:
        _check_store(store, writes)
    finally:
        with suppress(StoreError):
            store.close()


def _check_store(store: Store, writes: bool) -> None:
    for ask in (store.callers, store.openings, store.rollouts, store.trajectories, store.steps,
    lambda: list(store.updates()),
                lambda: gaps(store, "calls"), lambda: store.meta("model")):  # fmt: skip
        with suppress(StoreError):
            ask()
    before = {name: _recorded(store, name) for name in ROLLOUTS}
    for name in ROLLOUTS:
        with suppress(StoreError):
            assert all(isinstance(it, Trajectory) for it in [store.trajectory(name)])
            store.scores(name)
        known = {_numbers(call) for call in _calls(name)}
        assert all(_numbers(call) in known for call in before[name]), "what its digest confirms is what was recorded"
    if writes:
        added = Call(
            prompt_ids=(1, 2, 3, 4, 5, 9), sampled_ids=(7,), logprobs=(-1.5,), request_id="new", policy_version=2
        )
        with suppress(StoreError):
            store.record("r0", added)
            store.flush()
            last = store.recorded("r0")[-1].call
            assert _numbers(last) == _numbers(added), "a run that goes on keeps what it is given"


def _recorded(store: Store, name: str) -> list[Call]:
    """Return a rollout's calls up to the first that its digest does not confirm."""
    found, previous = [], None
    with suppress(StoreError):
        for row in store.recorded(name):
            if chain_digest(name, previous, call_digest(row.call)) != row.digest:
                break
            found.append(row.call)
            previous = row.digest
    return found


def _numbers(call: Call) -> tuple[object, ...]:
    """Return what digests are of."""
    version, temperature, choice = call.policy_version, call.temperature, call.choice
    ids = call.prompt_ids, call.sampled_ids, call.logprobs, call.forced
    return (*ids, version, temperature, choice, call.finish_reason, call.request_id)


def _calls(name: str) -> list[Call]:
    asked = [{"role": "user", "content": f"a{name}"}]
    first = Call(
        prompt_ids=(1, 2, 3), sampled_ids=(4, 5), logprobs=(-0.5, -0.1), forced=(1,), agent="team/a", thread="t",
        request_id=f"q{name}",
        request={"messages": asked, "tools": [{"type": "function"}], "temperature": 1.0},
        response={"role": "assistant", "content": "b"},
    )  # fmt: skip
    said = [*asked, first.response, {"role": "user", "content": "c"}]
    second = Call(
        prompt_ids=(1, 2, 3, 4, 5, 6), sampled_ids=(7,), logprobs=(-0.25,), policy_version=1, choice=1,
        request_id="q2", finish_reason="length",
        request={"messages": said, "temperature": 1.0}, response={"role": "assistant", "content": "d"}, reward=0.5,
    )  # fmt: skip
    return [first, second]


@cache
def _whole() -> bytes:
    """Return the file of a small run."""
    with tempfile.TemporaryDirectory() as folder:
        with Store(Path(folder) / "run.sqlite") as store:
            store.set_meta("model", "tiny")
            for number, name in enumerate(ROLLOUTS):
                store.add_rollout(name, task={"input": "t"}, step=1, split="train", task_id="t", group="1/t")
                for call in _calls(name):
                    store.record(name, call)
                store.finish_rollout(name, output="d", error="e" if number else None, seconds=1.5)
            store.add_scores(
                ROLLOUTS, (0.0, 1.0), metrics=[{"a": 1.0}, {}], notes=[{}, {"a": "b"}], advantages=(-1.0, 1.0), by="me"
            )
            store.add_step(1, {"loss": 0.5})
            store.add_update(1, 1, store.trajectories(), targets=6.0)
            store.add_opening(0)
        return (Path(folder) / "run.sqlite").read_bytes()


@cache
def _telling() -> list[int]:
    """Return where the file has something."""
    return [place for place, byte in enumerate(_whole()) if byte]


PAGE = {"limit": 5, "offset": 0}
QUESTIONS: tuple[Callable[[StoreView], Any], ...] = (
    lambda view: view.meta("model"),
    lambda view: (view.step_counts(), view.steps(after=0, limit=9), view.splits(), view.progress(1, "train")),
    lambda view: view.rollouts(RolloutFilter(), **PAGE),
    lambda view: view.groups(RolloutFilter(split="train"), **PAGE),
    lambda view: view.tasks(split=None, **PAGE),
    lambda view: view.rollouts(RolloutFilter(outcome="success", at_least=0, agent="a"), **PAGE, order="lowest"),
    lambda view: (view.agents(), view.rollouts_by_id(ROLLOUTS), view.cut_off(ROLLOUTS)),
    lambda view: decision_of("run", Path("nowhere"), view),
    *(lambda view, name=name: (view.rollout(name), view.scores(name), view.call_rewards([name])) for name in ROLLOUTS),
    *(lambda view, name=name: view.calls(name) for name in ROLLOUTS),
)
