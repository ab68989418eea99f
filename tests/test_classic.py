"""The classic surface: environments as configs and subclasses have them, and an agent inside and outside a rollout."""

import asyncio
import json
import subprocess
import sys
import textwrap

import pytest
from http_server import serving
from starlette.responses import JSONResponse
from starlette.routing import Route

import art_core as art
from art_core.agent import Agent
from art_core.attribution import running
from art_core.environment import Environment, register_environment
from art_core.errors import ConfigError, ModelCallError, StoreError, UpstreamError
from art_core.testing import CountingLearner, FakeEngine
from art_core.types import RolloutAddress


def said(text, **message):
    return {"choices": [{"message": {"role": "assistant", "content": text, **message}}]}


def run_of(tmp_path, **settings):
    return art.open_run(tmp_path / "run", **{"engine": FakeEngine(), "learner": CountingLearner(), **settings})


class Search(Environment):
    """As in the seed: keeps no state itself and takes what it needs, not a config."""

    def __init__(self, emails=("a", "b")):
        super().__init__()
        self.emails = list(emails)

    async def reset(self):
        return {"query": "which?", "search_results": [], "step": 0}

    async def step(self, action):
        state = await self.get_state()
        state["step"] += 1
        state["search_results"] += self.emails
        return state, 0.5, action["type"] == "select", {}


class Counter(Environment):
    """Keeps its own state, as the seed's game does."""

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


# environments


async def test_a_subclass_finds_the_state_that_it_returned_and_earlier_states_stay_as_they_were():
    environment = Search()
    first = await environment.reset()
    second, reward, done, _ = await environment.step({"type": "search"})
    third, *_ = await environment.step({"type": "select"})
    assert [state["step"] for state in (first, second, third)] == [0, 1, 2]
    assert [len(state["search_results"]) for state in (first, second, third)] == [0, 2, 4]
    assert (reward, done) == (0.5, False) and await environment.get_state() == third


async def test_what_is_put_into_the_first_state_is_found_in_the_states_that_follow():
    """The seed's evaluation gives its query that way."""
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
    with pytest.raises(NotImplementedError, match="Unfinished has no step"):
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
        (["search"], "cannot be used; give"),
        (3, "cannot be used; give"),
        ("serch", "did you mean 'search'"),
        ({"environment": "os:system", "arguments": {"command": "true"}}, "register_environment"),
        ({"environment": "tests.py:Search"}, "no environment is registered here"),
        ({"environment": ["search"]}, "no environment is registered here"),
        ({"environment": "counter", "arguments": [1]}, "must be a dict"),
        ({"environment": "counter", "arguments": {"begin": 1}}, "unexpected keyword argument 'begin'"),
        ({"environment": "counter", "start": 1}, "put them into 'arguments'"),
        ({"environment": "made"}, "made a int"),
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


# an agent inside a rollout


async def test_every_response_inside_a_rollout_is_a_recorded_call(tmp_path):
    engine = FakeEngine(['{"type": "search", "query": "x"}', '{"type": "select"}'])
    environment, agent, actions = Search(), Agent("Qwen/Qwen2.5-7B-Instruct"), []
    async with run_of(tmp_path, engine=engine) as run, run.rollout("t") as rollout:
        state, done = await environment.reset(), False
        while not done:
            actions.append(await agent.select_action(state))
            state, _, done, _ = await environment.step(actions[-1])
    assert actions == [{"type": "search", "query": "x"}, {"type": "select"}]
    assert len(rollout.trajectory.calls) == 2 and rollout.trajectory.error is None
    shown = rollout.trajectory.calls[1].request["messages"][0]["content"]
    assert '"search_results": ["a", "b"]' in shown


async def test_an_agent_is_run_by_collect_like_any_other(tmp_path):
    agent = Agent("tiny")

    async def episode(task):
        return await agent.generate_response(task, max_tokens=7, temperature=0.2)

    engine = FakeEngine("yes")
    async with run_of(tmp_path, engine=engine) as run:
        (group,) = await run.collect(episode, ["q"], group_size=2)
    assert [t.output for t in group.trajectories] == ["yes", "yes"]
    assert [len(t.calls) for t in group.trajectories] == [1, 1]
    assert engine.requests[0]["max_tokens"] == 7 and engine.requests[0]["temperature"] == 1.0


async def test_a_refused_call_fails_its_run_and_not_the_others(tmp_path):
    def reply(request):
        if "long" in request["messages"][0]["content"]:
            raise UpstreamError("too long", status=400, code="context_length_exceeded")
        return "short"

    agent, errors = Agent("tiny"), []

    async def episode(task):
        try:
            return await agent.generate_response(task)
        except ModelCallError as error:
            errors.append(error)
            raise

    async with run_of(tmp_path, engine=FakeEngine(reply)) as run:
        groups = await run.collect(episode, ["long", "other"], group_size=1)
    assert [t.output for g in groups for t in g.trajectories] == [None, "short"]
    assert "too long" in groups[0].trajectories[0].error
    assert (errors[0].status, errors[0].code) == (400, "context_length_exceeded")


async def test_responses_of_one_agent_do_not_wait_for_each_other(tmp_path):
    class Together(FakeEngine):
        waiting, all_there = 0, None

        async def chat(self, request):
            self.all_there = self.all_there or asyncio.Event()
            self.waiting += 1
            if self.waiting == 4:
                self.all_there.set()
            await self.all_there.wait()
            return await super().chat(request)

    agent = Agent("tiny")
    async with run_of(tmp_path, engine=Together()) as run:
        (group,) = await run.collect(agent.generate_response, ["q"], group_size=4)
    assert [t.output for t in group.trajectories] == ["ok"] * 4


async def test_a_call_that_is_passed_through_is_not_recorded(tmp_path):
    agent = Agent("helper", engine=FakeEngine("from the helper"))
    async with run_of(tmp_path, passthrough=["helper"]) as run, run.rollout("t") as rollout:
        assert await agent.generate_response("hi") == "from the helper"
        assert await Agent("tiny").generate_response("hi") == "ok"
    assert len(rollout.trajectory.calls) == 1


def answering(*answers):
    """Return a route that gives these answers in turn, and the requests that it was sent."""
    requests, left = [], list(answers)

    async def answer(request):
        requests.append((dict(request.headers), await request.json()))
        return left.pop(0)

    return Route("/v1/chat/completions", answer, methods=["POST"]), requests


def address_at(url):
    return RolloutAddress("r", f"{url}/v1", "the-key", "policy")


async def test_a_call_is_sent_with_the_rollouts_key_and_again_where_that_may_help():
    refused = JSONResponse({"error": {"message": "full"}}, 503, {"retry-after": "0"})
    route, requests = answering(refused, JSONResponse(said("at last")))
    with serving(route) as url, running(address_at(url)):
        assert await Agent("tiny").generate_response([{"role": "system", "content": "x"}], stop=["a"]) == "at last"
    (headers, body), (again, _) = requests
    assert headers["authorization"] == "Bearer the-key"
    assert headers["x-art-request-id"] == again["x-art-request-id"]
    assert body == {"model": "policy", "messages": [{"role": "system", "content": "x"}], "stop": ["a"]}


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (JSONResponse({"error": {"message": "no such rollout", "code": "gone"}}, 404), "no such rollout"),
        (JSONResponse({"error": "stop"}, 500, {"x-should-retry": "false"}), "status 500"),
        (JSONResponse({"choices": []}), "no chat completion"),
        (JSONResponse([1]), "status 200"),
    ],
)
async def test_an_answer_that_will_not_change_is_not_asked_for_again(answer, says):
    route, requests = answering(answer)
    with serving(route) as url, running(address_at(url)), pytest.raises(ModelCallError, match=says):
        await Agent("tiny").generate_response("hi")
    assert len(requests) == 1


async def test_an_answer_of_thinking_or_a_tool_call_alone_is_an_empty_text():
    route, _ = answering(JSONResponse(said(None, reasoning_content="hm")))
    with serving(route) as url, running(address_at(url)):
        assert await Agent("tiny").generate_response("hi") == ""


# actions


@pytest.mark.parametrize(
    ("response", "action"),
    [
        ('{"type": "search", "query": "a {b} c"}', {"type": "search", "query": "a {b} c"}),
        (
            'I think {this}. ```json\n{"type": "go",\n "to": {"type": "x"}}\n``` done',
            {"type": "go", "to": {"type": "x"}},
        ),
        ('{"type": "first"} no: {"type": "second"} {"note": 1}', {"type": "second"}),
        ('{"direction": "left"}', {"direction": "left", "type": "unknown", "error": "the action has no type"}),
        ('{"type": 3}', {"type": "unknown", "error": "the action has no type"}),
    ],
)
async def test_an_action_is_found_in_what_the_model_says(response, action):
    assert await Agent("tiny", engine=FakeEngine(response)).select_action({"step": 0}) == action


@pytest.mark.parametrize(
    "response",
    [
        "",
        "go left",
        '{"type": "go"',
        "{'type': 'go'}",
        '{"type": "go", "to": NaN}',
        '{"to": 1e999}',
        '{"a": "\\ud800"}',
        "{[" * 9000,
    ],
)
async def test_an_answer_without_an_action_is_an_action_that_says_so(response):
    action = await Agent("tiny", engine=FakeEngine(response)).select_action({})
    assert action["type"] == "none" and "no JSON" in action["error"] and action["response"] == response
    json.dumps(action)


async def test_a_state_of_numpy_arrays_is_shown_as_json():
    import numpy as np

    engine = FakeEngine("{}")
    state = {
        "board": np.zeros((1, 2), dtype=int),
        "score": np.int64(3),
        "seen": {1},
        "mean": np.float32(0.5),
        "é": None,
    }
    await Agent("tiny", engine=engine).select_action(state)
    shown = engine.requests[0]["messages"][0]["content"]
    assert '{"board": [[0, 0]], "score": 3, "seen": [1], "mean": 0.5, "é": null}' in shown


# an agent outside every rollout


def test_art_model_replaces_the_model_that_the_code_names(monkeypatch):
    assert Agent("some/model").model_name == "some/model"
    monkeypatch.setenv("ART_MODEL", "tiny")
    assert Agent("some/model").model_name == "tiny"


def test_importing_the_classic_surface_is_light():
    code = "import sys, art_core.agent, art_core.environment; print({'torch', 'transformers', 'aiohttp'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


async def test_a_cancelled_call_is_cancelled_also_where_the_engine_answers_all_the_same():
    class Half(FakeEngine):
        async def chat(self, request):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return await super().chat(request)

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await Agent("tiny", engine=Half()).generate_response("hi")


async def test_an_engine_of_ones_own_refuses_as_an_address_does_and_loads_nothing_itself(tmp_path):
    agent = Agent("tiny", engine=FakeEngine())
    with pytest.raises(ModelCallError) as caught:
        await agent.generate_response([])
    assert caught.value.status == 400
    with pytest.raises(ConfigError, match="engine of its own"):
        agent.load_checkpoint(tmp_path)


def folder(tmp_path, **files):
    path = tmp_path / "given"
    path.mkdir()
    for name, text in files.items():
        (path / name.replace("_json", ".json").replace("_sqlite", ".sqlite")).write_text(text)
    return path


@pytest.mark.parametrize(
    ("files", "error", "says"),
    [
        ({}, ConfigError, "is no checkpoint"),
        ({"run_sqlite": ""}, ConfigError, "no checkpoint yet"),
        ({"learner_json": "{", "config_json": "{}"}, StoreError, "learner.json is damaged"),
        ({"adapter_config_json": "[1]"}, StoreError, "adapter_config.json is damaged"),
    ],
)
def test_a_folder_that_is_no_checkpoint_is_refused_by_name(tmp_path, files, error, says):
    with pytest.raises(error, match=says) as caught:
        Agent("tiny").load_checkpoint(folder(tmp_path, **files))
    assert "given" in str(caught.value)


def test_a_file_that_is_no_checkpoint_is_refused_and_never_unpickled(tmp_path):
    with pytest.raises(ConfigError, match="there is no checkpoint best_checkpoint.pt"):
        Agent("tiny").load_checkpoint("best_checkpoint.pt")
    (tmp_path / "x.pt").write_bytes(b"\x80\x04cos\nsystem\n(S'touch owned'\ntR.")
    with pytest.raises(ConfigError, match="nothing is unpickled"):
        Agent("tiny").load_checkpoint(tmp_path / "x.pt")


async def test_a_model_that_is_not_there_is_named_at_the_first_call(tmp_path):
    agent = Agent("./nowhere")
    with pytest.raises(ConfigError, match="nowhere"):
        await agent.generate_response("hi")


SCRIPT = """
    import asyncio, threading
    from art_core.agent import Agent

    def decoding():
        return sum(thread.name == "art-decode" for thread in threading.enumerate())

    async def main():
        first, second = Agent("some/model"), Agent("other/model")  # ART_MODEL makes both the same
        print(decoding())
        answers = await asyncio.gather(*(agent.generate_response("hi", 4, 0.0) for agent in (first, second, first)))
        print(len(set(answers)), decoding())
        await first.aclose()
        print(decoding(), await second.generate_response("hi", 4, 0.0) == answers[0])
        await second.aclose()
        print(decoding(), await first.generate_response("hi", 4, 0.0) == answers[0])

    asyncio.run(main())
    asyncio.run(main())
"""


def test_a_process_has_one_engine_per_model_which_starts_when_asked_ends_when_left_and_at_exit(monkeypatch):
    monkeypatch.setenv("ART_MODEL", "tiny")
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(SCRIPT)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = ["1 1", "1 True", "0 True"]
    assert done.stdout.split("\n") == ["0", *lines, "1", *lines, ""]


async def test_a_checkpoint_answers_from_the_next_call_on(tmp_path):
    """A whole checkpoint, the same as one file, a run folder, and the file again with other weights in it."""
    from safetensors.torch import load_file, save_file

    from art_core.config import TINY, TrainConfig
    from art_core.learner import TorchLearner, checkpoint

    run_dir = tmp_path / "run"
    learner = TorchLearner(str(TINY), TrainConfig(lora_rank=0), None)
    with_other = {name: tensor + 0.05 for name, tensor in load_file(TINY / "model.safetensors").items()}
    for name, tensor in learner.model.named_parameters():
        if name in with_other:
            tensor.data.copy_(with_other[name])
    learner.save(run_dir / "checkpoints" / "step-000001")
    (run_dir / "run.sqlite").touch()
    single = tmp_path / "best_checkpoint.pt"
    save_file(dict(load_file(run_dir / "checkpoints" / "step-000001" / "model.safetensors")), single)
    assert (run_dir / "checkpoints" / "step-000001" / checkpoint.MANIFEST).is_file()

    agent = Agent("tiny")

    async def answer():
        return await agent.generate_response("Which city?", max_tokens=8, temperature=0.0)

    try:
        start = await answer()
        agent.load_checkpoint(run_dir)
        trained = await answer()
        assert trained != start
        agent.load_checkpoint(run_dir / "checkpoints" / "step-000001")
        assert await answer() == trained
        agent.load_checkpoint(single)
        assert await answer() == trained
        save_file(dict(load_file(TINY / "model.safetensors")), single)
        agent.load_checkpoint(single)
        assert await answer() == start
    finally:
        await agent.aclose()


async def test_an_adapter_is_put_on_the_model_that_it_was_trained_on(tmp_path):
    import torch

    from art_core.config import TINY, TrainConfig
    from art_core.learner import TorchLearner

    learner = TorchLearner(str(TINY), TrainConfig(lora_rank=4), None)
    torch.manual_seed(0)
    for name, tensor in learner.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(tensor, std=0.5)
    saved = tmp_path / "saved.pt"
    learner.save(saved)
    answers = []
    # The second as if it had been trained on another machine, where the base model was somewhere else.
    for base in (str(TINY), "/nowhere/tiny"):
        manifest = saved / "learner.json"
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "base_model": base}))
        agent = Agent("tiny")
        plain = await agent.generate_response("Which city?", max_tokens=8, temperature=0.0)
        agent.load_checkpoint(saved)
        answers.append(await agent.generate_response("Which city?", max_tokens=8, temperature=0.0))
        await agent.aclose()
    assert answers[0] == answers[1] != plain
