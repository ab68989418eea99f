"""Plugins: who answers, who is named when something goes wrong."""

import asyncio
import functools
import types

import pytest

from art_core import hookimpl
from art_core.errors import AgentError, ConfigError, PluginError
from art_core.plugins import Plugins, redirect_clients
from art_core.types import RolloutAddress

ADDRESS = RolloutAddress("r", "http://127.0.0.1:1/rollouts/r/v1", "key", "policy")


class Greeting:
    """An agent type that only the plugin below adapts."""


class Adapter:
    @hookimpl
    def adapt_agent(self, agent):
        if not isinstance(agent, Greeting):
            return None

        async def run(task_input, address):
            return f"hello {task_input}"

        return run


def run(agent, *plugins, task_input="x"):
    adapted = Plugins(*plugins, installed=False).adapt(agent)
    return asyncio.run(adapted(task_input, ADDRESS))


def test_adapt_agent_takes_functions_sync_and_async_with_and_without_the_address():
    async def with_address(task_input, address):
        return task_input, address.model

    assert run(lambda task_input: task_input + "!") == "x!"
    assert run(with_address) == ("x", "policy")
    assert run(lambda task_input, address, more=1: (task_input, address.rollout_id, more)) == ("x", "r", 1)


def test_adapt_agent_takes_objects_that_can_be_called():
    class Agent:
        async def __call__(self, task_input):
            return task_input * 2

    assert run(Agent()) == "xx"


def test_adapt_agent_of_a_plugin_answers_for_its_own_type():
    assert run(Greeting(), Adapter()) == "hello x"


def test_adapt_agent_beats_the_builtin_one():
    class Mine:
        @hookimpl
        def adapt_agent(self, agent):
            async def mine(task_input, address):
                return "mine"

            return mine

    assert run(lambda task_input: "builtin", Mine()) == "mine"


def test_a_function_without_parameters_that_makes_an_agent_may_be_async():
    async def make():
        await asyncio.sleep(0)
        return Greeting()

    assert run(make, Adapter()) == "hello x"
    assert run(lambda: make(), Adapter()) == "hello x"


def yielding(task_input):
    yield task_input


async def yielding_async(task_input):
    yield task_input


class Yielding:
    def __call__(self, task_input):
        yield task_input


def yielding_to_no_task():
    yield "x"


@pytest.mark.parametrize(
    "agent", [yielding, yielding_async, Yielding(), functools.partial(yielding_async), yielding_to_no_task]
)
def test_an_agent_that_yields_is_told_to_return(agent):
    with pytest.raises(AgentError, match="return the output instead of yielding it"):
        run(agent)


def test_an_agent_that_nobody_adapts_gets_a_list_of_what_is_installed():
    with pytest.raises(AgentError, match="Greeting.*wrap it in a function.*Installed adapters: art-core"):
        run(Greeting())


def test_a_plugin_suggests_how_to_get_what_is_missing():
    class Adviser:
        @hookimpl
        def suggest(self, kind, wanted):
            return "run: pip install art-mine" if (kind, wanted) == ("engine", "mine") else None

    plugins = Plugins(Adviser(), installed=False)
    with pytest.raises(ConfigError, match=r"no engine named 'mine' \(run: pip install art-mine\)"):
        plugins.choose("register_engines", "mine")
    with pytest.raises(ConfigError, match=r"no engine named 'other'; installed"):
        plugins.choose("register_engines", "other")


def test_a_misspelt_hook_is_refused():
    class Typo:
        @hookimpl
        def adapt_agnet(self, agent):
            return None

    with pytest.raises(PluginError, match="unknown hook 'adapt_agnet'"):
        Plugins(Typo(), installed=False)


def test_a_hook_that_is_not_marked_is_refused():
    class Unmarked:
        def adapt_agent(self, agent):
            return None

    with pytest.raises(PluginError, match="adapt_agent in the plugin .* isn't marked @hookimpl"):
        Plugins(Unmarked(), installed=False)


def test_a_module_that_imports_a_function_named_like_a_hook_is_a_plugin():
    module = types.ModuleType("mine")
    module.redirect_clients = redirect_clients
    assert Plugins(module, installed=False).manager.is_registered(module)


def test_a_failing_plugin_is_named():
    class Broken:
        @hookimpl
        def adapt_agent(self, agent):
            raise KeyError("inside")

    with pytest.raises(PluginError, match=r"\(not installed\) failed in adapt_agent: KeyError: 'inside'"):
        run(Greeting(), Broken())


class Offers:
    """Registers one thing under one name through every register hook that takes ``register``."""

    def __init__(self, name, thing):
        self.name, self.thing = name, thing

    def _register(self, register):
        register(self.name, self.thing)

    register_rewards = hookimpl(lambda self, register: self._register(register), specname="register_rewards")
    register_losses = hookimpl(lambda self, register: self._register(register), specname="register_losses")
    register_learners = hookimpl(lambda self, register: self._register(register), specname="register_learners")
    register_engines = hookimpl(lambda self, register: self._register(register), specname="register_engines")
    register_executors = hookimpl(lambda self, register: self._register(register), specname="register_executors")
    register_trackers = hookimpl(lambda self, register: self._register(register), specname="register_trackers")
    register_dialects = hookimpl(lambda self, register: self._register(register), specname="register_dialects")


@pytest.mark.parametrize("kind", ["rewards", "losses", "learners", "engines", "executors", "trackers", "dialects"])
def test_register_hooks_offer_things_by_name(kind):
    hook = f"register_{kind}"
    plugins = Plugins(Offers("mine", 42), installed=False)
    assert plugins.choose(hook, "mine") == 42
    with pytest.raises(ConfigError, match=r"named 'other'.*'mine'"):
        plugins.choose(hook, "other")
    with pytest.raises(PluginError, match="'mine' is offered"):
        Plugins(Offers("mine", 1), Offers("mine", 2), installed=False).registered(hook)


def test_register_commands_adds_to_the_art_command():
    import typer
    from typer.testing import CliRunner

    class Commands:
        @hookimpl
        def register_commands(self, app):
            @app.command()
            def wave():
                print("waved")

            @app.command()
            def other():
                pass

    app = typer.Typer()
    Plugins(Commands(), installed=False).call("register_commands", app=app)
    assert "waved" in CliRunner().invoke(app, ["wave"]).output


def test_redirect_clients_is_called_in_every_plugin():
    called = []

    class One:
        @hookimpl
        def redirect_clients(self):
            called.append("one")

    class Two:
        @hookimpl
        def redirect_clients(self):
            called.append("two")

    Plugins(One(), Two(), installed=False).call("redirect_clients")
    assert sorted(called) == ["one", "two"]


def test_a_plugin_can_be_left_out_by_the_environment(monkeypatch):
    monkeypatch.setenv("ART_DISABLE_PLUGINS", "builtin")
    with pytest.raises((ValueError, AgentError)):
        run(lambda task_input: task_input)
