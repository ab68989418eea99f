"""Grades answers to reasoning-gym's word_sequence_reversal by what a reader of their text can see: the question and the answer.

Like ``scripted_judge``, it relies on messages as ``[role] text``.
"""

from __future__ import annotations

import re

from bench.judge_server import judging_by

QUESTION = re.compile(r"Reverse this list of words: (.+)")
ANSWER = "\n[assistant]"
"""Begins a message. RULER indents what a message says after its first line, so no answer can imitate it."""


def grade(text: str) -> tuple[float, str]:
    """Return a rollout's score and the reason: 1 for the right list, else 0.

    0.2 for the right words in another order taught SmolLM2-135M to copy the list: 1 % solved after 20 steps, 6.5 % before.
    """
    asked, _, answer = text.rpartition(ANSWER)
    questions = QUESTION.findall(asked)
    if not questions:
        return 0.0, "no question or no answer"
    given = answer.partition("\n")[0]  # the next lines may say how the rollout ended
    if given.strip().split(", ") == questions[-1].strip().split(", ")[::-1]:
        return 1.0, "the right list"
    return 0.0, "another list"


judge = judging_by(grade)
