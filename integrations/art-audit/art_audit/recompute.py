"""Recomputes the logprobs of stored calls with the weights that sampled them. One set of weights is loaded at a time."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np

from art_audit.ledger import Place, check_paths
from art_audit.report import Findings
from art_core.errors import ConfigError, StoreError
from art_core.plugin_api import Display, model_folder, weights_hash
from art_core.store import Store
from art_core.store.run_folder import checkpoints
from art_core.token_tree import build_tree
from art_core.types import Call, TokenTree, Trajectory

TOKENS = 4096
"""Most tokens of a tree that is computed in one pass, unless a single call is longer."""

Batch = list[tuple[Place, Call]]


def recompute(
    store: Store, run_dir: Path, by_version: Mapping[int | None, list[Place]], findings: Findings, screen: Display,
    sample: int | None,
) -> None:  # fmt: skip
    """Compare the stored logprobs with those of the weights that still exist."""
    start = _start_weights(store, findings)
    folders = _checkpoint_folders(run_dir, start, findings)
    drawn = {version: _draw(places, sample) for version, places in by_version.items() if version in folders}
    findings.counts["not_kept"] += sum(len(places) for version, places in by_version.items() if version not in folders)
    findings.counts["not_drawn"] += sum(len(by_version[version]) - len(drawn[version]) for version in drawn)
    screen.phase("recomputing calls", sum(map(len, drawn.values())))
    for version in sorted(drawn):
        _recompute_version(store, start, folders[version], drawn[version], findings, screen)


def _recompute_version(
    store: Store, start: str | None, folder: Path | None, places: list[Place], findings: Findings, screen: Display
) -> None:
    from art_core.learner.replay import load_weights, replay

    try:
        model = load_weights(start or "", folder)
    except StoreError as error:
        findings.add("weights", str(error))
        findings.counts["not_kept"] += len(places)
        return
    findings.parameters = sum(parameter.numel() for parameter in model.parameters())
    ids = model.get_input_embeddings().num_embeddings
    for batch in _batches(store, places):
        unknown = [place for place, call in batch if not _within(call, ids)]
        for place in unknown:
            findings.add("context", f"token ids outside the model's vocabulary of {ids}", *place)
            findings.counts["checked"] += 1
            screen.advance()
        batch = [(place, call) for place, call in batch if place not in unknown]
        tree = _tree(batch)
        check_paths(tree, [place for place, _ in batch], [call for _, call in batch], findings)
        logprobs = replay(model, tree).astype(np.float64)
        ends = np.cumsum([len(call.sampled_ids) for _, call in batch])
        for (place, call), end in zip(batch, ends, strict=True):
            free = np.setdiff1d(np.arange(len(call.sampled_ids)), np.array(call.forced, dtype=np.int64))
            recomputed = logprobs[end - len(call.sampled_ids) : end]
            findings.compare(place, np.array(call.logprobs), recomputed, free)
            screen.advance()


def _within(call: Call, ids: int) -> bool:
    return all(0 <= token < ids for token in (*call.prompt_ids, *call.sampled_ids))


def _start_weights(store: Store, findings: Findings) -> str | None:
    """Return the folder of the run's start weights; None if they are unknown, missing or have changed."""
    if (model := store.meta("model")) is None:
        return None
    try:
        folder = model_folder(model)
    except ConfigError:
        return None
    then, now = store.meta("start_weights"), weights_hash(folder)
    if then != now:
        text = f"the start weights in {folder} have changed since the run started: SHA-256 {now[:12]}, was {then!s:.12}"
        findings.add("weights", text)
        return None
    return folder


def _checkpoint_folders(run_dir: Path, start: str | None, findings: Findings) -> dict[int, Path | None]:
    """Return version -> checkpoint folder for all weights that still exist; None for the start weights.

    A checkpoint whose weights are only on a server has none here.
    """
    from art_core.learner.checkpoint import ADAPTER, read_state

    folders: dict[int, Path | None] = {}
    for folder in checkpoints(run_dir):
        try:
            version = read_state(folder)["version"]
        except StoreError as error:
            findings.add("weights", str(error))
            continue
        if (folder / "config.json").is_file() or (start is not None and (folder / ADAPTER).is_dir()):
            folders[version] = folder
    if start is not None:
        folders[0] = None
    return folders


def _draw(places: list[Place], sample: int | None) -> list[Place]:
    if sample is None or sample >= len(places):
        return places
    return [places[number] for number in sorted(random.SystemRandom().sample(range(len(places)), sample))]


def _batches(store: Store, places: Sequence[Place]) -> Iterator[Batch]:
    """Yield the calls at ``places`` in batches of consecutive rollouts, each small enough for one tree."""
    pending: Batch = []
    size = 0
    for rollout_id, members in groupby(places, key=lambda place: place[0]):
        calls = [row.call for row in store.recorded(rollout_id) if not row.replaced]
        batch = [(place, calls[place[1]]) for place in members]
        # An upper bound: rollouts of one task share their start in the joint tree.
        tokens = _tree(batch).num_tokens
        if pending and size + tokens > TOKENS:
            yield from _cut(pending)
            pending, size = [], 0
        pending, size = pending + batch, size + tokens
    if pending:
        yield from _cut(pending)


def _cut(batch: Batch) -> Iterator[Batch]:
    if len(batch) == 1 or _tree(batch).num_tokens <= TOKENS:
        yield batch
        return
    middle = len(batch) // 2
    yield from _cut(batch[:middle])
    yield from _cut(batch[middle:])


def _tree(batch: Batch) -> TokenTree:
    return build_tree([Trajectory(task=None, calls=tuple(call for _, call in batch))])
