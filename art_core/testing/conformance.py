"""The rules that every framework's adapter keeps, checked from outside: agents run at real rollouts' addresses and against a
plain provider, and both must give the same. Knows nothing about frameworks.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from art_core.errors import ArtError, ConfigError
from art_core.loop.open_run import open_run
from art_core.loop.run import Run
from art_core.plugins import Plugins
from art_core.redaction import describe_error
from art_core.testing import rules
from art_core.testing.fakes import CountingLearner, FakeEngine
from art_core.testing.provider import Asked, PlainProvider
from art_core.testing.report import KINDS, NOT_GIVEN, YES, AdapterError, AdapterReport
from art_core.testing.script import marks, refused_task, scripted_reply, task
from art_core.types import JsonDict, RolloutAddress, RunAgent, Trajectory

MakeAgent = Callable[[str], object]
"""``make(base_url)`` returns an agent as a user would pass it to ``train``; its model calls go to ``base_url``, an
OpenAI-compatible address with any key, as long as nobody redirects them."""

TIMEOUT = 60.0
"""Seconds of one run of an agent."""


async def check_adapter(
    agents: MakeAgent | Mapping[str, MakeAgent],
    *,
    framework: str,
    plugin: ModuleType | None = None,
    packages: Collection[str] = (),
    agent_names: Collection[str] = (),
    to_input: Callable[[str], Any] | None = None,
    to_output: Callable[[Any], Any] | None = None,
    reply: Callable[[JsonDict], Any] = scripted_reply,
    refusals: Mapping[str, str] | None = None,
    runs: int = 16,
) -> AdapterReport:
    """Check that an adapter keeps the rules and return the report; AdapterError lists every rule that is broken.

    ``agents`` has a function ``make(base_url) -> agent`` by kind (``KINDS``; one function alone is ``"async"``). Each agent
    is given a text, shows it to the model at least once, and returns what follows from the answers. ``sync`` calls the model
    blocking, beside the event loop, ``stream`` streams, ``tools`` has the model call a tool and shows it the result,
    ``structured output`` asks for a schema, ``threads`` calls from two threads at least, ``nested agents`` runs agents in
    agents, and ``failing`` raises by itself after a call. A model call that is refused with a 400 must make any of them raise.

    ``framework`` is the row's name. ``plugin`` is the adapter's module, used also where it is not installed; importing it
    must not import ``packages``. ``agent_names`` are those that ``Call.agent`` must show for ``nested agents``.
    ``to_input`` makes the agent's input of a text, and ``to_output`` what is compared of what it returns, where that has ids
    or times in it. ``reply`` answers a chat request, as a function of it alone; the default calls every tool once, fills
    schemas in, and answers text otherwise. ``refusals`` has the exceptions of refused calls that the framework raises
    otherwise where another client asks: class name with a plain server -> class name in a rollout. ``runs`` of each agent
    go on at a time, at least two.
    """
    made = dict(agents) if isinstance(agents, Mapping) else {"async": agents}
    unknown = set(made) - set(KINDS)
    if unknown or not made:
        raise ConfigError(f"agents has {sorted(unknown) or 'nothing'}; the kinds of agent are: {', '.join(KINDS)}")
    if runs < 2:
        raise ConfigError(f"runs={runs}: mixed-up runs show from two runs at a time on (16 is usual)")
    check = _Check(plugin, frozenset(agent_names), to_input or _same, to_output or _same, reply, refusals or {}, runs)
    await check.run(made)
    if plugin is not None and packages:
        check.violations += await asyncio.to_thread(_imports, plugin, packages)
    if check.violations:
        raise AdapterError(framework, check.violations)
    kinds = {kind: YES if kind in made else NOT_GIVEN for kind in KINDS}
    named = bool(agent_names) and "nested agents" in made
    light = plugin is not None and bool(packages)
    checks = {"agent names": YES if named else NOT_GIVEN, "light import": YES if light else NOT_GIVEN}
    return AdapterReport(framework, kinds, checks, check.rollouts, check.calls)


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Plain:
    """What one run of an agent gave with no rollout around it."""

    output: Any
    error: str | None
    """As ``Trajectory.error`` would have it."""
    requests: list[JsonDict]
    """As chat requests, in the order in which the provider got them."""
    asked: list[Asked]
    threads: int | None
    """How many threads beside the event loop's called; None where no call over a socket of Python's was seen."""


class _Check:
    """One pass over all agents; ``violations`` grows."""

    def __init__(
        self,
        plugin: ModuleType | None,
        agent_names: frozenset[str],
        to_input: Callable[[str], Any],
        to_output: Callable[[Any], Any],
        reply: Callable[[JsonDict], Any],
        refusals: Mapping[str, str],
        runs: int,
    ) -> None:
        self.violations: list[str] = []
        self.rollouts = self.calls = 0
        self._plugins = Plugins(*filter(None, [plugin]))
        self._agent_names, self._to_input, self._to_output, self._runs = agent_names, to_input, to_output, runs
        self._refusals = refusals
        self._served = WatchedEngine(reply)
        self._provided = WatchedEngine(reply)

    async def run(self, made: Mapping[str, MakeAgent]) -> None:
        dialects = self._plugins.registered("register_dialects")
        with (
            PlainProvider(self._provided, dialects).running() as self._provider,
            tempfile.TemporaryDirectory() as folder,
        ):
            agents = {kind: make(self._provider.base_url) for kind, make in made.items()}
            # Before the clients are redirected, where this is the first rollout of the process.
            before = {kind: await self._plain(kind, agent, task(0)) for kind, agent in agents.items()}
            settings: dict[str, Any] = {"rollout_timeout": TIMEOUT, "max_concurrent": self._runs + 1}
            parts = {"engine": self._served, "learner": CountingLearner(), "plugins": self._plugins}
            async with open_run(Path(folder) / "run", **parts, **settings) as run:
                for kind, agent in agents.items():
                    try:
                        found = await self._kind(run, kind, agent, before[kind])
                    except ArtError as error:
                        found = [f"the runs ended with {describe_error(error)}"]
                    self.violations += [f"[{kind}] {text}" for text in found]

    async def _plain(self, kind: str, agent: object, text: str) -> Plain:
        """Run the agent once with no rollout around it."""
        adapted: RunAgent = self._plugins.adapt(agent)
        self._provided.requests.clear()
        # Else a first thread that is fast may make the calls of all.
        self._provided.begin(together=kind == "threads")
        self._provider.asked.clear()
        address = RolloutAddress("plain", self._provider.base_url, "key", "policy")
        output = error = None
        with self._provider.callers() as callers:
            try:
                output = self._to_output(await asyncio.wait_for(adapted(self._to_input(text), address), TIMEOUT))
            except Exception as raised:  # noqa: BLE001 - the boundary to the agent: what it raises is compared
                error = describe_error(raised)
        threads = len(callers - {threading.current_thread()}) if callers else None
        return Plain(output, error, list(self._provided.requests), list(self._provider.asked), threads)

    async def _kind(self, run: Run, kind: str, agent: object, before: Plain) -> list[str]:
        plain = await self._plain(kind, agent, task(0))
        refused = await self._plain(kind, agent, refused_task())
        self._served.begin()
        self._provider.asked.clear()
        groups = await run.collect(
            agent,
            [*(task(number) for number in range(self._runs)), refused_task()],
            group_size=1,
            to_input=self._to_input,
            to_output=self._to_output,
            allow_no_calls=True,
        )
        runs = [group.trajectories[0] for group in groups]
        *trajectories, last = runs
        self.rollouts += len(runs)
        self.calls += sum(len(trajectory.calls) for trajectory in runs)
        return [
            *rules.untouched(before.asked, plain.asked),
            *rules.redirected(self._leaked(), runs),
            *rules.asked_the_same(plain.requests, trajectories[0]),
            *rules.recorded_once(self._served.answered, runs),
            *[text for trajectory in runs for text in rules.ledger(trajectory, self._served.logprob)][:3],
            *rules.apart(self._served.overlapped, runs),
            *self._outcomes(kind, plain, refused, trajectories, last),
            *rules.of_kind(kind, trajectories[0], self._agent_names),
            *rules.off_the_loop(kind, plain.threads),
        ]

    def _leaked(self) -> int:
        """Count what the plain provider was asked by runs at rollouts.

        The tasks of the plain runs do not count: what such a run left behind in a thread, when another call of it failed,
        may arrive late.
        """
        asked_plainly = marks([task(0), refused_task()])
        return sum(bool(marks(asked.body) - asked_plainly) for asked in self._provider.asked)

    def _outcomes(
        self, kind: str, plain: Plain, refused: Plain, trajectories: list[Trajectory], last: Trajectory
    ) -> list[str]:
        if kind == "failing":
            return rules.failure_is_data("its own exception", plain.error, trajectories)
        return [
            *rules.same_result(plain.output, plain.error, trajectories),
            *rules.failure_is_data("a refused model call", refused.error, [last], self._refusals),
        ]


class WatchedEngine(FakeEngine):
    """Counts what it answers, and holds its first call back until a second one is in flight, if it is to."""

    WAIT = 10.0
    """Seconds until it believes that none comes."""

    def begin(self, together: bool = True) -> None:
        """Forget what was answered so far, and hold the first call back if ``together``."""
        self.answered = 0
        self.overlapped = False
        self._in_flight = 0
        self._second = asyncio.Event()
        if not together:
            self._second.set()

    async def chat(self, request: JsonDict) -> JsonDict:
        self._in_flight += 1
        if self._in_flight > 1:
            self.overlapped = True
            self._second.set()
        try:
            # TimeoutError: the runs take turns, which is told afterwards.
            await asyncio.wait({asyncio.ensure_future(self._second.wait())}, timeout=self.WAIT)
            self._second.set()
            completion = await super().chat(request)
        finally:
            self._in_flight -= 1
        self.answered += 1
        return completion


def _imports(plugin: ModuleType, packages: Collection[str]) -> list[str]:
    """Import the plugin alone in a fresh process."""
    code = f"import sys, {plugin.__name__}; print(*sorted({set(packages)!r} & sys.modules.keys()))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return [f"importing {plugin.__name__} alone fails: {last}"]
    heavy = done.stdout.split()
    if heavy:
        return [
            f"importing {plugin.__name__} imports {', '.join(heavy)}: plugins are loaded whenever art starts, so import the "
            "framework inside the hooks"
        ]
    return []
