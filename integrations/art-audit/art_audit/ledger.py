"""A run's store -> whatever in it differs from what was recorded. Needs no model."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from art_audit.report import Findings
from art_core.errors import StoreError
from art_core.plugin_api import Display
from art_core.store import RecordedCall, Store, Update
from art_core.store.digest import call_digest, chain_digest
from art_core.store.rollouts import UPDATE, update_of
from art_core.store.schema import DAMAGED
from art_core.token_tree import build_tree
from art_core.types import Call, TokenTree, Trajectory

Place = tuple[str, int]
"""Rollout and index in ``Trajectory.calls``."""


def read_calls(store: Store, findings: Findings, screen: Display) -> dict[int | None, list[Place]]:
    """Check every call against its digest, and return the places of the calls of each version of the weights.

    The key None is for weights that were lost when training was interrupted and resumed from an older checkpoint.
    """
    for numbers in _numbers(gaps(store, "calls")):
        findings.add("missing", f"calls were removed from the store: {numbers}")
    callers, openings = store.callers(), store.openings()
    screen.phase("reading calls", sum(count for _, _, count in callers))
    by_version: dict[int | None, list[Place]] = defaultdict(list)
    continued = dict(store.rows("SELECT rollout_id, continues FROM rollouts WHERE continues IS NOT NULL"))
    # When the rollout began that sampled each call, for the rollouts that others continue: these replay its calls.
    sampled: dict[str | None, dict[bytes, float]] = {rollout_id: {} for rollout_id in continued.values()}
    for rollout_id, started, count in callers:
        if started is None:
            findings.add("file", "the store has calls of this rollout but no record of the rollout itself", rollout_id)
        try:
            rows = store.recorded(rollout_id)
        except StoreError as error:
            findings.add("file", str(error), rollout_id)
            findings.counts["calls"] += count
            continue
        calls = _check_rows(rollout_id, rows, findings)
        findings.counts["calls"] += len(calls)
        for number, call in enumerate(calls):
            begin = started or 0.0
            if rollout_id in continued or rollout_id in sampled:
                content = call_digest(replace(call, request_id="", choice=0, finish_reason="stop"))
                begin = sampled.get(continued.get(rollout_id), {}).get(content, begin)
                sampled.setdefault(rollout_id, {})[content] = begin
            lost = any(at > begin and version < call.policy_version for at, version in openings)
            by_version[None if lost else call.policy_version].append((rollout_id, number))
        for _ in range(count):
            screen.advance()
    return by_version


def gaps(store: Store, table: Literal["calls", "updates"]) -> list[tuple[int, int]]:
    """Return the ranges (first, last) of row numbers that have been deleted from the table."""
    highest = store.rows("SELECT max(seq) FROM sqlite_sequence WHERE name = ?", (table,))[0][0] or 0
    numbers = [0, *(seq for (seq,) in store.rows(f"SELECT seq FROM {table} ORDER BY seq"))]
    ends = [*numbers[1:], max(highest, numbers[-1]) + 1]
    return [(before + 1, after - 1) for before, after in zip(numbers, ends, strict=True) if after > before + 1]


def _numbers(gaps: Sequence[tuple[int, int]]) -> list[str]:
    return [f"number {first}" if first == last else f"numbers {first} to {last}" for first, last in gaps]


def _check_rows(rollout_id: str, rows: Sequence[RecordedCall], findings: Findings) -> list[Call]:
    """Compare a rollout's calls with their digests; return the calls of its trajectory."""
    calls: list[Call] = []
    previous: bytes | None = None
    for index, row in enumerate(rows):
        if chain_digest(rollout_id, previous, call_digest(row.call)) != row.digest:
            text = (
                f"this call, or one before it, was changed or removed after recording (number {row.seq} in the store)"
            )
            findings.add("digest", text, rollout_id, len(calls))
        if row.replaced and not _was_replaced(row.call, rows[index + 1 :]):
            text = f"a call is marked as replaced by a retry, but the retry is missing (number {row.seq} in the store)"
            findings.add("missing", text, rollout_id)
        if not row.replaced:
            calls.append(row.call)
        previous = row.digest
    return calls


def _was_replaced(call: Call, later: Sequence[RecordedCall]) -> bool:
    return any((row.call.request_id, row.call.choice) == (call.request_id, call.choice) for row in later)


def read_updates(store: Store, findings: Findings, screen: Display) -> None:
    """Compare the records of optimizer steps with the stored calls, and rebuild the steps' trees."""
    screen.phase("reading what was trained", None)
    for numbers in _numbers(gaps(store, "updates")):
        findings.add("trained", f"records of optimizer steps were removed from the store: {numbers}")
    updates = []
    for row in store.rows("SELECT seq FROM updates ORDER BY seq"):
        findings.counts["updates"] += 1
        try:
            update = update_of(*store.rows(UPDATE, row)[0])
        except (StoreError, *DAMAGED) as error:
            text = f"the record of an optimizer step cannot be read (number {row[0]} in the store): {error}"
            findings.add("file", text)
            continue
        _check_update(store, update, findings)
        updates.append(update)
    _check_order(updates, [version for _, version in store.openings()[1:]], findings)


def _check_order(updates: Sequence[Update], resumed: Sequence[int], findings: Findings) -> None:
    """Check that steps and versions rise, unless the run ``resumed`` with older weights in between.

    Versions may have gaps: a step that failed after it had changed the weights has no record.
    """
    later = iter(resumed)
    for before, update in itertools.pairwise(updates):
        rises = update.version > before.version
        if (rises and update.step < before.step) or not (rises or any(it < update.version for it in later)):
            text = (
                f"step {update.step}, which made version {update.version} of the weights, is recorded after step "
                f"{before.step}, which made version {before.version}, although the run did not resume in between"
            )
            findings.add("trained", text)


def _check_update(store: Store, update: Update, findings: Findings) -> None:
    places: list[Place] = []
    calls: list[Call] = []
    complete = True
    for rollout_id, digests in update.trained:
        if rollout_id is None:
            findings.counts["trained_elsewhere"] += 1
            complete = False
            continue
        try:
            rows = [row.call for row in store.recorded(rollout_id) if not row.replaced]
        except StoreError:  # reported by read_calls
            complete = False
            continue
        stored = {call_digest(call): (number, call) for number, call in enumerate(rows)}
        trained = [stored[digest] for digest in digests if digest in stored]
        if missing := len(digests) - len(trained):
            text = f"step {update.step} trained {missing} of its calls that are missing from the store or differ there"
            findings.add("trained", text, rollout_id)
            complete = False
        places += [(rollout_id, number) for number, _ in trained]
        calls += [call for _, call in trained]
    tree = build_tree([Trajectory(task=None, calls=tuple(calls))])
    check_paths(tree, places, calls, findings)
    targets, ended = int(np.count_nonzero(tree.weights)), _without_overlong(tree, calls)
    findings.counts["trained_tokens"] += ended if update.targets == ended else targets
    if complete and update.targets is not None and update.targets not in (targets, ended):
        text = f"step {update.step} trained {update.targets:.0f} targets, but its calls in the store have {targets}"
        findings.add("trained", text)


def _without_overlong(tree: TokenTree, calls: Sequence[Call]) -> int:
    """Return the number of targets if calls that were cut off at their token limit are not trained, as some losses do."""
    ended = np.array([call.finish_reason != "length" for call in calls], dtype=bool)
    return int(np.count_nonzero(tree.weights[ended[tree.call]])) if len(calls) else 0


def check_paths(tree: TokenTree, places: Sequence[Place], calls: Sequence[Call], findings: Findings) -> None:
    """Check that the path to each call's end has exactly the call's prompt and sampled ids."""
    ends = np.cumsum([len(call.sampled_ids) for call in calls])
    for place, call, end in zip(places, calls, ends, strict=True):
        first = end - len(call.sampled_ids)
        if first == end:
            continue
        path = _path(tree, int(tree.target_tokens[end - 1]))
        sampled = tree.tokens[tree.target_tokens[first:end]]
        if path != [*call.prompt_ids, *call.sampled_ids] or sampled.tolist() != list(call.sampled_ids):
            findings.add(
                "context", "the token tree's path to this call differs from its prompt and sampled tokens", *place
            )


def _path(tree: TokenTree, last: int) -> list[int]:
    """Return the token ids from the root to the token at index ``last``."""
    node = int(np.searchsorted(tree.node_starts, last, side="right")) - 1
    pieces = [tree.tokens[tree.node_starts[node] : last + 1]]
    while (node := int(tree.node_parents[node])) >= 0:
        pieces.append(tree.tokens[tree.node_starts[node] : tree.node_starts[node + 1]])
    return np.concatenate(pieces[::-1]).tolist()
