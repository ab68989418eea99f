"""Environments as subclasses write them, and as configs from elsewhere name them."""

import sys

import pytest
from search_environment import Search

from art_classic.environment import Environment, register_environment
from art_core.errors import ConfigError


class Counter(Environment):
    """Keeps its own state."""

    def __init__(self, start: int = 0):
        super().__init__()
        self.start = self.count = start

    async def reset(self):
        self.count = self.start
        return await self.get_state()

    async def step(self, action):
        self.count += 1
        return await self.get_state(), 1.0, self.count > 2, {"moved": True}

    async def get_state(self):
        return {"count": self.count}


@pytest.fixture
def registered():
    register_environment("search", Search)
    register_environment("counter", Counter)


async def test_a_subclass_finds_the_state_that_it_returned_and_earlier_states_stay_as_they_were():
    environment = Search()
    first = await environment.reset()
    second, reward, done, _ = await environment.step({"type": "search"})
    third, *_ = await environment.step({"type": "select"})
    assert [state["step"] for state in (first, second, third)] == [0, 1, 2]
    assert [len(state["search_results"]) for state in (first, second, third)] == [0, 2, 4]
    assert (reward, done) == (0.5, False) and await environment.get_state() == third


async def test_what_is_put_into_the_first_state_is_found_in_the_states_that_follow():
    """An evaluation gives its query that way."""
    environment = Search()
    state = await environment.reset()
    state["query"] = "another"
    state, *_ = await environment.step({"type": "search"})
    assert state["query"] == "another"


async def test_a_subclass_with_a_state_of_its_own_keeps_it():
    environment = Counter(1)
    assert await environment.get_state() == {"count": 1} == await environment.reset()
    assert await environment.step({}) == ({"count": 2}, 1.0, False, {"moved": True})


async def test_a_step_that_returns_something_else_is_said_to():
    class Broken(Environment):
        async def step(self, action):
            return {}, 0.0

    with pytest.raises(ConfigError, match=r"state, reward, done, info"):
        await Broken().step({})
    with pytest.raises(NotImplementedError, match="Unfinished has no step method"):
        await type("Unfinished", (Environment,), {})().step({})


async def test_a_config_names_a_registered_environment_with_its_arguments(registered):
    environment = Environment({"environment": "counter", "arguments": {"start": 2}})
    assert await environment.reset() == {"count": 2} == await environment.get_state()
    assert await environment.step({"type": "go"}) == ({"count": 3}, 1.0, True, {"moved": True})
    assert (await Environment("search").reset())["query"] == "which?"


async def test_any_other_config_is_the_state_of_one_action_without_a_reward():
    config = {"prompt": "Which city?", "choices": ["a"]}
    environment = Environment(config)
    state = await environment.reset()
    assert state == config
    state["choices"].append("b")
    assert config["choices"] == ["a"]
    assert await environment.step({"type": "answer"}) == (config, 0.0, True, {})
    with pytest.raises(ConfigError, match="await reset"):
        await environment.step({"type": "answer"})
    assert await environment.reset() == config
    assert await Environment().reset() == {} == await Environment().get_state()


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (["search"], "is invalid; pass"),
        (3, "is invalid; pass"),
        ("serch", "did you mean 'search'"),
        ({"environment": "os:system", "arguments": {"command": "true"}}, "register_environment"),
        ({"environment": "tests.py:Search"}, "no environment is registered as"),
        ({"environment": ["search"]}, "no environment is registered as"),
        ({"environment": "counter", "arguments": [1]}, "must be a dict with string keys"),
        ({"environment": "counter", "arguments": {"begin": 1}}, "unexpected keyword argument 'begin'"),
        ({"environment": "counter", "start": 1}, "put them into 'arguments'"),
        ({"environment": "made"}, "must return an Environment, got int"),
    ],
)
def test_a_config_that_cannot_be_used_says_what_to_give(registered, config, says):
    register_environment("made", lambda: 3)
    with pytest.raises(ConfigError, match=says):
        Environment(config)


def test_a_config_imports_nothing(registered, tmp_path, monkeypatch):
    (tmp_path / "harmful.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("harmful:Environment", "harmful.py:Environment", "harmful", str(tmp_path / "harmful.py:Environment")):
        with pytest.raises(ConfigError, match="no environment is registered"):
            Environment({"environment": name})
    assert "harmful" not in sys.modules


@pytest.mark.parametrize("made_by", [3, int, "search.py:Search"])
def test_only_environments_and_functions_are_registered(made_by):
    with pytest.raises(ConfigError, match="subclass of Environment"):
        register_environment("x", made_by)
