"""The classic email programs: what their environment pays, and training and evaluation end to end."""

import copy
import importlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import art_audit
from art_core.config import model_folder
from art_core.testing import FakeEngine
from examples.email_search.classic import email_agent, export

HERE = Path(email_agent.__file__).parent
EMAILS = [
    {
        "id": "60",
        "subject": "Ember webinar",
        "sender": "Aaron",
        "date": "2025-11-01",
        "body": "Hi. The room is E1. Regards",
    },
    {"id": "90", "subject": "Re: Ember webinar", "sender": "Irene", "date": "2025-11-22", "body": "Thanks, noted."},
    {
        "id": "12",
        "subject": "Velvet offsite",
        "sender": "Carla",
        "date": "2025-03-19",
        "body": "The code is 42. Regards",
    },
]
QUERY = "What is the room for the Ember webinar?"


async def begun():
    environment = email_agent.EmailSearchEnvironment(EMAILS)
    state = await environment.reset()
    state["query"] = QUERY
    return environment, state


async def test_searching_filtering_sorting_and_selecting_lead_to_the_email():
    environment, state = await begun()
    assert state["available_actions"] == ["search", "filter", "sort", "select"] and state["step"] == 0
    state, reward, done, _ = await environment.step({"type": "search", "query": "ember webinar"})
    assert [it["id"] for it in state["search_results"]] == ["60", "90"] and not done
    assert state["search_results"][0]["relevance_score"] == 2
    assert environment.calculate_search_reward(state["search_results"]) == pytest.approx(2 * 0.1 + 2 * 0.01)
    assert reward == pytest.approx(0.1 * 0.22)
    _, again, _, _ = await environment.step({"type": "search", "query": "ember webinar"})
    assert again == 0.0, "the same again is worth nothing"
    state, _, _, _ = await environment.step({"type": "sort", "by": "date"})
    assert [it["id"] for it in state["search_results"]] == ["90", "60"]
    state, reward, _, _ = await environment.step({"type": "filter", "filters": {"sender": "aaron"}})
    assert [it["id"] for it in state["search_results"]] == ["60"] and reward == pytest.approx(0.1 * 0.2)
    state, reward, done, _ = await environment.step({"type": "select", "email_id": "60"})
    assert (reward, done, state["step"]) == (1.0, True, 5)


async def test_a_filter_that_leaves_all_pays_nothing():
    environment, _ = await begun()
    await environment.step({"type": "search", "query": "velvet"})
    state, reward, _, _ = await environment.step({"type": "filter", "filters": {"sender": "carla"}})
    assert len(state["search_results"]) == 1 and reward == 0.0


async def test_no_sequence_of_other_actions_pays_more_than_selecting_the_right_email():
    environment, _ = await begun()
    actions = [
        {"type": "search", "query": "webinar"},
        {"type": "search", "query": "ember webinar the room is regards"},
        {"type": "filter", "filters": {"sender": "aaron"}},
        {"type": "filter", "filters": {"subject": "ember"}},
        {"type": "filter", "filters": {}},
        {"type": "sort", "by": "date"},
    ]
    rng = random.Random(0)
    paid = []
    for sequence in [[actions[0], *[actions[2]] * 9], *(rng.choices(actions, k=10) for _ in range(300))]:
        await environment.reset()
        paid.append(sum([(await environment.step(action))[1] for action in sequence]))
    assert 0.0 < max(paid) < 0.15, "at most a hint"
    environment, _ = await begun()
    assert (await environment.step({"type": "select", "email_id": "60"}))[1] == 1.0


async def test_the_queries_are_those_of_the_seed():
    async def queries(seed):
        environment = email_agent.EmailSearchEnvironment(export.emails(), seed=seed)
        return [(await environment.reset())["query"] for _ in range(8)]

    random.seed(1)
    first = await queries(7)
    random.seed(2)
    assert first == await queries(7) != await queries(8)
    assert len(set(first)) > 4, "an episode's query is not the next one's"


@pytest.mark.parametrize(
    ("action", "reward", "done"),
    [
        ({"type": "search", "query": "zebra"}, -0.1, False),
        ({"type": "filter", "filters": {"sender": "nobody"}}, -0.1, False),
        ({"type": "select", "email_id": "90"}, 0.3 * 2 / 3, True),
        ({"type": "select", "email_id": None}, -0.1, True),
        ({"type": "dance"}, -0.1, False),
    ],
)
async def test_what_does_not_lead_there_pays_little(action, reward, done):
    environment, _ = await begun()
    _, paid, ended, _ = await environment.step(action)
    assert (paid, ended) == (pytest.approx(reward), done)


@pytest.mark.parametrize(
    ("said", "action"),
    [
        ("I will search for Ember webinar.", {"type": "search", "query": "Ember webinar"}),
        ('search "budget plan"', {"type": "search", "query": "budget plan"}),
        (
            "filter by sender: Aaron, after 2025-01-01",
            {"type": "filter", "filters": {"sender": "Aaron", "after": "2025-01-01"}},
        ),
        ("sort by date", {"type": "sort", "by": "date"}),
        ("select id 90", {"type": "select", "email_id": "90"}),
        ('{"name": "read_email", "arguments": {"id": 60}}', {"type": "select", "email_id": "60"}),
        ("select the first", {"type": "select", "email_id": "60"}),
        ("hm", {"type": "search", "query": QUERY}),
    ],
)
async def test_an_action_is_read_from_the_words_of_the_model(said, action):
    agent = email_agent.EmailSearchAgent()
    agent.engine = FakeEngine(said)
    environment, state = await begun()
    state, *_ = await environment.step({"type": "search", "query": "ember"})
    found = await agent.select_action(state)
    assert {name: value for name, value in found.items() if name != "reasoning"} == action
    assert agent.action_history == [found]


async def test_an_agent_knows_the_actions_of_its_episode_only():
    agent = email_agent.EmailSearchAgent()
    agent.engine = FakeEngine("search")
    players = [copy.copy(agent), copy.copy(agent)]
    for player in (*players, players[0]):
        environment, state = await begun()
        for _ in range(2):
            state, *_ = await environment.step(await player.select_action(state))
    assert [len(player.action_history) for player in (agent, *players)] == [0, 2, 2]


def test_the_exported_files_are_those_of_the_mailbox():
    assert json.loads((HERE / "email_database.json").read_text()) == export.emails()
    assert json.loads((HERE / "test_queries.json").read_text()) == export.queries()
    environment = email_agent.EmailSearchEnvironment(export.emails())
    for query in export.queries():
        email = environment.select_email(query["email_id"])
        assert environment.calculate_selection_reward(email, query["query"]) == 1.0 and query["answer"] in email["body"]


async def test_the_success_rate_counts_the_queries_whose_email_was_selected(monkeypatch, capsys, tmp_path):
    (tmp_path / "email_database.json").write_text(json.dumps(EMAILS))
    (tmp_path / "test_queries.json").write_text(json.dumps([{"query": QUERY}] * 4))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(HERE)
    program = importlib.import_module("evaluate_email_agent")
    selected = iter(["60", "90", "12", "60"])  # the second is about the same project, the third about another

    class Scripted:
        def __init__(self, model):
            pass

        async def select_action(self, state):
            return {"type": "select", "email_id": next(selected)}

    monkeypatch.setattr(program, "EmailSearchAgent", Scripted)
    await program.evaluate_agent(untrained=True)
    assert "Overall Success Rate: 50.00%" in capsys.readouterr().out


@pytest.mark.engines
def test_the_programs_train_and_measure(tmp_path):
    """As they stand, from a folder with the two exported files."""
    for name in ("email_database.json", "test_queries.json"):
        (tmp_path / name).write_text((HERE / name).read_text())
    env = {**os.environ, "ART_MODEL": "tiny", "ART_EPOCHS": "2", "ART_LEARNING_RATE": "5e-4"}

    def run(name):
        done = subprocess.run(
            [sys.executable, HERE / name], cwd=tmp_path, env=env, text=True, capture_output=True, timeout=200
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    said = run("train_email_agent.py")
    assert "Epoch 2/2" in said and "Policy Loss:" in said and "KL Divergence:" in said and "Training completed!" in said
    start = load_file(Path(model_folder("tiny"), "model.safetensors"))
    first, best = (load_file(tmp_path / name) for name in ("checkpoint_epoch_0.pt", "best_checkpoint.pt"))
    assert first.keys() == best.keys() == start.keys()
    for before, after in ((start, first), (first, best)):
        assert any(not torch.equal(before[name], after[name]) for name in start)
    [run_dir] = (tmp_path / "runs").iterdir()
    report = art_audit.audit(run_dir, progress=False)
    assert report.clean, report.problems
    assert report.checked == report.calls > 0 and report.updates == 2
    said = run("evaluate_email_agent.py")
    assert "Testing query 30/30" in said and "Overall Success Rate: " in said
