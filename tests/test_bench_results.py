"""What measurements print: ratios the right way around, all seeds, and no result of other settings."""

import json
from argparse import Namespace
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from bench import credit, distill, improve, judge_cost
from bench.peers import step


def test_a_peer_that_takes_longer_has_a_speed_up_above_one():
    ours, peer = (SimpleNamespace(seconds=seconds) for seconds in ([1.0, 2.0, 4.0], [2.0, 6.0, 40.0]))
    assert step.speed_up(ours, peer) == 3.0
    assert step.speed_up(None, peer) is None


def test_a_judge_that_costs_more_than_ours_has_a_share_below_one():
    ours, theirs = ([judge_cost.Measured(cpu, 0, 0) for cpu in each] for each in ([1, 1, 9], [4, 2, 10]))
    assert judge_cost.share(ours, theirs) == 0.5


@pytest.fixture
def trainings(monkeypatch):
    """A training of the mailbox measures its number of steps for each held-out task, plus its seed; all are listed."""
    trained = []

    def train(options, *, run_dir, steps, seed, **settings):
        trained.append(run_dir.name)
        run_dir.mkdir(parents=True)
        return [float(steps + seed)] * options.tasks

    monkeypatch.setattr(credit, "EXAMPLES", dict.fromkeys(credit.EXAMPLES, train))
    return trained


def test_credit_is_measured_anew_with_other_steps_or_tasks(trainings, tmp_path, capsys):
    for settings in (["--steps", "3"], ["--steps", "4"], ["--steps", "4", "--tasks", "7"], ["--steps", "3"]):
        credit.main(["email_search", "--seeds", "0", "--out", str(tmp_path), *settings])
    assert len(trainings) == len(set(trainings)) == 3 * len(credit.WAYS)
    assert "| 3.000 ± 0.000 |" in capsys.readouterr().out.splitlines()[-1]


def test_credits_last_column_is_over_all_seeds(trainings, tmp_path, capsys):
    credit.main(["email_search", "--seeds", "0", "3", "--steps", "1", "--tasks", "2", "--out", str(tmp_path)])
    *_, mean_std, branch = capsys.readouterr().out.splitlines()
    # The deviation of 1, 1, 4, 4 is the root of 3.
    for line in (mean_std, branch):
        assert line.split("|")[3:-1] == [" 1.000 ± 0.000 ", " 4.000 ± 0.000 ", " 2.500 ± 1.697 "]


def test_without_a_name_every_example_is_measured(trainings, tmp_path):
    credit.main(["--seeds", "0", "--out", str(tmp_path)])
    assert {name.partition("-")[0] for name in trainings} == set(credit.EXAMPLES)


def test_an_unknown_example_is_refused_by_name(capsys):
    with pytest.raises(SystemExit):
        credit.main(["mailbox"])
    assert "unknown examples: mailbox" in capsys.readouterr().err


def test_every_teacher_of_a_distillation_has_its_own_folders(monkeypatch, tmp_path):
    def train(steps, seed, *, run_dir, **settings):
        run_dir.mkdir()
        evaluations = [{"step": it, "success": 0.5} for it in range(steps + 1)]
        (run_dir / "report.json").write_text(json.dumps({"evaluations": evaluations}))

    monkeypatch.setattr(distill, "run", train)
    monkeypatch.setattr(distill, "last_checkpoint", lambda run_dir: run_dir / "checkpoints")
    options = {"seeds": [0], "teacher_seed": 9, "steps": 2, "distill_steps": 2, "tasks": 5, "out": tmp_path}
    folders = []
    for other in ({}, {"teacher_seed": 8}, {"tasks": 6}, {"steps": 3}):
        distill.main(Namespace(**options | other))
        folders.append(len([*tmp_path.iterdir()]))
    # GRPO alone doesn't depend on the teacher.
    assert folders == [3, 5, 8, 11]


def test_grpo_alone_is_measured_anew_on_other_held_out_tasks(monkeypatch, tmp_path):
    def train(*args, run_dir, eval_tasks, **settings):
        run_dir.mkdir(parents=True)
        (run_dir / "report.json").write_text(json.dumps({"after": {"success": len(eval_tasks) / 100}}))

    monkeypatch.setenv("OPENAI_API_KEY", "unused")
    monkeypatch.setattr(improve.art, "train_sync", train)
    results = [improve.alone("mailbox", 0, Namespace(tasks=tasks, out=tmp_path)) for tasks in (20, 30, 20)]
    assert results == [0.2, 0.3, 0.2]
