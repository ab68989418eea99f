"""What a conformance check found: a row of a table, or everything that is wrong. Knows nothing about how it was checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

KINDS = ("sync", "async", "stream", "tools", "structured output", "threads", "nested agents", "failing")
"""The kinds of agent that an author can give, in the order of the table's columns."""
COLUMNS = KINDS[:-1]
YES, NOT_GIVEN = "yes", "not given"


class AdapterError(AssertionError):
    """An adapter broke rules; ``violations`` has one sentence for each, with what to do."""

    def __init__(self, framework: str, violations: Sequence[str]) -> None:
        self.violations = tuple(violations)
        lines = [f"{i}. {text}" for i, text in enumerate(self.violations, start=1)]
        rules = "1 rule is broken" if len(lines) == 1 else f"{len(lines)} rules are broken"
        super().__init__("\n".join([f"the adapter of {framework}: {rules}", *lines]))


@dataclass(frozen=True)
class AdapterReport:
    """An adapter that keeps the rules, as far as it was checked. Prints as a row of a Markdown table."""

    framework: str
    kinds: Mapping[str, str]
    """By kind of agent (``KINDS``): ``"yes"`` where every rule was kept, ``"not given"`` where there was no agent."""
    checks: Mapping[str, str]
    """By what can be left out besides the kinds (``"agent names"``, ``"light import"``): the same two values."""
    runs: int
    """Agent runs at rollouts' addresses."""
    calls: int
    """Model calls recorded in them, each with all its token ids and logprobs."""

    @staticmethod
    def header() -> str:
        """Return the two lines above the rows."""
        names = ["framework", *COLUMNS]
        return "\n".join([_row(names), _row(["---"] * len(names))])

    def __str__(self) -> str:
        return _row([self.framework, *(self.kinds[column] for column in COLUMNS)])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
