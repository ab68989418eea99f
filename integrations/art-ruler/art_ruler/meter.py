"""Sends requests to the judge: limits concurrency, keeps to the budget, and records each request."""

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
from art_ruler.judge import Answer, Judge, JudgeError, TimedOut, with_tokens
from art_ruler.record import Record

T = TypeVar("T")


@dataclass
class Gate:
    """Admits the requests of one event loop."""

    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    under_way: int = 0


class Meter:
    """One judge's requests and their cost."""

    def __init__(
        self, judge: Judge, *, budget: float | None, price: tuple[float, float] | None, concurrency: int
    ) -> None:
        """``budget`` is in US dollars, ``price`` in US dollars per million (input, output) tokens."""
        self._judge, self._budget, self._price, self._concurrency = judge, budget, price, concurrency
        self._gates: dict[asyncio.AbstractEventLoop, Gate] = {}
        self.keep_in(Record(), "")

    def keep_in(self, record: Record, by: str) -> None:
        """Record requests under this name from now on, and continue its totals."""
        self._record, self._by = record, by
        self._totals = record.totals(by)

    def totals(self) -> dict[str, float]:
        """Return the totals (see ``record.TOTALS``), without a cost if none is known."""
        totals = dict(self._totals)
        if totals["unpriced"] and not totals["cost"]:
            del totals["cost"]
        return totals

    def exhausted(self) -> str | None:
        """Return why no more requests are sent; None as long as the budget lasts."""
        spent = self._totals["cost"]
        if self._budget is None or spent < self._budget:
            return None
        return f"the judge's budget of ${self._budget:g} is spent (${spent:.4f}); pass a larger budget= to continue"

    def check_price(self) -> None:
        """Raise ConfigError if there is a budget but no known price."""
        if self._budget is not None and self._price is None and not self._judge.priced:
            raise self._no_price()

    async def ask(self, messages: list[JsonDict], read: Callable[[Answer], T]) -> tuple[Answer, T | Fault]:
        """Return the judge's answer and the result of ``read(answer)``, or the Fault that ``read`` raised.

        Raises the judge's errors, and JudgeError if the budget is spent.
        """
        async with self._turn():
            began = time.monotonic()
            try:
                answer = with_tokens(await self._judge.ask(messages), messages)
            except (JudgeError, asyncio.CancelledError) as error:
                charged = self._charged(messages, error.cost) if isinstance(error, TimedOut) else {}
                self._note(time.monotonic() - began, fault=str(error) or "cancelled", failed=True, **charged)
                raise
            seconds = time.monotonic() - began
            result: T | Fault
            try:
                result = read(answer)
            except Fault as fault:
                result = fault
            cost = self._cost(answer)
            reason = str(result) if isinstance(result, Fault) else None
            self._note(seconds, tokens=(answer.input_tokens, answer.output_tokens), cost=cost, fault=reason)
        if cost is None and self._budget is not None:
            raise self._no_price()
        return answer, result

    def _note(self, seconds: float, **row: object) -> None:
        self._record.add(self._by, seconds, **row)
        input_tokens, output_tokens = row.get("tokens", (0, 0))
        cost, failed = row.get("cost"), bool(row.get("failed"))
        unusable, unpriced = bool(row.get("fault")) and not failed, cost is None and not failed
        added = (1, failed, unusable, input_tokens, output_tokens, cost or 0.0, unpriced)
        for name, value in zip(self._totals, added, strict=True):
            self._totals[name] += value

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Wait until one more request may be sent. Raises JudgeError if the budget is spent."""
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
        """Whether one more request fits the limits, if each costs the mean so far; the first one is sent alone."""
        if not under_way or self._budget is None or self.exhausted():
            return under_way < self._concurrency
        failed = self._totals["failed"]
        answers = self._totals["requests"] - failed
        # Before the first request has ended, the cost is unknown. Failed requests cost nothing, except those that timed out.
        mean = self._totals["cost"] / (answers or failed) if answers or failed else self._budget
        return under_way < self._concurrency and self._totals["cost"] + (under_way + 1) * mean <= self._budget

    def _gate(self) -> Gate:
        loop = asyncio.get_running_loop()
        if loop not in self._gates:
            # A condition that was waited on keeps its loop alive, so weak references would not do.
            for closed in [other for other in list(self._gates) if other.is_closed()]:
                self._gates.pop(closed, None)
        return self._gates.setdefault(loop, Gate())

    def _charged(self, messages: list[JsonDict], cost: float | None) -> dict[str, object]:
        """Return the tokens and the cost of a question without an answer."""
        asked = with_tokens(Answer("", output_tokens=0, cost=cost), messages)
        return {"tokens": (asked.input_tokens, 0), "cost": self._cost(asked)}

    def _cost(self, answer: Answer) -> float | None:
        if self._price is not None:
            return (answer.input_tokens * self._price[0] + answer.output_tokens * self._price[1]) / 1e6
        return answer.cost

    def _no_price(self) -> ConfigError:
        return ConfigError(
            f"cannot keep to budget={self._budget:g}: the price of the judge {self._judge.name!r} is unknown; pass price="
            "(dollars per million input tokens, dollars per million output tokens)"
        )
