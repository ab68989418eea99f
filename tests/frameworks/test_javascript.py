"""JavaScript agents, unchanged and as child processes, keep every rule of an adapter and are trained."""

import json
import os

import pytest
from doc_blocks import blocks_of
from node_programs import NODE, ONLY_HERE, ROOT, WAYS, answer, output_of, output_of_blocking

import art_core as art
from framework_table import assert_documented, check_programs

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

PAGE = ROOT / "examples" / "javascript" / "README.md"
PROGRAMS = {
    "openai": ("OpenAI client (JS)", "openai"),
    "vercel_ai_sdk": ("Vercel AI SDK (JS)", "ai"),
    "langgraph": ("LangGraph (JS)", "@langchain/langgraph"),
    "mastra": ("Mastra (JS)", "@mastra/core"),
    "openai_agents": ("OpenAI Agents SDK (JS)", "@openai/agents"),
}
"""Folder -> its row in the table, and the package whose version is shown there."""
KINDS = {
    "plain": "async",
    "stream": "stream",
    "tools": "tools",
    "structured": "structured output",
    "nested": "nested agents",
}


def blocking(folder):
    def make(base_url):
        return lambda task: output_of_blocking(folder, task, "plain", base_url)

    return make


def asynchronous(folder, way):
    def make(base_url):
        async def agent(task):
            return await output_of(folder, task, way, base_url)

        return agent

    return make


@pytest.mark.parametrize("folder", PROGRAMS)
async def test_a_program_keeps_every_rule_as_a_child_process(folder):
    framework, package = PROGRAMS[folder]
    agents = {KINDS[way]: asynchronous(folder, way) for way in WAYS[folder] if way in KINDS}
    if folder in ("openai", "vercel_ai_sdk"):  # the others take several times as long to start
        agents["sync"] = blocking(folder)
    report = await check_programs(agents, framework=framework, reply=answer)
    manifest = json.loads((PAGE.parent / folder / "package.json").read_text())
    assert_documented(report, manifest["dependencies"][package])


def test_the_programs_of_the_page_are_trained_unchanged(tmp_path, monkeypatch):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{NODE.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("NODE_OPTIONS", f"--require={ONLY_HERE}")
    whole, asynchronously = (it for it in blocks_of(PAGE) if it.language == "python")
    page = {}
    exec(compile(whole.code, whole.where, "exec"), page)
    assert page["result"].report["steps"] == 2
    exec(compile(asynchronously.code, asynchronously.where, "exec"), page)
    evaluated = art.evaluate_sync(page["agent"], ["Which city?"], model="tiny", reward=page["reward"])
    for trajectory in [*art.load_trajectories(page["result"].run_dir), *evaluated.trajectories]:
        assert trajectory.output and trajectory.calls
        assert all(len(call.sampled_ids) == len(call.logprobs) > 0 for call in trajectory.calls)
