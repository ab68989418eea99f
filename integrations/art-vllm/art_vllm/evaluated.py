"""Estimates a training step's tokens from an evaluation, also one whose calls a provider answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from art_core.errors import ConfigError
from art_core.store import Store
from art_core.store.run_folder import store_file
from art_core.types import Trajectory
from art_vllm.workload import Tokens, Workload


@dataclass(frozen=True)
class Counts:
    """The tokens of one model call."""

    prompt: int
    fresh: int
    """Prompt tokens that the calls before it don't have."""
    sampled: int


def evaluated(run_dir: Path, rollouts: int, group_size: int) -> Workload:
    """Return the workload of a step whose rollouts are like those of the evaluation in ``run_dir``.

    Works from token counts alone, because a provider's calls are recorded as text. The first prompt counts as the same for a
    whole group, as it is if the rollouts of a group start alike. Raises ConfigError without counts.
    """
    with Store(store_file(run_dir)) as store:
        trajectories = store.trajectories(split="eval")
        model = store.meta("model")
    counted = [calls for calls in map(_counts, trajectories) if calls]
    if not counted:
        raise ConfigError(
            f"{run_dir} has neither a finished training step nor an evaluation with token counts; train a step, evaluate "
            "(art eval --run-dir), or omit --run"
        )
    source = f"measured: {len(counted)} evaluated rollouts of {run_dir} (model {model})"
    return _step(source, counted, rollouts, group_size)


def _counts(trajectory: Trajectory) -> list[Counts]:
    """Return the calls' tokens, without those of calls whose provider didn't count them."""
    calls: list[Counts] = []
    prompt_before = before = 0
    for call in trajectory.calls:
        if (counts := call.token_counts()) is None:
            continue
        prompt, sampled = map(int, counts)
        # A prompt that is shorter than the one before starts another conversation; further choices share their prompt. What
        # was sampled may be longer than what the next prompt keeps of it: providers count hidden thoughts, too.
        fresh = 0 if call.choice else max(0, prompt - before) if prompt >= prompt_before else prompt
        calls.append(Counts(prompt, fresh, sampled))
        prompt_before, before = prompt, prompt + sampled
    return calls


def _step(source: str, counted: Sequence[Sequence[Counts]], rollouts: int, group_size: int) -> Workload:
    every = [call for calls in counted for call in calls]
    later = [call for calls in counted for call in calls[1:]]
    share, groups = rollouts / len(counted), rollouts / group_size
    first = Tokens.sum(Tokens(calls[0].prompt, calls[0].prompt / 2) for calls in counted).times(groups / len(counted))
    fresh = Tokens.sum(Tokens(call.fresh, call.prompt - call.fresh / 2) for call in later).times(share)
    answers = Tokens.sum(Tokens(call.sampled, call.prompt + call.sampled / 2) for call in every).times(share)
    own = [sum(call.sampled for call in calls) + sum(call.fresh for call in calls[1:]) for calls in counted]
    return Workload(
        source=source,
        runs=rollouts,
        calls=len(every) * share,
        prompts=Tokens.sum(Tokens(call.prompt, call.prompt / 2) for call in every).times(share),
        prefill=first.plus(fresh),
        decode=answers,
        learner=first.plus(fresh).plus(answers),
        rows=sum(calls[0].prompt + size for calls, size in zip(counted, own, strict=True)) * share,
        targets=answers.count,
        largest=max(calls[0].prompt + group_size * size for calls, size in zip(counted, own, strict=True)),
        longest=max(call.prompt + call.sampled for call in every),
    )
