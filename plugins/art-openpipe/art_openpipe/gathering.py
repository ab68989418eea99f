"""Counts failures against a limit while gathering, and shows a progress bar."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any


class Budget:
    """Tolerates ``allowed`` failures and raises the next one. Below 1, ``allowed`` is a share of ``total``."""

    def __init__(
        self, total: int = 0, *, allowed: float = 0, description: str | None = None, shown: int | None = None
    ) -> None:
        self._allowed = allowed * total if 0 < allowed < 1 else allowed
        self._failures = 0
        self._sums: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._shown = shown
        self._bar: Any = None
        if description is not None:
            from tqdm.auto import tqdm

            self._bar = tqdm(desc=description, total=total)

    @staticmethod
    def current() -> Budget:
        """Return the budget of the current gathering; without one, a new budget that raises the first failure."""
        return _current.get() or Budget()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Make this budget current in the block, and in the tasks that it starts."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)
            if self._bar is not None:
                self._bar.close()

    def done(self, reward: float, metrics: Mapping[str, float]) -> None:
        """Count a finished rollout."""
        for name, value in {"reward": reward, **metrics}.items():
            self._sums[name] += float(value)
            self._counts[name] += 1
        self._show(1)

    def failed(self, error: Exception) -> None:
        """Count a failure; raise it if it is one too many."""
        self._failures += 1
        self._show(1)
        if self._failures > self._allowed:
            raise error

    def _show(self, runs: int) -> None:
        if self._bar is None:
            return
        means = {name: self._sums[name] / self._counts[name] for name in list(self._sums)[: self._shown]}
        self._bar.set_postfix(means | ({"exceptions": self._failures} if self._failures else {}), refresh=False)
        self._bar.update(runs)


_current: ContextVar[Budget | None] = ContextVar("art_openpipe_budget", default=None)
