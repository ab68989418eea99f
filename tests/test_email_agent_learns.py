"""The email agent gets better for real: the demo's path with fewer steps, on the known answer and on a judge's scores."""

import pytest

from art_core.store import Store
from bench import scripted_judge
from bench.judge_server import serving

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

# The demo's learning rate falls over its last ten steps: of six it would leave half.
SHORT = {"steps": 6, "decay_steps": 0}


def rise(report):
    """Return the rise of success at temperature 1 plus that at the agent's own: one alone has an interval of 15 to 30 points."""
    after, before = (
        sum(it["success"] for it in report["evaluations"] if it["name"] == name) for name in ("after", "before")
    )
    return after - before


def test_the_email_agent_gets_visibly_better(tmp_path):
    from examples.email_search.train import run

    report = run(**SHORT, run_dir=tmp_path / "run", eval_tasks=100).report
    assert 0.10 <= report["before"]["success"] <= 0.40
    assert rise(report) > 2 * 0.15  # measured with three seeds: 0.61, 0.73, 0.63


def test_the_demo_trains_on_a_judges_scores(tmp_path, monkeypatch):
    from examples.email_search.reward import reward
    from examples.email_search.train import run

    with serving(scripted_judge.judge) as server:
        monkeypatch.setenv("OPENAI_API_BASE", f"{server.url}/v1")
        monkeypatch.setenv("OPENAI_API_KEY", "a judge's key")
        report = run(**SHORT, judge="openai/scripted", run_dir=tmp_path / "run", eval_tasks=40).report
    assert server.asked >= 6 * 4
    assert report["reward"] == "ruler openai/scripted"
    assert report["account"]["judge/requests"] == server.asked
    assert rise(report) > 0.2  # measured: 0.58 and 0.90
    with Store(tmp_path / "run" / "run.sqlite") as store:
        trajectories = store.trajectories(split="train")
    judged_right = [it for it in trajectories if it.reward >= 0.8]
    assert judged_right
    assert all(reward(it) >= 0.9 for it in judged_right)
    assert len({it.reward for it in trajectories}) > 3
