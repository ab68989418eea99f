"""``check_adapter``: runs agents in rollouts and against a plain provider, and compares what can be seen from outside."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

from art_core.errors import ArtError, ConfigError
from art_core.loop.open_run import open_run
from art_core.loop.run import Run
from art_core.plugins import Plugins
from art_core.redaction import describe_error
from art_core.testing import adapter_rules as rules
from art_core.testing.fakes import CountingLearner, FakeEngine
from art_core.testing.provider import REFUSED_TASK, PlainProvider, ProviderRequest, marks, scripted_reply, task
from art_core.types import JsonDict, RolloutAddress, RunAgent, Trajectory

KINDS = ("sync", "async", "stream", "tools", "structured output", "threads", "nested agents", "failing")
"""The kinds of agents that can be checked; all but the last are columns of the report."""
MakeAgent = Callable[[str], object]
"""``make(base_url)`` returns an agent as a user would pass it to ``train``. Unless redirected, its model calls go to
``base_url``, an OpenAI-compatible address that accepts any key."""
TIMEOUT = 60.0
"""Seconds for one run of an agent."""


class AdapterError(AssertionError):
    """An adapter broke rules; ``violations`` has a sentence for each, with the fix."""

    def __init__(self, framework: str, violations: Sequence[str]) -> None:
        self.violations = tuple(violations)
        lines = [f"{i}. {text}" for i, text in enumerate(self.violations, start=1)]
        broken = "1 rule is broken" if len(lines) == 1 else f"{len(lines)} rules are broken"
        super().__init__("\n".join([f"the adapter of {framework}: {broken}", *lines]))


@dataclass(frozen=True)
class AdapterReport:
    """An adapter that keeps the rules, as far as it was checked. Prints as a row of a Markdown table."""

    framework: str
    kinds: Mapping[str, str]
    """By kind of agent (``KINDS``): ``"yes"`` if it keeps every rule, ``"not tested"`` if there was no such agent."""
    checks: Mapping[str, str]
    """The same two values for the optional checks ``"agent names"`` and ``"light import"``."""
    runs: int
    """Number of rollouts."""
    calls: int
    """Number of model calls recorded in them, each with all its token ids and logprobs."""

    @staticmethod
    def header() -> str:
        """Return the two lines above the rows."""
        names = ["framework", *KINDS[:-1]]
        return f"{_row(names)}\n{_row(['---'] * len(names))}"

    def __str__(self) -> str:
        return _row([self.framework, *(self.kinds[kind] for kind in KINDS[:-1])])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


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
    """Check that an adapter keeps the rules and return the report. Raises AdapterError with every violation.

    ``agents`` maps kinds (``KINDS``) to functions ``make(base_url) -> agent``; a single function is ``"async"``. Each agent
    gets a text, shows it to the model at least once, and returns a result that depends only on the answers. ``sync`` makes
    blocking calls outside the event loop, ``stream`` streams, ``tools`` lets the model call a tool and shows it the result,
    ``structured output`` requests a schema, ``threads`` calls from at least two threads, ``nested agents`` runs agents inside
    agents, and ``failing`` raises its own exception after a call. All must raise if a model call is refused with a 400.

    - ``framework``: the row's name
    - ``plugin``: the adapter's module, used even if it isn't installed; importing it must not import ``packages``
    - ``agent_names``: what ``Call.agent`` must show for ``nested agents``
    - ``to_input``, ``to_output``: make the agent's input from a text, and what to compare from its result, without random ids
      and times
    - ``reply``: answers a chat request, as a function of it alone; by default every tool is called once, schemas are filled
      in, and anything else gets a text
    - ``refusals``: for frameworks whose exception of a refused call depends on the client, class name with a plain provider
      -> class name in a rollout
    - ``runs``: number of concurrent rollouts per agent, at least 2
    """
    made = dict(agents) if isinstance(agents, Mapping) else {"async": agents}
    unknown = set(made) - set(KINDS)
    if unknown or not made:
        raise ConfigError(f"agents has {sorted(unknown) or 'nothing'}; the kinds of agent are: {', '.join(KINDS)}")
    if runs < 2:
        raise ConfigError(f"runs must be >= 2, got {runs}: mixed-up rollouts only show if several are concurrent")
    plugins = Plugins(*filter(None, [plugin]))
    served, provided = WatchedEngine(reply), WatchedEngine(reply)
    provider = PlainProvider(provided, plugins.registered("register_dialects"))
    check = _Check(
        plugins, served, provided, provider, agent_names, to_input or _same, to_output or _same, refusals, runs
    )
    violations = await check.run(made)
    if hasattr(plugin, "adapt_agent"):
        violations += rules.leaves_others_alone(plugin.adapt_agent)
    if plugin is not None and packages:
        violations += await asyncio.to_thread(_heavy_imports, plugin, packages)
    if violations:
        raise AdapterError(framework, violations)
    kinds = {kind: _answer(kind in made) for kind in KINDS}
    checks = {
        "agent names": _answer(bool(agent_names) and "nested agents" in made),
        "light import": _answer(plugin is not None and bool(packages)),
    }
    return AdapterReport(framework, kinds, checks, check.rollouts, check.calls)


def _answer(checked: bool) -> str:
    return "yes" if checked else "not tested"


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class PlainRun:
    """What one run of an agent outside a rollout produced."""

    output: Any
    error: str | None  # as ``Trajectory.error`` would be
    requests: list[JsonDict]  # the provider's requests as chat requests, in order
    wire: list[ProviderRequest]
    threads: int | None
    """Number of threads besides the event loop's that called; None if no call used Python's sockets."""


@dataclass
class _Check:
    """One pass over all agents."""

    plugins: Plugins
    served: WatchedEngine
    provided: WatchedEngine
    provider: PlainProvider
    agent_names: Collection[str]
    to_input: Callable[[str], Any]
    to_output: Callable[[Any], Any]
    refusals: Mapping[str, str] | None
    runs: int
    rollouts: int = 0
    calls: int = 0

    async def run(self, made: Mapping[str, MakeAgent]) -> list[str]:
        """Return every violation, with the kind of agent in brackets."""
        violations: list[str] = []
        with self.provider.running(), tempfile.TemporaryDirectory() as folder:
            agents = {kind: make(self.provider.base_url) for kind, make in made.items()}
            # Before the clients are redirected, if this is the first rollout of the process.
            before = {kind: await self._plain(kind, agent, task(0)) for kind, agent in agents.items()}
            settings: dict[str, Any] = {"rollout_timeout": TIMEOUT, "max_concurrent": self.runs + 1}
            parts = {"engine": self.served, "learner": CountingLearner(), "plugins": self.plugins}
            # Nothing loads this model, and none need be installed.
            (Path(folder) / "config.json").write_text("{}")
            async with open_run(Path(folder) / "run", model=folder, **parts, **settings) as run:
                for kind, agent in agents.items():
                    try:
                        broken = await self._kind(run, kind, agent, before[kind])
                    except ArtError as error:
                        broken = [f"the rollouts ended with {describe_error(error)}"]
                    violations += [f"[{kind}] {text}" for text in broken]
        return violations

    async def _plain(self, kind: str, agent: object, text: str) -> PlainRun:
        """Run the agent once outside a rollout."""
        run_agent: RunAgent = self.plugins.adapt(agent)
        self.provided.requests.clear()
        # Held back, because otherwise a fast first thread may make the calls of all.
        self.provided.begin(together=kind == "threads")
        self.provider.requests.clear()
        address = RolloutAddress("plain", self.provider.base_url, "key", "policy")
        output = error = None
        with self.provider.callers() as callers:
            try:
                output = self.to_output(await asyncio.wait_for(run_agent(self.to_input(text), address), TIMEOUT))
            except Exception as raised:  # noqa: BLE001 - whatever the agent raises is compared
                error = describe_error(raised)
        threads = len(callers - {threading.current_thread()}) if callers else None
        return PlainRun(output, error, list(self.provided.requests), list(self.provider.requests), threads)

    async def _kind(self, run: Run, kind: str, agent: object, before: PlainRun) -> list[str]:
        plain = await self._plain(kind, agent, task(0))
        refused = await self._plain(kind, agent, REFUSED_TASK)
        self.served.begin()
        self.provider.requests.clear()
        groups = await run.collect(
            agent,
            [*map(task, range(self.runs)), REFUSED_TASK],
            group_size=1,
            to_input=self.to_input,
            to_output=self.to_output,
            allow_no_calls=True,
        )
        every = [group.trajectories[0] for group in groups]
        *trajectories, last = every
        self.rollouts += len(every)
        self.calls += sum(len(trajectory.calls) for trajectory in every)
        return [
            *rules.untouched(before.wire, plain.wire),
            *rules.redirected(self._leaked(), every),
            *rules.same_requests(plain.requests, trajectories[0]),
            *rules.recorded_once(self.served.answered, every),
            *islice((text for trajectory in every for text in rules.ledger(trajectory, self.served.logprob)), 3),
            *islice(rules.isolated(self.served.overlapped, every), 3),
            *self._outcomes(kind, plain, refused, trajectories, last),
            *rules.of_kind(kind, trajectories[0], self.agent_names, plain.threads),
        ]

    def _leaked(self) -> int:
        """Return how many requests of rollouts reached the plain provider.

        Requests of plain runs don't count: a thread of such a run may send one late, after another of its calls failed.
        """
        plain = marks([task(0), REFUSED_TASK])
        return sum(bool(marks(request.body) - plain) for request in self.provider.requests)

    def _outcomes(
        self, kind: str, plain: PlainRun, refused: PlainRun, trajectories: list[Trajectory], last: Trajectory
    ) -> Iterator[str]:
        if kind == "failing":
            yield from rules.failure_is_data("its own exception", plain.error, trajectories)
        else:
            yield from rules.same_result(plain.output, plain.error, trajectories)
            yield from rules.failure_is_data("a refused model call", refused.error, [last], self.refusals)


class WatchedEngine(FakeEngine):
    """Counts its answers, and can hold its first call back until a second one is in flight."""

    WAIT = 10.0
    """Seconds to wait for a second call."""

    def begin(self, together: bool = True) -> None:
        """Reset the counts, and hold the first call back if ``together``."""
        self.answered = self._in_flight = 0
        self.overlapped = False
        self._second = asyncio.Event()
        if not together:
            self._second.set()

    async def chat(self, request: JsonDict) -> JsonDict:
        self._in_flight += 1
        if self._in_flight > 1:
            self.overlapped = True
            self._second.set()
        try:
            # On a timeout the rollouts take turns, which is reported later.
            await asyncio.wait({asyncio.ensure_future(self._second.wait())}, timeout=self.WAIT)
            self._second.set()
            completion = await super().chat(request)
        finally:
            self._in_flight -= 1
        self.answered += 1
        return completion


def _heavy_imports(plugin: ModuleType, packages: Collection[str]) -> list[str]:
    """Import the plugin in a fresh process and return the violation, if any."""
    code = f"import sys, {plugin.__name__}; print(*sorted({set(packages)!r} & sys.modules.keys()))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return [f"importing {plugin.__name__} alone fails: {last}"]
    if heavy := done.stdout.split():
        return [
            f"importing {plugin.__name__} imports {', '.join(heavy)}: plugins are loaded whenever art starts, so import the "
            "framework inside the hooks"
        ]
    return []
