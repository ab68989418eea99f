"""Whole programs: the classic one, as a script of its own, and a run of the real tiny model from training to import and SFT."""

import subprocess
import sys

import pytest

import art_core as art
import art_embedded
import art_langfuse
from art_core.plugins import Plugins
from art_core.store import Store
from art_embedded.rendering import Renderer
from art_langfuse.account import account
from art_langfuse.api import Project
from art_langfuse.importing import import_traces

pytestmark = pytest.mark.system

CLASSIC = """
from art_langfuse import ARTLangfuseTracker

tracker = ARTLangfuseTracker()

# Episode tracking
episode_data = {
    "episode_id": "ep_001",
    "agent_type": "email_search",
    "model_name": "Qwen/Qwen2.5-7B-Instruct",
    "initial_state": {"query": "find meeting emails"},
    "actions": [
        {
            "type": "search",
            "state": {"query": "find meeting emails"},
            "parameters": {"keywords": ["meeting", "schedule"]},
            "result": {"found_emails": 15},
            "reward": 0.3,
            "reasoning": "Initial search for meeting-related emails",
        }
    ],
    "final_result": {"selected_email": "email_123"},
    "total_reward": 0.85,
    "success": True,
}

trace = tracker.track_episode(episode_data)
print(f"Episode tracked: {trace.id}")
"""

UNTOUCHED = """
import sys
import openai, opentelemetry.trace as otel
before = openai.resources.chat.completions.Completions.create, otel.get_tracer_provider()
import art_embedded
import art_langfuse
from art_core import TrainConfig
tracker = art_langfuse.ARTLangfuseTracker()
tracker.track_episode({"actions": []})
tracker.flush()
runs = art_langfuse.LangfuseTracker("runs/none", TrainConfig())
runs.log(1, {"reward": 1.0})
runs.close()
assert before == (openai.resources.chat.completions.Completions.create, otel.get_tracer_provider())
from langfuse._client.resource_manager import LangfuseResourceManager
assert not LangfuseResourceManager._instances and "langfuse.openai" not in sys.modules
assert not [name for name in sys.modules if name.startswith("opentelemetry.instrumentation")]
"""


def run_script(code, folder=None):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=folder)


@pytest.mark.smoke
def test_the_classic_program_has_sent_its_episode_when_it_ends(server):
    done = run_script(CLASSIC)
    assert done.returncode == 0, done.stderr
    [trace] = server.traces()
    assert done.stdout == f"Episode tracked: {trace}\n" and len(server.observations(trace)) == 2


def test_what_waits_when_a_program_ends_is_tried_once_more(server, monkeypatch):
    server.faults.append(401)
    assert run_script(CLASSIC).returncode == 0
    assert len(server.spans) == 2


def test_no_client_of_the_user_is_patched_and_no_provider_touched(server, tmp_path):
    done = run_script(UNTOUCHED, tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(server.traces()) == 1 and [it["name"] for it in server.scores.values()] == ["reward"]


@pytest.mark.engines
async def test_a_run_of_the_tiny_model_is_imported_and_imitated(server, tmp_path):
    async def agent(question, address):
        import httpx

        messages = [{"role": "user", "content": question}]
        async with httpx.AsyncClient(base_url=address.base_url, timeout=120) as client:
            for _ in range(2):
                body = {"messages": messages, "max_tokens": 24}
                answer = await client.post("/chat/completions", json=body, headers={"authorization": "Bearer k"})
                messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "Go on."}]
        return messages[-2]["content"]

    server.faults.extend([500, "cut", None, (429, {"retry-after": "1"})])
    await art.train(
        agent, ["Which city?", "Where is it?"], model="tiny", reward=lambda run: float(len(run.output or "")), steps=2,
        tasks_per_step=2, group_size=4, run_dir=tmp_path / "run", trackers=["langfuse"], progress=False,
        plugins=Plugins(art_langfuse, art_embedded, installed=False),
    )  # fmt: skip
    project = Project(account())
    with Store(tmp_path / "imported" / "run.sqlite") as store:
        found = import_traces(project, store, [], Renderer("tiny"))
    project.close()
    trained = {it.rollout_id: it for it in art.load_trajectories(tmp_path / "run")}
    imported = art.load_trajectories(tmp_path / "imported")
    left_out = sum(found.left_out.values())
    assert len(imported) + left_out >= len(trained) == 16 and len(imported) >= 12
    by_trace = {f"langfuse-{art_langfuse.observations.trace_id(name)}": run for name, run in trained.items()}
    for run in imported:
        same = by_trace[run.rollout_id]
        if len(run.calls) == len(same.calls):
            assert [call.messages() for call in run.calls] == [call.messages() for call in same.calls]
            assert [call.prompt_ids for call in run.calls][:1] == [call.prompt_ids for call in same.calls][:1]
        assert (run.task, run.output, run.reward) == (same.task, same.output, same.reward)
    async with art.open_run(tmp_path / "warm", model="tiny", learning_rate=5e-4, warmup_steps=0) as run:
        metrics = await run.learn_sft(imported, epochs=6)
    assert metrics[-1]["nll"] < metrics[0]["nll"]
