"""``train(trackers=["langfuse", "otel"])``: every run of the agent is a trace, once, whatever the server does."""

import json
import sys

import pytest
from opentelemetry import trace as opentelemetry_trace
from screens import Lines
from team_agent import TOOL, Judge, agent, answers

import art_core as art
import art_langfuse
from art_core.errors import ConfigError
from art_core.plugins import Plugins
from art_core.store import Store
from art_core.testing import CountingLearner, FakeEngine
from art_core.types import Call, Group, Trajectory
from art_langfuse import LangfuseTracker, OtelTracker
from art_langfuse.observations import observations, trace_id


async def train(run_dir, *trackers, steps=2, **more):
    settings = {"tasks_per_step": 1, "group_size": 2, "engine": FakeEngine(answers), "progress": False, **more}
    return await art.train(
        agent, [{"input": "Where?", "answer": "here"}], model="tiny", reward=Judge(), steps=steps, run_dir=run_dir,
        learner=CountingLearner(), trackers=trackers, plugins=Plugins(art_langfuse, installed=False), **settings,
    )  # fmt: skip


def stored(run_dir, split="train"):
    with Store(run_dir / "run.sqlite") as store:
        return store.trajectories(split=split)


async def test_every_run_is_a_trace_with_its_nodes_calls_and_tools(server, tmp_path):
    await train(tmp_path / "mine", "langfuse")
    runs = stored(tmp_path / "mine")
    assert sorted(server.traces()) == sorted(trace_id(run.rollout_id) for run in runs) and len(runs) == 4
    run = runs[0]
    found = {it["name"]: it for it in server.observations(trace_id(run.rollout_id))}
    assert [(name, it["type"]) for name, it in found.items() if name != "chat"] == [
        ("run", "AGENT"), ("team", "AGENT"), ("planner", "AGENT"), ("look_up", "TOOL"), ("writer", "AGENT"),
    ]  # fmt: skip
    parents = {name: it["parentObservationId"] for name, it in found.items()}
    assert parents["run"] is None and parents["team"] == found["run"]["id"]
    assert parents["planner"] == parents["writer"] == found["team"]["id"]
    assert parents["look_up"] == found["planner"]["id"] and found["look_up"]["output"] == "found it"
    root = found["run"]
    assert (json.loads(root["input"]), root["output"]) == ({"input": "Where?", "answer": "here"}, "The answer.")
    assert (root["sessionId"], root["tags"], root["traceName"]) == ("mine", ["art", "train", "step-1"], "art train")
    assert root["metadata"]["rollout_id"] == run.rollout_id and root["metadata"]["policy_versions"] == [0]


async def test_a_generation_has_the_conversation_usage_and_weights(server, tmp_path):
    await train(tmp_path, "langfuse", steps=1)
    [run, _] = stored(tmp_path)
    chats = [it for it in server.observations(trace_id(run.rollout_id)) if it["type"] == "GENERATION"]
    assert len(chats) == 2
    for shown, call in zip(chats, run.calls, strict=True):
        assert json.loads(shown["input"]) == {"messages": call.request["messages"], "tools": [TOOL]}
        assert json.loads(shown["output"]) == call.response
        assert shown["usageDetails"] == {"input": len(call.prompt_ids), "output": len(call.sampled_ids)}
        assert (shown["model"], shown["metadata"]["requested_model"]) == ("tiny", "gpt-4.1")
        assert (shown["modelParameters"]["temperature"], shown["metadata"]["policy_version"]) == (1.0, 0)


@pytest.mark.system
async def test_rewards_explanations_and_metrics_are_scores(server, tmp_path):
    await train(tmp_path / "mine", "langfuse", eval_tasks=["held out"])
    for number, run in enumerate(stored(tmp_path / "mine")[:2]):
        scores = server.scores_of(trace_id(run.rollout_id))
        assert (scores["reward"]["value"], scores["reward"]["comment"]) == (number, f"because of {number}")
        assert scores["success"]["value"] == number
    session = [it for it in server.scores.values() if it.get("sessionId") == "mine"]
    assert {it["metadata"]["step"] for it in session if it["name"] == "reward"} == {1, 2}
    evaluations = [it for it in session if it["name"] == "evaluation/success"]
    assert [it["metadata"]["evaluation"] for it in evaluations] == ["before", "after"]
    tags = {tuple(it["tags"]) for it in server.observations() if it["name"] == "run"}
    assert ("art", "eval", "step-0") in tags


def test_scores_are_in_the_environment_of_their_traces(server, tmp_path, monkeypatch):
    runs = (Trajectory("t", (), reward=1.0, rollout_id="a"), Trajectory("t", (), reward=0.0, rollout_id="b"))
    for environment in ("staging", ""):
        monkeypatch.setenv("LANGFUSE_TRACING_ENVIRONMENT", environment)
        tracker = LangfuseTracker(tmp_path / f"run{environment}", art.TrainConfig())
        tracker.log(1, {"reward": 0.5})
        tracker.log_groups(1, [Group("t", runs)], "train")
        tracker.close()
        assert len(server.scores) == 3
        assert {it.get("environment", "") for it in server.scores.values()} == {environment}
        server.scores.clear()


@pytest.mark.system
async def test_what_fails_at_times_gets_everything_once_and_training_goes_on(server, tmp_path):
    server.faults.extend([500, None, "cut", (429, {"retry-after": "1"}), "lost", 503, "lost", None, "cut"])
    screen = Lines()
    result = await train(tmp_path, "langfuse", steps=3, progress=screen)
    assert result.report["steps"] == 3 and not any("failed" in line for line in screen.lines)
    runs = stored(tmp_path)
    assert sorted(server.traces()) == sorted(trace_id(run.rollout_id) for run in runs)
    assert len(server.spans) == 7 * len(runs)
    for run in runs:
        assert set(server.scores_of(trace_id(run.rollout_id))) == {"reward", "success"}
    assert not server.faults


@pytest.mark.system
async def test_a_server_that_is_away_is_said_once_and_at_the_end_with_what_was_lost(
    server, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr("art_langfuse.outbox.PATIENCE", 0.2)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    server.faults.extend([500] * 100)
    screen = Lines()
    result = await train(tmp_path, "langfuse", "otel", steps=2, progress=screen)
    assert result.report["steps"] == 2 and not server.spans
    runs = len(stored(tmp_path))
    for name, what, why in (("langfuse", "observations", "status 500"), ("otel", "spans", "cannot be reached")):
        first, last = [line for line in screen.lines if f"the tracker {name} failed" in line]
        assert "wait to be sent again" in first and why in first
        sent = 7 * runs + (2 if name == "otel" else 0)
        assert f"{what}: {sent} were never sent" in last and why in last
    assert not [it for it in caplog.records if it.name.startswith("opentelemetry")], "ours say it"


@pytest.mark.system
async def test_a_run_that_goes_on_doubles_nothing(server, tmp_path):
    await train(tmp_path, "langfuse", steps=1)
    await train(tmp_path, "langfuse", steps=2)
    before = dict(server.spans)
    assert len(server.traces()) == 4
    tracker = LangfuseTracker(tmp_path, art.TrainConfig())
    for step in (1, 2):
        runs = [it for it in stored(tmp_path) if it.rollout_id in told_in(tmp_path, step)]
        tracker.log_groups(step, [Group(runs[0].task, tuple(runs))], "train")
    tracker.close()
    assert server.spans.keys() == before.keys() and max(server.posts.values()) == 2
    for key, span in server.spans.items():
        assert (span["start"], span["end"]) == (before[key]["start"], before[key]["end"])
    assert len([it for it in server.scores.values() if it["name"] == "reward" and it.get("traceId")]) == 4


def tell_steps(run_dir, *trackers):
    """A run in ``run_dir`` tells each tracker its first step and an evaluation, as often as it is opened."""
    run_dir.mkdir(parents=True, exist_ok=True)
    for kind in trackers:
        tracker = kind(run_dir, art.TrainConfig())
        tracker.log(1, {"reward": 0.5, "seconds": 1.0})
        if kind is LangfuseTracker:
            tracker.log_evaluation(1, {"name": "after", "success": 1.0})
        tracker.close()


def test_runs_of_two_folders_with_one_name_are_not_one_run(server, tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
    tell_steps(tmp_path / "first" / "email", LangfuseTracker, OtelTracker)
    tell_steps(tmp_path / "second" / "email", LangfuseTracker, OtelTracker)
    assert (len(server.scores), len(server.spans)) == (6, 2)
    tell_steps(tmp_path / "first" / "email", LangfuseTracker, OtelTracker)  # goes on: what comes again replaces
    assert (len(server.scores), len(server.spans)) == (6, 2)
    assert {it["sessionId"] for it in server.scores.values()} == {"email"}


@pytest.mark.parametrize("kind", [LangfuseTracker, OtelTracker])
def test_a_run_whose_state_json_cannot_say_loses_no_trace(server, tmp_path, monkeypatch, kind):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
    runs = [Trajectory({(0, 1): "x"}, (), output=[{(0, 1): "o"}], rollout_id=it) for it in "ab"]
    tracker = kind(tmp_path, art.TrainConfig())
    tracker.log_groups(1, [Group("t", tuple(runs))], "train")
    tracker.close()
    said = [list(it["attributes"].values()) for it in server.spans.values()]
    assert len(said) == 2 and all('{"(0, 1)": "x"}' in it and "\"[{(0, 1): 'o'}]\"" in it for it in said)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (LangfuseTracker, {"langfuse.observation.model.name"}),
        (OtelTracker, {"gen_ai.agent.name", "gen_ai.response.model", "art.note.odd \ufffd"}),
    ],
)
def test_a_lone_surrogate_loses_no_attribute(server, tmp_path, monkeypatch, kind, names):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
    odd = "odd \udcff"
    request = {"messages": [{"role": "user", "content": odd}], "model": odd}
    call = Call((), (), (), policy_version=-1, request=request, response={"content": odd}, agent=odd)
    tracker = kind(tmp_path, art.TrainConfig())
    tracker.log_groups(1, [Group("t", (Trajectory(odd, (call,), notes={odd: odd}, rollout_id="a"),))], "train")
    tracker.close()
    assert len(server.spans) == 3
    said = [item for it in server.spans.values() for item in it["attributes"].items()]
    assert {name for name, value in said if value == "odd \ufffd"} >= names


def told_in(run_dir, step):
    with Store(run_dir / "run.sqlite") as store:
        return {it.rollout_id for it in store.rollouts(step=step)}


async def test_spans_follow_the_conventions_for_generative_ai(server, tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "my-training")
    before = opentelemetry_trace.get_tracer_provider()
    await train(tmp_path / "mine", "otel", steps=1)
    assert opentelemetry_trace.get_tracer_provider() is before
    assert server.resources[0]["service.name"] == "my-training"
    [run, _] = stored(tmp_path / "mine")
    found = {it["name"]: it for it in server.spans.values() if it["trace_id"] == trace_id(run.rollout_id)}
    assert list(found) == [
        "invoke_agent run", "invoke_agent team", "invoke_agent planner", "chat tiny", "execute_tool look_up",
        "invoke_agent writer",
    ]  # fmt: skip
    chat, tool, root = (found[name]["attributes"] for name in ("chat tiny", "execute_tool look_up", "invoke_agent run"))
    second = run.calls[1]
    assert chat["gen_ai.operation.name"] == "chat" and chat["gen_ai.request.model"] == "gpt-4.1"
    assert chat["gen_ai.response.model"] == "tiny" and chat["gen_ai.response.finish_reasons"] == ["stop"]
    assert chat["gen_ai.usage.input_tokens"] == len(second.prompt_ids)
    assert json.loads(chat["gen_ai.input.messages"])[1:] == [
        {"role": "assistant", "parts": [{"type": "tool_call", "id": "c1", "name": "look_up", "arguments": {}}]},
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "found it"}]},
    ]
    assert json.loads(chat["gen_ai.output.messages"]) == [
        {"role": "assistant", "parts": [{"type": "text", "content": "The answer."}], "finish_reason": "stop"}
    ]
    assert (tool["gen_ai.tool.name"], tool["gen_ai.tool.call.result"]) == ("look_up", "found it")
    assert (root["gen_ai.operation.name"], root["art.session"], root["art.step"]) == ("invoke_agent", "mine", 1)
    evaluations = {said["gen_ai.evaluation.name"]: said for _, said in found["invoke_agent run"]["events"]}
    assert evaluations["reward"]["gen_ai.evaluation.explanation"] == "because of 0"
    [step] = [it for it in server.spans.values() if it["name"] == "train_step"]
    assert step["attributes"]["art.metric.reward"] == 0.5


async def test_content_stays_here_where_the_environment_says_so(server, tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{server.url}/v1/traces")
    monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "false")
    await train(tmp_path, "otel", steps=1)
    assert len(server.spans) == 15
    said = json.dumps(list(server.spans.values()))
    assert all(words not in said for words in ("Where?", "found it", "The answer.", "because of"))


@pytest.mark.parametrize("captured", [True, False])
async def test_why_a_run_failed_is_content_and_of_what_kind_is_not(server, tmp_path, monkeypatch, captured):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
    monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", str(captured))
    runs = [Trajectory("t", (), error=error, rollout_id=error[:1]) for error in ("KeyError: 'secret'", "secret: no")]
    tracker = OtelTracker(tmp_path, art.TrainConfig())
    tracker.log_groups(1, [Group("t", tuple(runs))], "train")
    tracker.close()
    [first, second] = server.spans.values()
    assert first["status"] == (2, "KeyError: 'secret'" if captured else "KeyError")
    assert second["status"] == (2, "secret: no" if captured else "failed")
    assert captured or "secret" not in json.dumps([first, second])


async def test_what_cannot_work_is_refused_before_anything_runs(server, tmp_path, monkeypatch):
    monkeypatch.delenv("LANGFUSE_PUBLIC_KEY")
    with pytest.raises(ConfigError, match="LANGFUSE_PUBLIC_KEY is not set"):
        await train(tmp_path / "run", "langfuse")
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_ENDPOINT is not set"):
        await train(tmp_path / "run", "otel")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    with pytest.raises(ConfigError, match="http/json is unknown"):
        OtelTracker.check()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc", None)
    with pytest.raises(ConfigError, match=r"pip install opentelemetry-exporter-otlp-proto-grpc"):
        OtelTracker.check()
    assert not (tmp_path / "run").exists()


def test_a_tool_is_one_observation_with_the_result_of_its_own_call():
    def call(*messages, calls=()):
        asked = [{"id": it, "type": "function", "function": {"name": it.upper(), "arguments": "{}"}} for it in calls]
        response = {"role": "assistant", "content": "", **({"tool_calls": asked} if asked else {})}
        return Call((1,), (2,), (0.0,), request={"messages": list(messages)}, response=response)

    def result(name, said):
        return {"role": "tool", "tool_call_id": name, "content": said}

    user = {"role": "user", "content": "go"}
    first = call(user, calls=["a", "b"])
    shown = [user, first.response, result("a", "1"), result("b", "2")]
    second = call(*shown, calls=["a", "unanswered"])
    third = call(*shown, second.response, result("a", "3"))
    run = Trajectory("t", (first, second, third), rollout_id="r", seconds=6.0)
    found = observations(run, 100.0)
    assert [(it.name, it.tool and it.tool.result, it.start) for it in found[1:]] == [
        ("chat", None, 100.0), ("A", "1", 101.0), ("B", "2", 102.0), ("chat", None, 103.0), ("A", "3", 104.0),
        ("chat", None, 105.0),
    ]  # fmt: skip
    assert trace_id("r") == __import__("langfuse").Langfuse.create_trace_id(seed="r")
