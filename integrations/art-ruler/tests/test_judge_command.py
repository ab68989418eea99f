"""``art judge``: opinions beside the scores of stored runs, people's preferences, and how well judges agree with them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import judging
import pytest
from http_server import serving
from judging import TASK, call, grade, plain
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from typer.testing import CliRunner

from art_cli.main import command
from art_core.errors import ConfigError
from art_core.store import Store

WORTHS = ((0.2, 0.9, 0.5), (0.7, 0.1), (0.4, 0.6, 0.3, 0.8))
"""Of the runs, by group. The rewards that the runs were given first turn the last group round."""

JUDGE = """
import json, re, pathlib
from judging import grade, plain

async def fair(messages):
    with open({log!r}, "a") as log:
        log.write("asked\\n")
    return plain(grade(messages))

async def unfair(messages):
    return plain([it | {{"score": 1 - it["score"]}} for it in grade(messages)])

async def silent(messages):
    return ""

async def slow(messages):
    import asyncio
    if "worth 0.7" in messages[1]["content"]:
        pathlib.Path({log!r}).with_suffix(".slow").touch()
        await asyncio.sleep(60)
    return plain(grade(messages))
"""


@pytest.fixture
def run(tmp_path):
    """A run folder with three groups, the last of them of an evaluation."""
    folder = tmp_path / "run"
    with Store(folder / "run.sqlite") as store:
        for number, worths in enumerate(WORTHS):
            ids = [f"g{number}-r{place}" for place in range(len(worths))]
            for rollout_id, worth in zip(ids, worths, strict=True):
                split = "eval" if number == 2 else "train"
                store.add_rollout(rollout_id, task=f"task {number}", group=f"g{number}", split=split, step=number + 1)
                store.record(rollout_id, call(TASK, answer=f"worth {worth}"))
                store.finish_rollout(rollout_id, output="done")
            rewards = [1 - worth for worth in worths] if number == 2 else worths
            store.add_scores(
                ids, rewards, advantages=[0.5] * len(ids), by="exact", notes=[{"exact": "right"}] * len(ids)
            )
        store.add_rollout("never finished", task="task 0", group="g0")
    return folder


@pytest.fixture
def judge(tmp_path):
    file = tmp_path / "my_judge.py"
    file.write_text(JUDGE.format(log=str(tmp_path / "asked.log")))
    return file


class Provider:
    """An OpenAI-compatible server whose judge is right, or ``unfair``."""

    def __init__(self, *, unfair: bool = False) -> None:
        self.unfair, self.asked = unfair, 0

    def serving(self):
        return serving(Route("/v1/chat/completions", self.answer, methods=["POST"]))

    async def answer(self, request: Request) -> JSONResponse:
        self.asked += 1
        scores = grade((await request.json())["messages"])
        if self.unfair:
            scores = [it | {"score": 1 - it["score"]} for it in scores]
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": plain(scores)},
            "finish_reason": "stop",
        }
        usage = {"prompt_tokens": 1000, "completion_tokens": 100, "total_tokens": 1100}
        named = {"id": "c", "object": "chat.completion", "created": 1, "model": "j"}
        return JSONResponse({**named, "choices": [choice], "usage": usage})


def art(*arguments: object, put: str | None = None):
    return CliRunner().invoke(command(), [str(it) for it in arguments], input=put, env={"COLUMNS": "300"})


def scores(run: Path, rollout_id: str) -> list:
    with Store(run / "run.sqlite") as store:
        return list(store.scores(rollout_id))


def asked(run: Path) -> int:
    log = run.parent / "asked.log"
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_scores_and_explanations_are_written_beside_the_old_ones(run, judge):
    with Store(run / "run.sqlite") as store:
        before = store.trajectories(), store.rollouts()
    found = art("judge", run, "--judge", f"{judge}:fair", "--json")
    assert found.exit_code == 0, found.output
    told = json.loads(found.stdout)
    assert (told["groups"], told["judged"], told["already"], told["unscored"]) == (3, 3, 0, {})
    assert told["agreement_with_rewards"]["accuracy"] == pytest.approx(4 / 10)
    assert told["took"]["judge/requests"] == 3
    for number, worths in enumerate(WORTHS):
        for place, worth in enumerate(worths):
            first, second = scores(run, f"g{number}-r{place}")
            assert (first.by, first.notes, first.aside) == ("exact", {"exact": "right"}, False)
            assert (second.by, second.reward, second.aside) == (f"ruler {judge}:fair", worth, True)
            assert second.notes == {"ruler": "because"}
    with Store(run / "run.sqlite") as store:
        assert (store.trajectories(), store.rollouts()) == before


def test_what_is_judged_is_not_judged_again_unless_it_is_asked_for(run, judge):
    for number, (more, said) in enumerate(
        (([], (3, 0)), ([], (0, 3)), (["--again"], (3, 0)), (["--votes", 2], (3, 0)))
    ):
        told = json.loads(art("judge", "run", run, "--judge", f"{judge}:fair", "--json", *more).stdout)
        assert (told["judged"], told["already"]) == said, number
    assert asked(run) == 3 + 3 + 6
    fair = f"ruler {judge}:fair"
    assert [it.by for it in scores(run, "g0-r0")] == ["exact", fair, fair, f"{fair} votes 2"]


def test_split_step_and_limit_choose_the_groups(run, judge):
    for options, groups in (
        (["--split", "eval"], 1),
        (["--split", "train"], 2),
        (["--step", 2], 1),
        (["--limit", 1], 1),
    ):
        told = json.loads(art("judge", run, "--judge", f"{judge}:fair", "--json", "--again", *options).stdout)
        assert told["groups"] == groups


def test_groups_without_an_answer_are_told_with_the_reason(run, judge):
    found = art("judge", run, "--judge", f"{judge}:silent")
    assert found.exit_code == 1
    assert (
        "groups without scores 3: the judge's answer cannot be used: the answer holds no complete JSON object"
        in found.stdout
    )
    opinion = scores(run, "g0-r0")[-1]
    assert opinion.reward is None
    assert "no complete JSON" in opinion.notes["unscored"]
    assert json.loads(art("judge", run, "--judge", f"{judge}:silent", "--json").stdout)["already"] == 0


def test_a_rubric_may_be_a_file_and_has_scores_of_its_own(run, judge, tmp_path):
    (tmp_path / "rubric.md").write_text("Only worth counts.")
    for rubric in (tmp_path / "rubric.md", "Only worth counts."):
        art("judge", run, "--judge", f"{judge}:fair", "--rubric", rubric)
    assert asked(run) == 3
    assert scores(run, "g0-r0")[-1].by.startswith(f"ruler {judge}:fair rubric ")
    assert art("judge", run, "--judge", "x", "--rubric", "nowhere.md").exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["judge", "nowhere", "--judge", "m"], "is not a run folder"),
        (["judge", "RUN"], "no judge; pass --judge or set ART_JUDGE"),
        (["judge", "RUN", "--judge", "JUDGE:nobody"], "has no 'nobody'"),
        (
            ["judge", "RUN", "--judge", "m", "--step", "99"],
            "no matching groups of finished rollouts (splits with finished rollouts: eval, train)",
        ),
    ],
)
def test_what_cannot_be_judged_is_refused_with_the_reason(run, judge, arguments, said, monkeypatch):
    monkeypatch.delenv("ART_JUDGE", raising=False)
    named = [str(it).replace("RUN", str(run)).replace("JUDGE", str(judge)) for it in arguments]
    found = art(*named)
    assert found.exit_code != 0
    assert said in " ".join(f"{found.output} {found.exception}".replace("│", " ").split())


def test_names_of_models_with_colons_are_no_objects(run):
    from art_ruler.command import OBJECT

    for name in ("ollama/qwen3:8b", "anthropic.claude-3-haiku-20240307-v1:0", "ft:gpt-4o-mini:mine", "openai/gpt-4.1"):
        assert not OBJECT.fullmatch(name), name
    for name in ("judges.py:fair", "/some/where/judges.py:fair", "package.judges:fair"):
        assert OBJECT.fullmatch(name), name


def test_every_score_of_a_run_is_shown_with_its_reason(run, judge):
    art("judge", run, "--judge", f"{judge}:fair", "--step", 1)
    found = art("judge", "show", run, "--step", 1)
    assert found.exit_code == 0, found.output
    for text in ("g0-r1", "exact", "right", "my_judge.py:fair", "because", "0.900"):
        assert text in found.stdout


def test_judges_are_compared_with_peoples_preferences(run, judge, tmp_path):
    wanted = tmp_path / "mine.jsonl"
    wanted.write_text(
        '{"ranking": ["g0-r1", "g0-r2", "g0-r0"]}\n{"better": "g1-r0", "worse": "g1-r1"}\n{"better": "g2-r3", "worse": "g2-r2"}\n'
    )
    judges = ["--judge", f"{judge}:fair", "--judge", f"{judge}:unfair", "--judge", f"{judge}:silent"]
    found = art("judge", "calibrate", run, wanted, *judges, "--json")
    assert found.exit_code == 0, found.output
    fair, unfair, silent, own = json.loads(found.stdout)["judges"]
    assert (fair["judge"], fair["pairs"], fair["accuracy"], fair["tau"]) == (f"{judge}:fair", 5, 1.0, 1.0)
    assert (unfair["accuracy"], unfair["tau"]) == (0.0, -1.0)
    assert (silent["unscored"], silent["accuracy"], silent["groups_unscored"]) == (5, None, 3)
    assert (own["judge"], own["accuracy"]) == ("the run's own rewards", 0.8)
    again = json.loads(art("judge", "calibrate", run, wanted, *judges[:2], "--json").stdout)["judges"][0]
    assert (again["accuracy"], again["took"]["judge/requests"]) == (1.0, 0)
    table = art("judge", "calibrate", run, wanted, *judges[:2]).stdout
    assert "100.0%" in table


def test_functions_of_one_name_in_two_files_are_two_judges(run, tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"better": "g1-r0", "worse": "g1-r1"}\n')
    for name, score in (("one", 'it["score"]'), ("other", '1 - it["score"]')):
        source = "from judging import grade, plain\nasync def judge(messages):\n"
        source += f'    return plain([it | {{"score": {score}}} for it in grade(messages)])\n'
        (tmp_path / f"{name}.py").write_text(source)
    judges = [f"{tmp_path}/{name}.py:judge" for name in ("one", "other")]
    options = ["--judge", judges[0], "--judge", judges[1], "--json"]
    for _ in range(2):
        found = json.loads(art("judge", "calibrate", run, tmp_path / "mine.jsonl", *options).stdout)["judges"]
        assert [(it["judge"], it["accuracy"]) for it in found[:2]] == list(zip(judges, (1.0, 0.0), strict=True))


def test_one_model_at_two_addresses_is_two_judges(run, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "any")
    fair, unfair = Provider(), Provider(unfair=True)
    with fair.serving() as one, unfair.serving() as other:
        options = ["--judge", "openai/judge", "--json", "--api-base"]
        told = [json.loads(art("judge", run, *options, f"{url}/v1").stdout) for url in (one, other, one)]
    assert [it["already"] for it in told] == [0, 0, 3]
    rewards = {it.by: it.reward for it in scores(run, "g0-r1")}
    assert [rewards[it["by"]] for it in told] == pytest.approx([0.9, 0.1, 0.9])
    assert (fair.asked, unfair.asked) == (3, 3)


def test_what_is_judged_already_is_read_without_the_key(run, monkeypatch, tmp_path):
    monkeypatch.setenv("OPENAI_API_KEY", "any")
    (tmp_path / "mine.jsonl").write_text('{"better": "g1-r0", "worse": "g1-r1"}\n')
    provider = Provider()
    with provider.serving() as url:
        options = ["--judge", "openai/judge", "--json", "--api-base", f"{url}/v1"]
        art("judge", run, *options)
        monkeypatch.delenv("OPENAI_API_KEY")
        assert json.loads(art("judge", run, *options).stdout)["already"] == 3
        found = json.loads(art("judge", "calibrate", run, tmp_path / "mine.jsonl", *options).stdout)
        assert found["judges"][0]["accuracy"] == 1.0
        again = art("judge", run, *options, "--again")
        assert isinstance(again.exception, ConfigError) and "it needs OPENAI_API_KEY" in str(again.exception)
    assert provider.asked == 3


def test_a_judge_that_is_asked_again_is_asked_and_paid_for(run, monkeypatch, tmp_path):
    monkeypatch.setenv("OPENAI_API_KEY", "any")
    (tmp_path / "mine.jsonl").write_text('{"better": "g1-r0", "worse": "g1-r1"}\n')
    provider = Provider()
    with provider.serving() as url:
        options = ["--judge", "openai/gpt-4.1-mini", "--api-base", f"{url}/v1", "--json"]
        for again, requests in (([], 1), (["--again"], 1), ([], 0)):
            found = art("judge", "calibrate", run, tmp_path / "mine.jsonl", *options, *again)
            took = json.loads(found.stdout)["judges"][0]["took"]
            assert took["judge/requests"] == requests
            assert took["judge/cost"] == pytest.approx(requests * (1000 * 0.4e-6 + 100 * 1.6e-6))
    assert provider.asked == 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"better": "g0-r0", "worse": "g1-r0"}', "not in the same group"),
        ('{"better": "g0-r0", "worse": "nobody"}', "has no finished rollout 'nobody'"),
        ('{"good": "g0-r0"}', "line 1"),
    ],
)
def test_preferences_that_no_judge_can_be_held_to_are_refused(run, judge, tmp_path, line, said):
    (tmp_path / "mine.jsonl").write_text(line)
    found = art("judge", "calibrate", run, tmp_path / "mine.jsonl", "--judge", f"{judge}:fair")
    assert found.exit_code != 0
    assert said in str(found.exception)
    assert asked(run) == 0


def test_runs_that_stand_alone_are_not_judged_unless_it_is_asked_for(run, judge):
    with Store(run / "run.sqlite") as store:
        store.add_rollout("alone", task="task 9", group="g9", split="eval", step=9)
        store.record("alone", call(TASK, answer="worth 0.4"))
        store.finish_rollout("alone")
    command = ["judge", run, "--judge", f"{judge}:fair", "--json"]
    assert json.loads(art(*command).stdout)["groups"] == 3
    assert "1 groups of a single rollout" in " ".join(art(*command, "--step", 9).output.replace("│", " ").split())
    assert json.loads(art(*command, "--step", 9, "--single").stdout)["judged"] == 1


def test_what_is_wrong_with_a_judge_is_one_error(run):
    found = art("judge", run, "--judge", "nosuchprovider/model")
    assert isinstance(found.exception, ConfigError)
    assert "check its name" in str(found.exception)


def test_a_misspelt_command_is_no_folder(run):
    found = art("judge", "shwo", run)
    assert found.exit_code == 2
    assert "did you mean 'show'?" in found.output


def test_scores_that_were_kept_are_not_taken_for_free(run, judge, tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"better": "g1-r0", "worse": "g1-r1"}\n')
    command = ["judge", "calibrate", run, tmp_path / "mine.jsonl", "--judge", f"{judge}:fair"]
    assert "unknown" in art(*command).stdout
    assert "stored" in art(*command).stdout
    assert "unknown" in art(*command, "--again").stdout
    (tmp_path / "none.jsonl").write_text("\n")
    assert (
        "is empty; collect preferences"
        in art("judge", "calibrate", run, tmp_path / "none.jsonl", "--judge", "m").output
    )


def test_people_are_asked_pair_by_pair_and_every_answer_is_kept(run, judge, tmp_path):
    out = tmp_path / "mine.jsonl"
    found = art("judge", "prefer", run, "--out", out, put="what\na\n=\nq\n")
    assert found.exit_code == 0, found.output
    assert "Find the invoice." in found.stdout and "worth 0." in found.stdout
    assert "2 preferences written to" in found.stdout
    first, second = map(json.loads, out.read_text().splitlines())
    assert set(first) == {"better", "worse"} and set(second) == {"tie"}
    art("judge", "prefer", run, "--out", out, put="b\n")  # the input ends
    assert len(out.read_text().splitlines()) == 3
    assert (
        json.loads(art("judge", "calibrate", run, out, "--judge", f"{judge}:fair", "--json").stdout)["judges"][0][
            "pairs"
        ]
        == 3
    )


@pytest.mark.system
def test_stopping_loses_nothing_that_was_judged(run, judge):
    command = [sys.executable, "-m", "art_cli", "judge", str(run), "--judge", f"{judge}:slow"]
    paths = os.pathsep.join([str(Path(judging.__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": paths}
    ) as process:
        stop_in_the_middle(run, process)


def stop_in_the_middle(run: Path, process: subprocess.Popen) -> None:
    waiting = run.parent / "asked.slow"
    while not waiting.exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    assert "finished groups are stored" in process.stderr.read()
    assert [len(scores(run, f"g{number}-r0")) for number in range(3)] == [2, 1, 2]
