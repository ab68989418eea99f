"""What to do after a run: advice with commands, by what the run showed. For the terminal and the dashboard."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from art_cli.change import Verdict

Ended = Literal["rule", "error", "interrupted"]
"""How a run ended before its last step: by a rule that stops training, by an error, or by Ctrl-C or a kill."""
FIRST: dict[Ended, str] = {
    "rule": "Change what the reason for stopping names, then ",
    "error": "Fix the error, then ",
    "interrupted": "",
}


class Advice(NamedTuple):
    """One thing to do next."""

    text: str
    command: str | None = None


def next_steps(
    run_dir: Path,
    *,
    ended: Ended | None = None,
    verdicts: Sequence[Verdict],
    after: str = "after",
    suspicious: bool = False,
    steps: int = 0,
    solved: bool = False,
    given: Mapping[str, Any] | None = None,
) -> list[Advice]:
    """Return what to do after training, most important first.

    ``verdicts``: of the held-out evaluations, by temperature. ``after``: the newest one's name. ``suspicious``: whether there are
    signs of reward hacking. ``solved``: whether all held-out tasks were solved before and after. ``given``: the arguments of
    ``art train``'s last start, if it started the run.
    """
    folder, given = shlex.quote(str(run_dir)), given or {}
    resume, worse = f"art train --resume {folder}" if given else None, "worse" in verdicts
    advice = []
    if ended and not worse:
        how = "resume it" if resume else f"repeat the call that started it, with run_dir={str(run_dir)!r}"
        text = f"{FIRST[ended]}{how}: it continues after its last step."
        advice.append(Advice(text[0].upper() + text[1:], resume))
    if suspicious:
        text = "Read the rollouts with the best rewards, and fix what the reward pays for."
        advice.append(Advice(text, f"art view {folder}"))
    if not verdicts:
        agent, tasks = _named(given, "agent", "AGENT"), _named(given, "eval_tasks", "HELD_OUT")
        measure = f"art eval {agent} {tasks} --reward {_named(given, 'reward', 'REWARD')} --model {folder}"
        advice.append(Advice("Evaluate it on tasks that it wasn't trained on.", measure))
        return advice
    sides = folder if after == "after" else f"{folder}@before {shlex.quote(f'{run_dir}@{after}')}"
    if worse:
        advice.append(Advice("Read tasks that it lost.", f"art compare {sides} --transcripts 3"))
        advice.append(Advice("Train in a new folder, with a lower learning_rate or a kl= above 0."))
    elif "better" in verdicts:
        advice.append(Advice("Read tasks that flipped, before and after.", f"art compare {sides} --transcripts 3"))
        if not ended and not suspicious:
            advice.append(
                Advice("Write the weights as a model folder, for vLLM or transformers.", f"art export {folder}")
            )
    elif solved:
        advice.append(
            Advice("Train and evaluate on harder tasks: all held-out tasks were solved before training, too.")
        )
    elif not ended and not suspicious:
        longer = f"{resume} --steps {2 * steps}" if resume and steps else None
        advice.append(Advice("Train longer, or evaluate on more held-out tasks: the difference may be chance.", longer))
    return advice


def _named(given: Mapping[str, Any], name: str, placeholder: str) -> str:
    value = given.get(name)
    return shlex.quote(value) if isinstance(value, str) else placeholder
