"""What to do next fits what the run showed. test_decision.py of art-server has more, on five kinds of runs."""

from pathlib import Path

from art_cli.next_steps import next_steps


def commands(run_dir="runs/it", **found):
    return [it.command for it in next_steps(Path(run_dir), **{"verdicts": [], **found})]


def test_a_run_that_art_train_did_not_start_is_resumed_by_its_own_call():
    [advice, _] = next_steps(Path("runs/it"), ended="error", verdicts=[])
    assert advice.command is None and advice.text.startswith(
        "Fix the error, then repeat the call that started it, with run_dir='runs/it'"
    )


def test_a_run_without_evaluations_is_measured():
    given = {"agent": "my app.py:agent", "reward": "ruler"}
    assert commands(given=given) == ["art eval 'my app.py:agent' HELD_OUT --reward ruler --model runs/it"]
    given["eval_tasks"] = "held.jsonl"
    assert commands(given=given) == ["art eval 'my app.py:agent' held.jsonl --reward ruler --model runs/it"]
    assert commands() == ["art eval AGENT HELD_OUT --reward REWARD --model runs/it"]


def test_a_worse_model_is_not_exported():
    assert commands(verdicts=["better", "worse"]) == ["art compare runs/it --transcripts 3", None]
    assert commands(verdicts=["can't tell", "better"]) == ["art compare runs/it --transcripts 3", "art export runs/it"]


def test_tasks_that_were_solved_before_training_are_to_be_replaced():
    [advice] = next_steps(Path("runs/it"), verdicts=["can't tell"], steps=5, given={"agent": "a.py:a"}, solved=True)
    assert advice.command is None and advice.text.startswith("Train and evaluate on harder tasks")


def test_a_folder_with_a_space_is_quoted():
    assert commands("my runs/it", verdicts=["better"])[0] == "art compare 'my runs/it' --transcripts 3"


def test_an_evaluation_between_is_named():
    assert (
        commands(verdicts=["better"], after="step 20")[0]
        == "art compare runs/it@before 'runs/it@step 20' --transcripts 3"
    )
