"""Some nodes are trained and the others answer as they are told to: frozen, with the policy, or where the agent sends them."""

import json

import httpx
import numpy as np
import pytest
from screens import Lines
from vllm_like import vllm_like

import art_audit
import art_core as art
from art_core.attribution import destination, inside_rollout, name_agents
from art_core.config import TrainConfig, make_config
from art_core.errors import CaptureError, ConfigError
from art_core.learner import tree_logprobs
from art_core.scoring import advantages, of_nodes
from art_core.store import Store
from art_core.testing import CountingLearner, FakeEngine
from art_core.token_tree import build_tree
from art_core.types import Call, Group, RolloutAddress, Trajectory
from art_embedded import TINY
from art_embedded.loading import load_model


async def ask(node: str, task: str, address: RolloutAddress, stream: bool = False) -> str:
    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
        response = await client.post(
            f"{address.base_url}/chat/completions",
            json={
                "model": "m",
                "messages": [{"role": "user", "content": f"{node} {task}"}],
                "temperature": 0.25,
                "stream": stream,
            },
            headers={"x-art-agent": node},
        )
    response.raise_for_status()
    return response.text if stream else response.json()["choices"][0]["message"]["content"]


async def two_nodes(task: str, address: RolloutAddress) -> str:
    """A planner and a writer in a team, each asking once."""
    return " ".join([await ask(node, task, address) for node in ("planner", "team/writer")])


def by_turns(trajectory: Trajectory) -> float:
    by_turns.count += 1
    return float(by_turns.count)


by_turns.count = 0


def call(agent: str | None) -> Call:
    return Call(prompt_ids=(1,), sampled_ids=(2,), logprobs=(-0.5,), agent=agent)


@pytest.mark.parametrize(
    ("agent", "node", "made"),
    [
        ("planner", "planner", True),
        ("team/writer", "writer", True),
        ("team/writer", "team", True),
        ("a/team/writer/model", "team/writer", True),
        ("team/writer", "write", False),
        ("team/writer", "team/model", False),
        (None, "planner", False),
    ],
)
def test_a_node_is_named_by_any_whole_part_of_its_path(agent, node, made):
    assert call(agent).made_by(node) is made
    assert call(agent).made_by("other", node) is made


def test_only_the_calls_of_the_trained_nodes_are_left_in_a_group_and_keep_their_advantages():
    group = Group(
        "t",
        tuple(
            Trajectory("t", calls=(call("a"), call("b"), call("a")), reward=reward, metrics={}) for reward in (0.0, 1.0)
        ),
    )
    scored = advantages(group)
    assert of_nodes(scored, ()) is scored
    kept = of_nodes(scored, ["a"])
    assert [[c.agent for c in t.calls] for t in kept.trajectories] == [["a", "a"]] * 2
    assert kept.advantages == scored.advantages
    assert kept.call_advantages == ()


async def test_a_reward_function_can_reward_a_node_and_it_shows_in_the_metrics(tmp_path):
    def reward(trajectory: Trajectory) -> float:
        score = by_turns(trajectory)
        trajectory.reward_node("writer", score)
        trajectory.metrics["writer/words"] = 3.0
        return 0.0

    async with art.open_run(tmp_path / "run", engine=FakeEngine(), learner=CountingLearner()) as run:
        groups = await run.score(await run.collect(two_nodes, ["x"], group_size=2), reward)
        metrics = await run.learn(groups)
    rewards = [[c.reward for c in t.calls] for t in groups[0].trajectories]
    assert [planner for planner, _ in rewards] == [None, None]
    assert metrics["call_reward/team/writer"] == sum(writer for _, writer in rewards) / 2
    assert metrics["call_reward"] == metrics["call_reward/team/writer"]
    assert metrics["writer/words"] == 3.0
    assert metrics["groups_with_contrast"] == 1
    lines = Lines()
    lines.log(1, metrics)
    assert f"reward of calls {metrics['call_reward']:6.3f}" in lines.lines[0] and "reward  0.000" not in lines.lines[0]


async def test_only_the_named_nodes_are_trained_and_sampled_as_training_asks(tmp_path):
    engine, learner = FakeEngine(), CountingLearner()
    settings = {"train_nodes": ["planner"], "other_nodes": "policy"}
    async with art.open_run(tmp_path / "run", engine=engine, learner=learner, **settings) as run:
        groups = await run.score(await run.collect(two_nodes, ["x"], group_size=3), by_turns)
        await run.learn(groups)
    assert [[c.agent for c in t.calls] for t in groups[0].trajectories] == [["planner", "team/writer"]] * 3
    ((tree,),) = learner.trees
    assert tree.num_targets == sum(len(t.calls[0].sampled_ids) for t in groups[0].trajectories)
    asked = {r["messages"][0]["content"]: r["temperature"] for r in engine.requests}
    assert asked == {"planner x": 1.0, "team/writer x": 0.25}


@pytest.mark.system
async def test_the_start_weights_answer_for_the_other_nodes(tmp_path):
    settings = {"model": "tiny", "train_nodes": "planner", "max_tokens": 8, "learning_rate": 1e-3, "warmup_steps": 0}
    async with art.open_run(tmp_path / "run", **settings) as run:
        for step in range(2):
            groups = await run.score(await run.collect(two_nodes, ["x"], group_size=4), by_turns)
            versions = {c.agent: c.policy_version for t in groups[0].trajectories for c in t.calls}
            assert versions == {"planner": step, "team/writer": 0}
            metrics = await run.learn(groups)
    assert metrics["untrained"] == 0
    found = art_audit.audit(tmp_path / "run")
    assert found.clean, found.problems
    assert found.checked == 16  # the frozen calls too, against the start weights


@pytest.mark.system
async def test_an_evaluation_of_a_run_keeps_its_frozen_nodes(tmp_path):
    settings = {"model": "tiny", "train_nodes": "planner", "max_tokens": 4, "learning_rate": 1e-2, "warmup_steps": 0}
    async with art.open_run(tmp_path / "run", **settings) as run:
        groups = await run.score(await run.collect(two_nodes, ["x"], group_size=4), by_turns)
        await run.learn(groups)
    await art.evaluate(
        two_nodes,
        ["x", "y"],
        model=tmp_path / "run",
        reward=by_turns,
        run_dir=tmp_path / "eval",
        progress=False,
        max_tokens=4,
    )
    with Store(tmp_path / "eval" / "run.sqlite") as store:
        calls = [call for t in store.trajectories(split="eval") for call in t.calls]
    assert {(c.agent, c.policy_version) for c in calls} == {("planner", 0), ("team/writer", -1)}
    start = load_model(str(TINY))
    for call in calls:
        tree = build_tree([Trajectory("t", calls=(call,))])
        found = tree_logprobs(start, tree).detach().numpy()
        same = np.allclose(found, np.array(call.logprobs), atol=1e-3)
        assert same is (call.agent == "team/writer")


async def test_imitation_takes_the_calls_of_the_trained_nodes(tmp_path):
    learner = CountingLearner()
    settings = {"train_nodes": ["planner"], "other_nodes": "policy"}
    async with art.open_run(tmp_path / "run", engine=FakeEngine(), learner=learner, **settings) as run:
        (group,) = await run.score(await run.collect(two_nodes, ["x"], group_size=2), by_turns)
        await run.learn_sft(group.trajectories)
    ((tree,),) = learner.trees
    assert tree.num_targets == sum(len(t.calls[0].sampled_ids) for t in group.trajectories)


async def test_a_later_step_in_which_the_trained_nodes_make_no_call_is_one_without_contrast(tmp_path):
    settings = {"train_nodes": ["planner"], "other_nodes": "policy"}

    async def routed(task: str, address: RolloutAddress) -> str:
        return await two_nodes(task, address) if task == "both" else await ask("team/writer", task, address)

    async with art.open_run(tmp_path / "run", engine=FakeEngine(), learner=CountingLearner(), **settings) as run:
        counts = []
        for task in ("both", "one"):
            groups = await run.score(await run.collect(routed, [task], group_size=2), by_turns)
            counts.append((await run.learn(groups))["groups_with_contrast"])
    assert counts == [1, 0]


async def test_contrast_of_untrained_nodes_alone_asks_for_further_groups(tmp_path):
    def reward(trajectory: Trajectory) -> float:
        trajectory.reward_node("writer", by_turns(trajectory))
        return 0.0

    settings = {"train_nodes": ["planner"], "other_nodes": "policy", "dynamic_sampling": True, "max_extra_rounds": 2}
    parts = {"engine": FakeEngine(), "learner": CountingLearner(), "progress": False, "run_dir": tmp_path / "run"}
    result = await art.train(
        two_nodes,
        list("abcd"),
        model="tiny",
        steps=1,
        tasks_per_step=1,
        group_size=2,
        reward=reward,
        **parts,
        **settings,
    )
    metrics = json.loads((result.run_dir / "metrics.jsonl").read_text())
    assert (metrics["groups_sampled"], metrics["groups_with_contrast"]) == (3, 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_server_can_be_the_frozen_model_by_the_name_that_it_serves_under(tmp_path, stream):
    learner = CountingLearner()
    with vllm_like() as server:
        settings = {"train_nodes": ["planner"], "frozen_model": server.url, "max_staleness": 1}
        async with art.open_run(tmp_path / "run", engine=FakeEngine(), learner=learner, **settings) as run:
            async with run.rollout("x") as rollout:
                for node in ("planner", "team/writer"):
                    await ask(node, "x", rollout.address, stream=stream)
            scored = await run.score([art.Group("x", (rollout.trajectory,) * 2)], by_turns)
            metrics = await run.learn(scored)
    assert {request["model"] for request in server.requests} == {"served"}
    calls = rollout.trajectory.calls
    assert [(c.agent, c.policy_version, c.temperature) for c in calls] == [
        ("planner", 0, 1.0),
        ("team/writer", -1, 0.25),
    ]
    assert bytes(calls[1].sampled_ids) == b"team/writer x"
    assert metrics["staleness_max"] == 0
    ((tree,),) = learner.trees
    assert tree.num_targets == 2 * len(calls[0].sampled_ids)


async def test_calls_of_other_nodes_can_go_where_the_agent_sends_them():
    address = RolloutAddress("r", "http://127.0.0.1:9/v1", "key", "m", nodes=("planner",))
    at: list[str | None] = [None]
    name_agents(source := lambda: at[0])
    try:
        with inside_rollout(address):
            for name, where in (("planner", address), ("planner/model", address), ("writer", None), (None, None)):
                at[0] = name
                assert destination("m") is where
    finally:
        from art_core import attribution

        attribution.names._agent_sources.remove(source)


async def test_the_run_hands_its_nodes_to_the_address_where_others_pass_through(tmp_path):
    settings = {"engine": FakeEngine(), "learner": CountingLearner(), "train_nodes": ["planner"]}
    async with (
        art.open_run(tmp_path / "run", other_nodes="passthrough", **settings) as run,
        run.rollout("x") as rollout,
    ):
        assert rollout.address.nodes == ("planner",)


async def test_a_node_that_makes_no_call_is_an_error_that_lists_those_that_do(tmp_path):
    settings = {"train_nodes": ["planer"], "other_nodes": "policy"}
    async with art.open_run(tmp_path / "run", engine=FakeEngine(), learner=CountingLearner(), **settings) as run:
        with pytest.raises(CaptureError, match=r"train_nodes=\('planer',\).*'planner', 'team/writer'"):
            await run.collect(two_nodes, ["x"], group_size=2)


async def test_an_engine_object_cannot_serve_frozen_nodes_too(tmp_path):
    with pytest.raises(ConfigError, match="frozen_model="):
        async with art.open_run(tmp_path / "run", engine=FakeEngine(), learner=CountingLearner(), train_nodes=["a"]):
            pass


def test_settings_that_make_no_sense_together_are_refused():
    with pytest.raises(ConfigError, match="train_nodes="):
        make_config({"frozen_model": "tiny"})
    with pytest.raises(ConfigError, match="other_nodes must be .*'frosen'"):
        make_config({"other_nodes": "frosen"})
    assert make_config({"train_nodes": "planner"}) == TrainConfig(train_nodes=("planner",))


async def test_a_run_that_goes_on_with_the_same_nodes_is_not_warned_about(tmp_path, caplog):
    settings = {"train_nodes": ["planner"], "other_nodes": "policy"}
    for _ in range(2):
        async with art.open_run(tmp_path / "run", engine=FakeEngine(), learner=CountingLearner(), **settings):
            pass
    assert caplog.records == []
