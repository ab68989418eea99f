"""Grades answers to reasoning-gym's word_sequence_reversal by what a reader of their text can see: the question and the answer.

Like ``scripted_judge``, it relies on messages as ``[role] text``.
"""

from __future__ import annotations

import re

from bench.judge_server import judging_by

QUESTION = re.compile(r"Reverse this list of words: (.+)")
ANSWER = re.compile(r"^\[assistant\] ?(.*)$", re.MULTILINE)
"""Its first line: RULER says how the rollout ended in the next ones."""


def grade(text: str) -> tuple[float, str]:
    """Return a rollout's score and the reason: 1 for the right list, else 0.

    0.2 for the right words in another order taught SmolLM2-135M to copy the list: 1 % solved after 20 steps, 6.5 % before.
    """
    questions, answers = QUESTION.findall(text), ANSWER.findall(text)
    if not questions or not answers:
        return 0.0, "no question or no answer"
    wanted, given = questions[-1].strip().split(", ")[::-1], answers[-1].strip().split(", ")
    if given == wanted:
        return 1.0, "the right list"
    return 0.0, "another list"


judge = judging_by(grade)
