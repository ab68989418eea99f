"""Asks the judge: so many requests at a time, as long as the budget lasts, each in the record. Knows nothing about groups."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from art_core.errors import ConfigError
from art_core.types import JsonDict
from art_ruler.answer import Fault
from art_ruler.judge import Answer, Judge, JudgeError, with_tokens
from art_ruler.record import Record

T = TypeVar("T")


@dataclass
class Gate:
    """What the requests of one event loop wait at."""

    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    under_way: int = 0


class Meter:
    """One judge's requests and what they took."""

    def __init__(
        self, judge: Judge, *, budget: float | None, price: tuple[float, float] | None, concurrency: int
    ) -> None:
        """``budget`` is in US dollars, ``price`` in US dollars per million (input, output) tokens."""
        self._judge, self._budget, self._price, self._concurrency = judge, budget, price, concurrency
        self._gates: dict[asyncio.AbstractEventLoop, Gate] = {}
        self.keep_in(Record(), "")

    def keep_in(self, record: Record, by: str) -> None:
        """Go on with what the record has under this name."""
        self._record, self._by = record, by
        self._totals = record.totals(by)

    def totals(self) -> dict[str, float]:
        """Return the totals by ``record.TOTALS``, without a cost where none is known."""
        found = dict(self._totals)
        if found["unpriced"] and not found["cost"]:
            del found["cost"]
        return found

    def exhausted(self) -> str | None:
        """Return why nothing more is asked; None as long as the budget lasts."""
        spent = self._totals["cost"]
        if self._budget is None or spent < self._budget:
            return None
        return f"the judge's budget of ${self._budget:g} is spent (${spent:.4f}); give a larger budget= to go on"

    def check_price(self) -> None:
        """Raise ConfigError where a budget is given and it is known that nobody knows the price."""
        if self._budget is not None and self._price is None and not self._judge.priced:
            raise self._no_price()

    async def ask(self, messages: list[JsonDict], read: Callable[[Answer], T]) -> tuple[Answer, T | Fault]:
        """Return the judge's answer and what ``read`` makes of it, or the Fault that it raises. Raises as the judge does."""
        async with self._turn():
            began = time.monotonic()
            try:
                answer = with_tokens(await self._judge.ask(messages), messages)
            except (JudgeError, asyncio.CancelledError) as error:
                self._note(time.monotonic() - began, fault=str(error) or "cancelled", failed=True)
                raise
            seconds, found, fault = time.monotonic() - began, None, None
            try:
                found = read(answer)
            except Fault as error:
                fault = error
            cost = self._cost(answer)
            tokens, why = (answer.input_tokens, answer.output_tokens), None if fault is None else str(fault)
            self._note(seconds, tokens=tokens, cost=cost, fault=why)
        if cost is None and self._budget is not None:
            raise self._no_price()
        return answer, found if fault is None else fault

    def _note(self, seconds: float, **row: object) -> None:
        self._record.add(self._by, seconds, **row)
        asked, said = row.get("tokens", (0, 0))
        cost, failed, fault = row.get("cost"), bool(row.get("failed")), row.get("fault")
        added = (1, failed, bool(fault) and not failed, asked, said, cost or 0.0, cost is None and not failed)
        for name, value in zip(self._totals, added, strict=True):
            self._totals[name] += value

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Wait until one more request may be under way. Raises JudgeError where none may any more."""
        gate = self._gate()
        async with gate.changed:
            await gate.changed.wait_for(lambda: self._may_ask(gate.under_way))
            if reason := self.exhausted():
                raise JudgeError(reason)
            gate.under_way += 1
        try:
            yield
        finally:
            gate.under_way -= 1
            async with gate.changed:
                gate.changed.notify_all()

    def _may_ask(self, under_way: int) -> bool:
        """Whether one more request fits, each taken to cost what they have cost so far; the first one goes alone."""
        if not under_way or self._budget is None or self.exhausted():
            return under_way < self._concurrency
        failed = self._totals["failed"]
        answers = self._totals["requests"] - failed
        # Nothing is known before the first answer; a judge that gives none costs nothing.
        mean = self._totals["cost"] / answers if answers else 0.0 if failed else self._budget
        return under_way < self._concurrency and self._totals["cost"] + (under_way + 1) * mean <= self._budget

    def _gate(self) -> Gate:
        loop = asyncio.get_running_loop()
        if loop not in self._gates:
            for closed in [it for it in list(self._gates) if it.is_closed()]:  # one that was waited on holds its loop
                self._gates.pop(closed, None)
        return self._gates.setdefault(loop, Gate())

    def _cost(self, answer: Answer) -> float | None:
        if self._price is not None:
            return (answer.input_tokens * self._price[0] + answer.output_tokens * self._price[1]) / 1e6
        return answer.cost

    def _no_price(self) -> ConfigError:
        return ConfigError(
            f"budget={self._budget:g} cannot be kept: nobody knows what the judge {self._judge.name!r} costs; give "
            "price=(dollars per million input tokens, dollars per million output tokens)"
        )
