"""Tasks for the tools of an MCP server, its stock agent, and the reward by rubric; the server is a real one."""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
from mcp_url import at_url
from typer.testing import CliRunner

pytest.importorskip("mcp")
pytest.importorskip("langchain_openai")
pytest.importorskip("datasketch")

import art_core as art
from art_cli.main import command
from art_core.errors import ConfigError, UpstreamError
from art_core.testing import FakeEngine
from art_core.testing.provider import PlainProvider
from art_ruler.answer import SCHEMA, read_scores
from art_ruler.judge import FunctionJudge, JudgeError
from art_ruler.judge_choice import judge_of
from art_tasks.mcp import Rubric, agent_of
from art_tasks.mcp.author import write_tasks
from art_tasks.mcp.rubric import question

HERE = Path(__file__).parent
WEATHER, ODD = f"{sys.executable} {HERE / 'mcp_weather.py'}", f"{sys.executable} {HERE / 'mcp_odd.py'} no-tools"
CITIES = ("Rome", "Bergen", "Cairo")


def as_judge(function):
    return FunctionJudge(function, timeout=10)


def task(city):
    return {"input": f"How often does it rain in {city}?", "rubric": f"Full marks if rainy_days was called for {city}."}


async def test_tasks_are_written_until_there_are_enough_and_none_says_the_same_as_another():
    asked = []

    async def author(messages):
        asked.append(messages[-1]["content"])
        news = [task(CITIES[(len(asked) - 1) % 3]), task("rome"), {"input": "No rubric."}]
        return "Here they are:\n```json\n" + json.dumps(news) + "\n```"

    tools, resources = [{"function": {"name": "rainy_days"}}], {"weather://cities": "Rome"}
    written = await write_tasks(as_judge(author), tools, resources, 3, about="Users are tourists.")
    assert [it["input"] for it in written.tasks] == [task(city)["input"] for city in CITIES]
    assert written.dropped == Counter({"the same as another": 3, "without an input or a rubric": 3})
    assert "rainy_days" in asked[0] and "Users are tourists." in asked[0] and "weather://cities:\nRome" in asked[0]
    assert "Write 3 new tasks." in asked[0] and "existing tasks" not in asked[0]
    assert "- How often does it rain in Rome?" in asked[1] and "Write 2 new tasks." in asked[1]


@pytest.mark.parametrize("answer", ["I can't.", "[]", "[1, 2]", json.dumps([task("Rome")]), "[{"])
async def test_a_model_without_new_ideas_is_not_asked_for_ever(answer):
    asked = []

    async def author(messages):
        asked.append(1)
        return answer

    written = await write_tasks(as_judge(author), [], {}, 50)
    assert len(asked) <= 4 and len(written.tasks) == ("Rome" in answer)


async def test_a_model_that_does_not_answer_is_an_error():
    async def author(messages):
        raise OSError("no route")

    with pytest.raises(JudgeError, match="no route"):
        await write_tasks(as_judge(author), [], {}, 1)


def says(request):
    """What a model does that calls the tool for the city in the task, and then answers."""
    [user] = [message["content"] for message in request["messages"] if message["role"] == "user"]
    if request["messages"][-1]["role"] == "tool":
        return f"It rains on {request['messages'][-1]['content']} days."
    city = next((city for city in CITIES if city in user), "Atlantis")
    call = {"name": "rainy_days", "arguments": json.dumps({"city": city})}
    return {"tool_calls": [{"id": "c", "type": "function", "function": call}]}


def scored(score):
    return json.dumps({"scores": [{"trajectory_id": "run", "explanation": "read", "score": score}]})


async def judging(messages):
    return judged(messages)


def judged(messages):
    """Full marks for an answer with a number of days; no answer for Cairo."""
    transcript = messages[-1]["content"]
    if "Cairo" in transcript:
        return "I would rather not say."
    return scored(float("It rains on 79" in transcript or "It rains on 202" in transcript))


@pytest.mark.system
async def test_the_stock_agent_uses_the_tools_and_is_scored_by_the_rubric_of_its_task(tmp_path):
    tasks = [task(city) for city in (*CITIES, "Oslo")]
    report = await art.evaluate(
        agent_of(WEATHER), tasks, model="tiny", engine=FakeEngine(says), reward=Rubric(judging), run_dir=tmp_path / "run",
        progress=False,
    )  # fmt: skip
    assert [t.error for t in report.trajectories] == [None] * 4
    assert [t.reward for t in report.trajectories] == [1.0, 1.0, None, 0.0]
    assert [t.metrics.get("success") for t in report.trajectories] == [1.0, 1.0, None, 0.0]
    assert [len(t.calls) for t in report.trajectories] == [2] * 4
    rome, _, cairo, oslo = report.trajectories
    assert rome.calls[1].agent == "call" and rome.notes["rubric"] == "read"
    assert "79" in rome.calls[1].request["messages"][-1]["content"]
    assert "no complete JSON object" in cairo.notes["unscored"]
    assert "Error: " in oslo.calls[1].request["messages"][-1]["content"]


async def test_a_task_without_a_rubric_is_unscored():
    trajectory = art.Trajectory(task={"input": "hello"}, calls=())
    assert await Rubric(judging).score(art.Group({"input": "hello"}, (trajectory,))) == [None]
    assert trajectory.notes["unscored"] == "the task has no rubric"


async def test_a_rubric_for_all_tasks_gives_way_to_the_rubric_of_a_task():
    asked = []

    async def judge(messages):
        asked.append(messages)
        return scored(0.5)

    tasks = ({"input": "what?", "rubric": "its own"}, {"input": "what?"}, "what?")
    trajectories = tuple(art.Trajectory(task=each, calls=()) for each in tasks)
    assert await Rubric(judge, "for all").score(art.Group(None, trajectories)) == [0.5] * 3
    assert all("what?" in messages[1]["content"] for messages in asked)
    assert ["its own" in messages[1]["content"] for messages in asked] == [True, False, False]
    # A conversation without tools can be a success too.
    assert ["tool" in messages[0]["content"] for messages in asked] == [True, False, False]


def test_a_rubric_needs_a_judge(monkeypatch):
    monkeypatch.delenv("ART_JUDGE", raising=False)
    with pytest.raises(ConfigError, match="needs a judge"):
        Rubric()


def test_the_judge_is_shown_task_rubric_and_transcript():
    call = art.Call(
        prompt_ids=(1,), sampled_ids=(2,), logprobs=(-1.0,),
        request={"messages": [{"role": "user", "content": "How often does it rain?"}]},
        response={"role": "assistant", "content": "Often."},
    )  # fmt: skip
    trajectory = art.Trajectory(task=task("Rome"), calls=(call,))
    shown = question(trajectory, "Full marks.")[-1]["content"]
    assert "<task>\nHow often does it rain in Rome?\n</task>" in shown
    assert "<rubric>\nFull marks.\n</rubric>" in shown and "Often." in shown


def provider(asked):
    """What a provider answers as author, as solver (who fails for Cairo) and as judge; ``asked`` counts."""

    def reply(request):
        if request.get("tools"):
            asked["solver"] += 1
            if asked["fails for Rome"] and "Rome" in json.dumps(request):
                raise UpstreamError("not today", status=400)
            return says(request)
        if request["messages"][0]["content"].startswith("You write tasks"):
            asked["author"] += 1
            return json.dumps([task(city) for city in (*CITIES, "Bergen")])
        asked["judge"] += 1
        return judged(request["messages"]).replace("I would rather not say.", scored(0))

    return PlainProvider(FakeEngine(reply), {})


def from_mcp(*more):
    return CliRunner().invoke(command(), ["tasks", "from-mcp", WEATHER, "--author", "openai/scripted", *more])


@pytest.fixture
def at_provider(tmp_path, monkeypatch):
    """An empty folder to work in, and a provider, whose counts of requests are returned."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-none")
    asked = Counter()
    with provider(asked).running() as served:
        for name in ("OPENAI_BASE_URL", "OPENAI_API_BASE"):
            monkeypatch.setenv(name, served.base_url)
        yield asked


def lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


@pytest.mark.system
def test_the_command_writes_tasks_that_were_solved_and_an_agent_that_trains_on_them(at_provider):
    ended = from_mcp("--tasks", "3", "--share", "0.5", "--run-dir", "tried")
    assert ended.exit_code == 0, ended.output
    assert "6 tools, 1 resource with text" in ended.stdout
    assert "dropped: 1, the same as another" in ended.stdout
    assert "solved in at least one of 2 attempts: 2 of 3 tasks" in ended.stdout
    train, held_out = lines("tasks.jsonl"), lines("held_out.jsonl")
    assert sorted(it["input"] for it in train + held_out) == sorted(task(city)["input"] for city in ("Rome", "Bergen"))
    assert {it["solved"] for it in train + held_out} == {1.0} and len(train) == len(held_out) == 1
    assert at_provider == Counter(author=1, solver=3 * 2 * 2, judge=3 * 2)
    assert len(art.load_trajectories("tried", split="eval")) == 6
    again = from_mcp()
    assert again.exit_code and "tasks.jsonl exists and may have been edited" in again.output + str(again.exception)
    [said] = [line for line in ended.stdout.splitlines() if line.startswith("next: art ")]
    trained = CliRunner().invoke(command(), [*said.removeprefix("next: art ").split(), "--run-dir", "trained"])
    assert trained.exit_code == 0, trained.output


@pytest.mark.system
def test_tasks_are_tried_by_an_agent_of_ones_own_and_only_the_reward_is_written(at_provider, tmp_path):
    app = f"from art_tasks.mcp import Server, agent_of\n\nmine = agent_of(Server({WEATHER!r}), model='own')\n"
    (tmp_path / "app.py").write_text(app)
    ended = from_mcp("--tasks", "3", "--agent", "app.py:mine", "--run-dir", "tried")
    assert ended.exit_code == 0, ended.output
    assert {call.request["model"] for t in art.load_trajectories("tried", split="eval") for call in t.calls} == {"own"}
    written = (tmp_path / "mcp_agent.py").read_text()
    assert "reward = Rubric('openai/scripted')" in written and "agent_of" not in written
    assert (
        "next: art train app.py:mine tasks.jsonl --eval-tasks held_out.jsonl --reward mcp_agent.py:reward"
        in ended.stdout
    )


@pytest.mark.system
def test_a_server_without_tools_and_what_cannot_work_are_refused_before_anything_is_paid_for(at_provider):
    Path("file").touch()
    url, token = "https://127.0.0.1:1/mcp", "Authorization: Bearer $NO_SUCH_TOKEN"
    for address, more, said in (
        (ODD, [], "has no tools"),
        (url, ["--header", "token"], "--header takes NAME: VALUE"),
        (url, ["--header", token], "NO_SUCH_TOKEN, which the MCP server should get, isn't set"),
        (WEATHER, ["--env", "NO_SUCH_KEY"], "NO_SUCH_KEY"),
        (WEATHER, ["--out", "held_out.jsonl"], "must differ"),
        (WEATHER, ["--agent", "app.py:agent"], "app.py"),
        (WEATHER, ["--agent", "json:__all__"], "no installed plugin adapts"),
        (WEATHER, ["--solver", "smolm2"], "smolm2"),
        (WEATHER, ["--run-dir", "file"], "is a file"),
        (WEATHER, ["--out", "file/tasks.jsonl"], "can't write file/tasks.jsonl"),
    ):
        ended = CliRunner().invoke(command(), ["tasks", "from-mcp", address, "--author", "openai/scripted", *more])
        assert ended.exit_code and said in ended.output + str(ended.exception)
    assert not +at_provider


@pytest.mark.system
def test_the_header_of_a_url_is_written_without_its_key(at_provider, tmp_path, monkeypatch):
    monkeypatch.setenv("WEATHER_TOKEN", "rain-or-shine")
    with at_url("rain-or-shine") as url:
        given = ["--header", "Authorization: Bearer $WEATHER_TOKEN", "--tries", "0", "--tasks", "3"]
        ended = CliRunner().invoke(command(), ["tasks", "from-mcp", url, "--author", "openai/scripted", *given])
    assert ended.exit_code == 0, ended.output
    written = (tmp_path / "mcp_agent.py").read_text()
    assert f"Server({url!r}, headers={{'Authorization': 'Bearer $WEATHER_TOKEN'}})" in written
    assert "rain-or-shine" not in written + ended.output and "any keys in them" not in ended.stdout


@pytest.mark.system
def test_a_key_that_would_be_written_is_announced(at_provider, tmp_path):
    with at_url("rain-or-shine") as url:
        given = ["--header", "Authorization: Bearer rain-or-shine", "--tries", "0", "--tasks", "3"]
        ended = CliRunner().invoke(command(), ["tasks", "from-mcp", url, "--author", "openai/scripted", *given])
    assert ended.exit_code == 0, ended.output
    assert "mcp_agent.py will contain the address and the headers with any keys in them" in ended.stdout


@pytest.mark.system
def test_without_attempts_all_tasks_are_kept_and_nothing_is_judged(at_provider):
    ended = from_mcp("--tasks", "3", "--tries", "0")
    assert ended.exit_code == 0, ended.output
    assert len(lines("tasks.jsonl")) == 2 and len(lines("held_out.jsonl")) == 1
    assert at_provider == Counter(author=1)


@pytest.mark.system
def test_if_nothing_was_solved_the_tasks_are_kept_and_tried_again_without_the_author(at_provider, tmp_path):
    ended = from_mcp("--tasks", "3", "--solver", "tiny", "--tries", "1", "--run-dir", "tried")
    assert (ended.exit_code, "no task was solved; to try those in untried.jsonl again" in ended.stdout) == (1, True), (
        ended.output
    )
    assert [path.name for path in tmp_path.glob("*.*")] == ["untried.jsonl"] and len(lines("untried.jsonl")) == 3
    again = from_mcp("--tasks", "3", "--tries", "1", "--run-dir", "again")
    assert again.exit_code == 0 and "untried.jsonl: 3 tasks of an earlier start" in again.stdout
    assert at_provider["author"] == 1 and len(lines("tasks.jsonl") + lines("held_out.jsonl")) == 2
    assert not (tmp_path / "untried.jsonl").exists()


@pytest.mark.system
def test_tasks_whose_attempts_failed_or_were_not_judged_are_kept_apart(at_provider, tmp_path):
    at_provider["fails for Rome"] = True
    ended = from_mcp("--tasks", "3", "--tries", "1", "--run-dir", "tried")
    assert ended.exit_code == 0, ended.output
    assert "1 attempt failed; the first: " in ended.stdout and "to see them: art view tried" in ended.stdout
    assert [it["input"] for it in lines("untried.jsonl")] == [task("Rome")["input"]]
    assert [it["input"] for it in lines("tasks.jsonl")] == [task("Bergen")["input"]]


@pytest.mark.system
def test_an_interrupted_author_is_asked_for_the_rest_only(at_provider):
    Path("untried.jsonl").write_text(json.dumps(task("Oslo")) + "\n")
    ended = from_mcp("--tasks", "3", "--tries", "0", "--share", "0")
    assert ended.exit_code == 0, ended.output
    assert [it["input"] for it in lines("tasks.jsonl")] == [task(city)["input"] for city in ("Oslo", "Rome", "Bergen")]
    assert not Path("untried.jsonl").exists() and not Path("held_out.jsonl").exists()
    assert "tasks.jsonl --reward" in ended.stdout


def test_an_author_that_the_stock_agent_cannot_call_needs_a_solver(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended = CliRunner().invoke(command(), ["tasks", "from-mcp", WEATHER, "--author", "anthropic/claude-sonnet-5-5"])
    assert ended.exit_code and "pass --solver" in ended.output + str(ended.exception)


def test_what_is_not_installed_is_named_with_the_install_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "langchain_openai", None)
    ended = from_mcp()
    said = ended.output + str(ended.exception)
    assert ended.exit_code and "langchain_openai not installed" in said and "art-tasks[mcp]" in said


@pytest.mark.parametrize("model", ["openai/gpt-5", "anthropic/claude-sonnet-4-5"])
def test_a_model_with_structured_output_is_asked_for_scores_as_a_judge_and_for_any_text_as_an_author(
    model, monkeypatch
):
    for key in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        monkeypatch.setenv(key, "sk-none")
    reward, author = Rubric(model), judge_of(model, timeout=1, retries=0, schema=None)
    reward.judge.prepare()
    author.prepare()
    assert reward.judge._format["json_schema"]["schema"] == SCHEMA and author._format == {}
    assert read_scores(scored(1), ["run"])["run"].score == 1
