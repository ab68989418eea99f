"""The search: an unchanged agent gets better prompts from a reflector that sees its rollouts."""

import asyncio
import json
import random

import pytest
from openai import AsyncOpenAI
from screens import Lines

import art_audit
import art_core as art
from art_core.errors import ArtError, ConfigError
from art_core.testing import CountingLearner, FakeEngine
from art_core.testing.provider import PlainProvider
from art_gepa import WithPrompts, optimize
from scripted_training import ScriptedModel

TASKS = ["rain", "sunny", "a cloud", "the north wind", "hail", "snowy", "a storm", "the first frost"]
SEEN = []


async def agent(task):
    return await asked(AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="unused"), task)


async def asked(client, task):
    system = [{"role": "system", "content": f"Today is day {len(task)}. Repeat the word of the user."}]
    reply = await client.chat.completions.create(
        model="gpt-6-luna", messages=[*system, {"role": "user", "content": task}]
    )
    return reply.choices[0].message.content


def reply(request):
    """As a model that shouts only if it is asked to."""
    system, user = (message["content"] for message in request["messages"])
    SEEN.append(system)
    return user.upper() if "in capitals" in system else user


def reward(trajectory):
    return float(trajectory.output == trajectory.task.upper())


class Scripted:
    """A reflector whose second answer is right, unless it has no network after ``answers``."""

    def __init__(self, answers=99):
        self.answers, self.prompts = answers, []

    def __call__(self, prompt):
        if len(self.prompts) == self.answers:
            raise OSError("no network")
        self.prompts.append(prompt)
        return self._answer()

    def _answer(self):
        return (
            "```\nRepeat it twice.\n```"
            if len(self.prompts) == 1
            else "```\nRepeat the word of the user in capitals.\n```"
        )


def extends(prompt):
    """A reflector whose texts contain the old ones."""
    old = prompt.split("```")[1].strip()
    return f"```\n{old} Do it in capitals.\n```" if "Repeat" in old else f"```\n{old}\n```"


async def search(run_dir, reflector, **settings):
    usual = {"agent": agent, "tasks": TASKS, "reward": reward, "engine": FakeEngine(reply), "rollouts": 60}
    usual |= {"progress": False, **settings}
    return await optimize(model="tiny", reflector=reflector, run_dir=run_dir, **usual)


async def test_a_better_prompt_is_found_written_and_used(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    reflector = Scripted()
    result = await search("~/run", reflector, held_out=["new1", "new2"])
    assert (result.before, result.after) == (0.0, 1.0)
    assert result.rollouts <= 28 and result.reflections == len(reflector.prompts)
    [change] = result.changes
    assert (change.find, change.replace) == ("Repeat the word of the user.", "Repeat the word of the user in capitals.")
    assert "-Repeat the word of the user.\n+Repeat the word of the user in capitals." in result.patch()
    before, after = result.held_out
    assert (before.success, after.success) == (0.0, 1.0)
    assert all("Repeat" in prompt and "reward 0" in prompt for prompt in reflector.prompts)

    assert result.file.is_relative_to(tmp_path)

    # What is recorded is what the model was shown, in later runs as well.
    SEEN.clear()
    report = await art.evaluate(
        agent, ["abc"], model="tiny", engine=FakeEngine(reply), reward=reward, run_dir=tmp_path / "later",
        plugins=WithPrompts(result.file), progress=False,
    )  # fmt: skip
    assert report.success == 1.0
    [call] = report.trajectories[0].calls
    assert (
        [call.request["messages"][0]["content"]] == SEEN == ["Today is day 3. Repeat the word of the user in capitals."]
    )


async def test_other_prompts_are_another_experiment(tmp_path):
    result = await search(tmp_path / "search", Scripted())

    async def train(steps, **more):
        await art.train(
            agent, TASKS, model="tiny", engine=FakeEngine(reply), learner=CountingLearner(), reward=reward, steps=steps,
            run_dir=tmp_path / "run", progress=False, **more,
        )  # fmt: skip

    await train(1, plugins=WithPrompts(result.file))
    await train(2, plugins=WithPrompts(result.file))
    with pytest.raises(ConfigError, match=r"prompts .* those of a file \(\w{8}\) .* the agent's own"):
        await train(3)


@pytest.mark.system
async def test_what_the_model_itself_is_shown_stands_in_the_store(tmp_path):
    result = await search(tmp_path / "run", Scripted(), engine=ScriptedModel(lambda it: {"content": reply(it)}))
    assert result.after == 1.0
    assert art_audit.audit(tmp_path / "run").clean


async def test_the_prompts_for_a_providers_model_are_found_without_any_model_here(tmp_path, monkeypatch):
    provider = PlainProvider(FakeEngine(reply), {})
    with provider.running():
        monkeypatch.setenv("OPENAI_BASE_URL", provider.base_url)
        monkeypatch.setenv("OPENAI_API_KEY", "own")

        async def live(task):
            async with AsyncOpenAI() as client:
                return await asked(client, task)

        result = await optimize(
            live,
            TASKS,
            model="live",
            reward=reward,
            reflector=extends,
            run_dir=tmp_path / "run",
            rollouts=60,
            progress=False,
        )
    assert (result.before, result.after) == (0.0, 1.0)
    sent = {json.dumps(json.loads(it.body)["messages"]) for it in provider.requests}
    assert any("Repeat the word of the user. Do it in capitals." in it for it in sent)
    recorded = [call for t in art.load_trajectories(tmp_path / "run", split="prompts") for call in t.calls]
    assert {json.dumps(call.request["messages"]) for call in recorded} == sent


async def test_a_search_goes_on_where_it_was_interrupted(tmp_path):
    first, again = Scripted(answers=1), Scripted()
    with pytest.raises(ArtError, match=r"reflector .*Scripted failed: OSError: no network; to continue, repeat"):
        await search(tmp_path / "run", first)
    again.prompts = list(first.prompts)
    shown = len(SEEN)
    assert not (tmp_path / "run" / "prompts.json").exists(), "the last candidate isn't a result"
    result = await search(tmp_path / "run", again)
    assert result.after == 1.0 and len(again.prompts) == len(first.prompts) + 1
    whole = await search(tmp_path / "whole", Scripted())
    assert result.changes == whole.changes
    assert len(SEEN) - shown < 2 * whole.rollouts, "what was recorded is not run again"


async def test_what_the_texts_are_chosen_by_is_scored_on_its_own_tasks_alone(tmp_path):
    """A text that is better only for the tasks that the reflector sees is not better."""
    chosen_by = set(random.Random(0).sample(TASKS, len(TASKS))[:4])

    def only_the_reflectors(trajectory):
        return float(
            "in capitals" in trajectory.calls[0].request["messages"][0]["content"] and trajectory.task not in chosen_by
        )

    result = await search(tmp_path / "run", Scripted(), reward=only_the_reflectors)
    assert (result.before, result.after, result.changes) == (0.0, 0.0, ())


async def test_a_reward_that_raises_gives_no_score_and_ends_nothing(tmp_path):
    """For one task with any text, and for all tasks with a bad one."""

    def raises(trajectory):
        shown = trajectory.calls[0].request["messages"][0]["content"]
        if trajectory.task == "rain" or "twice" in shown:
            raise LookupError("no such word")
        return reward(trajectory)

    result = await search(tmp_path / "run", Scripted(), reward=raises)
    assert result.changes and result.after >= 0.75


async def test_a_tool_that_only_one_task_has_is_left_as_it_is(tmp_path):
    async def with_a_tool_of_its_own(task):
        client = AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="unused")
        names = ["shared", task.replace(" ", "_")]
        functions = [{"name": name, "description": f"Does {name}.", "parameters": {"type": "object"}} for name in names]
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": task}]
        tools = [{"type": "function", "function": function} for function in functions]
        return await client.chat.completions.create(model="m", messages=messages, tools=tools)

    result = await search(tmp_path / "run", Scripted(), agent=with_a_tool_of_its_own, reward=lambda it: 0.0)
    assert [it.name for it in result.components] == ["agent: system prompt", "tool shared"]


@pytest.mark.system
async def test_the_mailbox_agent_gets_back_the_prompt_that_its_model_was_made_with(tmp_path, monkeypatch):
    from examples.email_search import agent as mailbox
    from examples.email_search.reward import reward as right
    from examples.email_search.tasks import SYSTEM_PROMPT, training_tasks

    def reflect(prompt):
        old = prompt.split("```")[1].strip()
        return f"```\n{SYSTEM_PROMPT if 'poet' in old else old}\n```"

    monkeypatch.setenv("OPENAI_API_KEY", "unused")
    monkeypatch.setattr(mailbox, "SYSTEM_PROMPT", "You are a poet. " * 30)
    result = await search(
        tmp_path / "run",
        reflect,
        agent=mailbox.build_agent(),
        tasks=training_tasks(24),
        reward=right,
        engine="embedded",
    )
    assert result.rollouts <= 60 and result.after > result.before == pytest.approx(-0.2)
    assert [(it.component, it.replace) for it in result.changes] == [("model: system prompt", SYSTEM_PROMPT)]
    assert art_audit.audit(tmp_path / "run").clean


async def test_the_budget_is_a_maximum_and_one_that_is_too_small_is_refused(tmp_path):
    useless = lambda prompt: "```\nRepeat it.\n```"  # noqa: E731
    with pytest.raises(ConfigError, match=r"rollouts=16 is too few for a single step on 8 tasks; pass 17 or more"):
        await search(tmp_path / "small", useless, rollouts=16)
    for rollouts in (17, 31):
        assert (await search(tmp_path / f"run{rollouts}", useless, rollouts=rollouts)).rollouts <= rollouts


class Numbered(Scripted):
    """A reflector whose answers differ."""

    def _answer(self):
        return f"```\nRepeat it, way {len(self.prompts)}.\n```"


async def test_a_reflector_that_is_asked_the_same_again_may_answer_something_else(tmp_path):
    """With few tasks and equal rewards, the reflector sees the same rollouts each time."""
    constant = {"tasks": TASKS[:2], "reward": lambda it: 0.5, "rollouts": 40}
    result = await search(tmp_path / "run", whole := Numbered(), **constant)
    assert len(set(whole.prompts)) < len(whole.prompts) == result.reflections
    assert result.rollouts == len(art.load_trajectories(tmp_path / "run", split="prompts")) > 10

    # What was asked before an interruption is not asked again after it.
    with pytest.raises(ArtError, match="no network"):
        await search(tmp_path / "again", first := Numbered(answers=4), **constant)
    rest = Numbered()
    rest.prompts = list(first.prompts)
    resumed = await search(tmp_path / "again", rest, **constant)
    assert rest.prompts == whole.prompts and resumed.reflections == result.reflections
    shown = [{str(it.calls[0].request["messages"]) for it in art.load_trajectories(tmp_path / name, split="prompts")}
             for name in ("run", "again")]  # fmt: skip
    assert shown[0] == shown[1]
    await search(tmp_path / "again", ended := Numbered(), **constant)
    assert not ended.prompts


async def test_a_resumed_search_with_a_limit_of_cost_finds_what_the_first_did(tmp_path):
    class Costly(Scripted):
        total_cost = 0.0

        def __call__(self, prompt):
            self.total_cost += 1.0
            return super().__call__(prompt)

    first = await search(tmp_path / "run", Costly(), max_cost=2.0)
    again = await search(tmp_path / "run", reflector := Costly(), max_cost=2.0)
    assert first.cost == again.cost == 2.0 and again.changes == first.changes and not reflector.prompts
    assert (await search(tmp_path / "less", Costly(), max_cost=1.0)).changes == ()


async def test_a_folder_with_another_search_is_refused(tmp_path):
    await search(tmp_path / "run", Scripted())
    with pytest.raises(ConfigError, match=r"belongs to another search \(different: reward\); pass another run_dir"):
        await search(tmp_path / "run", Scripted(), reward=lambda it: 1.0)
    with pytest.raises(ConfigError, match=r"\(different: tasks\)"):
        await search(tmp_path / "run", Scripted(), tasks=TASKS[1:])


async def test_a_reflector_that_returns_no_text_ends_the_search(tmp_path):
    def silent(prompt):
        return None

    with pytest.raises(ArtError, match="silent failed: ValueError: it returned None, not a text"):
        await search(tmp_path / "run", silent)


async def test_an_error_of_the_reflector_is_shown_without_keys_and_without_a_traceback(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-proj-SECRET")

    def down(prompt):
        raise OSError("refused: sk-proj-SECRET")

    screen = Lines()
    with pytest.raises(ArtError, match="down failed"):
        await search(tmp_path / "run", down, progress=screen)
    shown = "\n".join(screen.lines)
    assert "reflection failed (refused: ***)" in shown
    assert "SECRET" not in shown and "Traceback" not in shown


async def test_a_cancelled_search_leaves_nothing_running(tmp_path):
    begun, before = asyncio.Event(), asyncio.all_tasks()

    async def waits(task):
        answer = await agent(task)
        if len(SEEN) > 10:
            begun.set()
            await asyncio.sleep(60)
        return answer

    SEEN.clear()
    searching = asyncio.create_task(search(tmp_path / "run", Scripted(), agent=waits))
    await begun.wait()
    searching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await searching
    assert asyncio.all_tasks() == before


async def test_an_agent_without_instructions_is_refused(tmp_path):
    async def bare(task):
        client = AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="unused")
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": task}])

    with pytest.raises(ConfigError, match="nothing to optimise"):
        await optimize(
            bare, TASKS, model="tiny", engine=FakeEngine("hm"), reward=lambda t: 0.0, reflector=Scripted(),
            run_dir=tmp_path / "run", progress=False,
        )  # fmt: skip


async def test_one_task_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="1 task can't show"):
        await optimize(agent, ["one"], model="tiny", reward=reward, reflector=Scripted(), run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_file_is_readable(tmp_path):
    """A person can read and edit it."""
    from art_gepa import Change
    from art_gepa.prompts import write

    write(tmp_path / "prompts.json", [Change("agent: system prompt", "Hello.", "Grüß Gott.")])
    text = (tmp_path / "prompts.json").read_text()
    assert "Grüß Gott." in text and json.loads(text)["texts"][0]["component"] == "agent: system prompt"
