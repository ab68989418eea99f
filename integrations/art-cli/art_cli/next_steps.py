"""What to do after a run: advice with commands, by what the run showed. For the terminal and the dashboard."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from art_cli.change import Verdict

ENDED_EARLY = {"stopped": "Change what the reason for stopping names", "crashed": "Fix the error"}
"""What to do first about a run that didn't finish, by its status."""


class Advice(NamedTuple):
    """One thing to do next."""

    text: str
    command: str | None = None


def next_steps(
    run_dir: Path,
    *,
    status: str | None,
    verdicts: Sequence[Verdict],
    suspicious: bool = False,
    steps: int = 0,
    command: Mapping[str, Any] | None = None,
) -> list[Advice]:
    """Return what to do after training, most important first.

    ``status``: ``stopped`` or ``crashed`` if the run ended before its last step. ``verdicts``: of the held-out evaluations, by
    temperature. ``suspicious``: whether there are signs of reward hacking. ``command``: what ``art train`` stored of its last
    start, if it started the run.
    """
    folder, given = shlex.quote(str(run_dir)), (command or {}).get("given") or {}
    resume = f"art train --resume {folder}" if given else None
    advice = []
    if status in ENDED_EARLY:
        how = "resume it" if resume else f"repeat the call that started it, with run_dir={str(run_dir)!r}"
        advice.append(Advice(f"{ENDED_EARLY[status]}, then {how}: it continues after its last step.", resume))
    if suspicious:
        text = "Read the rollouts with the best rewards, and fix what the reward pays for."
        advice.append(Advice(text, f"art view {folder}"))
    if not verdicts:
        agent, reward = _named(given, "agent", "AGENT"), _named(given, "reward", "REWARD")
        measure = f"art eval {agent} HELD_OUT --reward {reward} --model {folder}"
        advice.append(Advice("Measure it on tasks that it wasn't trained on.", measure))
    elif "worse" in verdicts:
        advice.append(Advice("See which tasks it lost.", f"art compare {folder}"))
        advice.append(Advice("Train in a new folder, with a lower learning_rate or a kl= above 0."))
    elif "better" in verdicts:
        advice.append(Advice("See which tasks flipped, with both transcripts.", f"art compare {folder}"))
        if status not in ENDED_EARLY and not suspicious:
            advice.append(
                Advice("Write the weights as a model folder, for vLLM or transformers.", f"art export {folder}")
            )
    elif status not in ENDED_EARLY and not suspicious:
        longer = f"{resume} --steps {2 * steps}" if resume and steps else None
        advice.append(Advice("Train longer, or measure more held-out tasks: the interval includes 0.", longer))
    return advice


def _named(given: Mapping[str, Any], name: str, placeholder: str) -> str:
    value = given.get(name)
    return shlex.quote(value) if isinstance(value, str) else placeholder
