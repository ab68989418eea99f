"""Find the installed plugins, check them, and call their hooks by name.

Environment: ``ART_DISABLE_PLUGINS=name,name`` leaves plugins out; ``ART_TRACE_PLUGINS=1`` logs every hook call.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import inspect
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pluggy

from art_core import builtin, hookspecs
from art_core.errors import AgentError, ArtError, ConfigError, PluginError
from art_core.hookspecs import Offer
from art_core.types import RolloutAddress, RunAgent

GROUP = "art"
KINDS = {"register_losses": "loss", "register_tasks": "task suite"}
"""Hook -> what it registers, if its name without the final s isn't that."""
log = logging.getLogger("art_core.plugins")


@dataclass(frozen=True)
class Installed:
    """A plugin as ``art plugins`` shows it."""

    name: str
    distribution: str
    version: str
    hooks: tuple[str, ...]


class Plugins:
    """The installed plugins and the built-in one."""

    prompts = "the agent's own"
    """What the agent's prompts are: a part of the experiment."""

    def __init__(self, *extra: object, installed: bool = True) -> None:
        """``extra`` are plugin modules or objects to use in any case; ``installed=False`` ignores the installed ones."""
        self._distributions: dict[str, importlib.metadata.Distribution] = {}
        """By plugin name, of those that were found by their entry points."""
        self.manager = pluggy.PluginManager(GROUP)
        self.manager.add_hookspecs(hookspecs)
        # The last registered plugin is called first, so an installed plugin's answer beats the built-in one's.
        self.manager.register(builtin, "builtin")
        for name in filter(None, os.environ.get("ART_DISABLE_PLUGINS", "").split(",")):
            self.manager.set_blocked(name.strip())
        if installed:
            self._load_entry_points()
        for plugin in extra:
            if not self.manager.is_registered(plugin):
                self._register(plugin)
        if os.environ.get("ART_TRACE_PLUGINS"):
            self.manager.add_hookcall_monitoring(
                lambda name, impls, kwargs: log.warning("%s%s -> %s", name, kwargs, [i.plugin_name for i in impls]),
                lambda outcome, name, impls, kwargs: None,
            )
        try:
            self.manager.check_pending()
        except pluggy.PluginValidationError as error:
            raise PluginError(f"{error}; the hooks are listed in art_core/hookspecs.py") from error

    def _load_entry_points(self) -> None:
        for distribution in importlib.metadata.distributions():
            for entry in distribution.entry_points:
                if entry.group == GROUP and not self.manager.is_blocked(entry.name):
                    self._load(entry, distribution)

    def _load(self, entry: importlib.metadata.EntryPoint, distribution: importlib.metadata.Distribution) -> None:
        if self.manager.get_plugin(entry.name) is not None:
            return  # an editable install can be listed twice
        where = f"plugin {entry.name!r} ({distribution.metadata['Name']} {distribution.version})"
        try:
            self._register(entry.load(), entry.name)
            self._distributions[entry.name] = distribution
        except PluginError:
            raise
        except Exception as error:
            raise PluginError(
                f"{where} could not be loaded: {type(error).__name__}: {error}; "
                f"repair or uninstall it, or leave it out with ART_DISABLE_PLUGINS={entry.name}"
            ) from error

    def _register(self, plugin: object, name: str | None = None) -> None:
        """Register a plugin. Raises PluginError if a function of it has the name of a hook, but isn't marked as one."""
        name = self.manager.register(plugin, name)
        for hook in vars(self.manager.hook) if name else ():
            function = getattr(plugin, hook, None)
            own = inspect.ismethod(function) or getattr(function, "__module__", "") == getattr(plugin, "__name__", None)
            if own and self.manager.parse_hookimpl_opts(plugin, hook) is None:
                raise PluginError(
                    f"{hook} in the plugin {name!r} isn't marked @hookimpl, so it would never be called; mark or rename it, or "
                    f"leave the plugin out with ART_DISABLE_PLUGINS={name}"
                )

    def describe(self, name: str) -> Installed:
        """Return the name, distribution, version and hooks of a plugin."""
        plugin = self.manager.get_plugin(name)
        hooks = tuple(sorted(caller.name for caller in self.manager.get_hookcallers(plugin) or ()))
        if plugin is builtin:
            return Installed(name, "art-core", importlib.metadata.version("art-core"), hooks)
        if distribution := self._distributions.get(name):
            return Installed(name, distribution.metadata["Name"], distribution.version, hooks)
        return Installed(name, "not installed", "", hooks)

    def installed(self) -> list[Installed]:
        """Return every plugin, the built-in one first."""
        return [self.describe(name) for name, _ in self.manager.list_name_plugin()]

    def _callers(self, hook: str) -> Iterator[tuple[str, pluggy.HookCaller]]:
        """Yield each plugin that implements ``hook`` with a caller for that plugin alone, in pluggy's call order."""
        plugins = self.manager.get_plugins()
        for impl in reversed(getattr(self.manager.hook, hook).get_hookimpls()):
            yield impl.plugin_name, self.manager.subset_hook_caller(hook, plugins - {impl.plugin})

    def _call(self, name: str, caller: pluggy.HookCaller, **arguments: Any) -> Any:
        try:
            return caller(**arguments)
        except ArtError:
            raise
        except Exception as error:
            plugin = self.describe(name)
            where = f"{plugin.distribution} {plugin.version}".rstrip()
            raise PluginError(
                f"plugin {name!r} ({where}) failed in {caller.name}: {type(error).__name__}: {error}"
            ) from error

    def call(self, hook: str, **arguments: Any) -> None:
        """Call ``hook`` in every plugin that implements it."""
        for name, caller in self._callers(hook):
            self._call(name, caller, **arguments)

    def registered(self, hook: str) -> dict[str, Any]:
        """Return the things that the plugins register through a ``register_*`` hook, by name."""
        return {name: offer.thing for name, offer in self.offers(hook).items()}

    def offers(self, hook: str) -> dict[str, Offer]:
        """Return what the plugins register through a ``register_*`` hook, by name."""
        offers: dict[str, Offer] = {}
        owners: dict[str, str] = {}
        for plugin, caller in self._callers(hook):

            def register(name: str, thing: Any, *, plugin: str = plugin, **options: Any) -> None:
                if name in offers:
                    raise PluginError(
                        f"{name!r} is offered through {hook} by the plugins {owners[name]!r} and {plugin!r}; "
                        f"leave one out with ART_DISABLE_PLUGINS"
                    )
                offers[name], owners[name] = Offer(thing, **options), plugin

            self._call(plugin, caller, register=register)
        return offers

    def choose(self, hook: str, name: str) -> Any:
        """Return the thing that is registered as ``name`` through ``hook``, as ``offer`` does."""
        return self.offer(hook, name).thing

    def offer(self, hook: str, name: str) -> Offer:
        """Return what is registered as ``name`` through ``hook``. Raises ConfigError with the choices if nothing is."""
        offers = self.offers(hook)
        if name not in offers:
            kind = KINDS.get(hook, hook.removeprefix("register_").removesuffix("s"))
            advice = self._suggestion(kind, name)
            hint = f" ({advice})" if advice else ""
            if near := difflib.get_close_matches(name, offers, n=1):
                hint = f" (did you mean {near[0]!r}?)"
            choices = ", ".join(map(repr, sorted(offers))) or "none is registered"
            raise ConfigError(
                f"there is no {kind} named {name!r}{hint}; installed: {choices}. You can also pass an object."
            )
        return offers[name]

    def _suggestion(self, kind: str, wanted: object) -> str | None:
        suggestions = (self._call(name, caller, kind=kind, wanted=wanted) for name, caller in self._callers("suggest"))
        return next(filter(None, suggestions), None)

    def adapt(self, agent: object, *, shared: bool = True) -> RunAgent:
        """Return the function that runs ``agent`` once. Raises AgentError if no plugin adapts it.

        A function without parameters, sync or async, makes a new agent for each rollout; other agents are ``shared`` by all.
        """
        if inspect.isfunction(agent) and not inspect.signature(agent).parameters:

            async def run_new(task_input: Any, address: RolloutAddress) -> Any:
                made = agent()
                made = await made if inspect.iscoroutine(made) else made
                return await self.adapt(made, shared=False)(task_input, address)

            return run_new
        for name, caller in self._callers("adapt_agent"):
            run = self._call(name, caller, agent=agent, shared=shared)
            if run is not None:
                return run
        adapters = {plugin.distribution for plugin in self.installed() if "adapt_agent" in plugin.hooks}
        advice = self._suggestion("agent", agent) or "wrap it in a function of one task, def agent(task)"
        made = "" if shared else ", which a function without parameters made"
        raise AgentError(
            f"no installed plugin adapts an agent of type {type(agent).__module__}.{type(agent).__qualname__}{made}; "
            f"{advice}. Installed adapters: {', '.join(sorted(adapters))}."
        )


def redirect_clients() -> None:
    """Let the installed plugins wrap their client libraries in this process; for child processes, which start without."""
    Plugins().call("redirect_clients")
