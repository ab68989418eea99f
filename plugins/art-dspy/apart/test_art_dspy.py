"""DSPy's programs keep every rule of an adapter."""

import dspy
import pytest
from dspy._vendor.lm15.transports import _sync

import art_dspy
from art_core.testing import check_adapter
from art_core.testing.provider import scripted_reply
from framework_table import assert_documented, collected, rain


def lm(base_url, model="openai/m", **settings):
    return dspy.LM(model, api_base=base_url, api_key="k", **{"cache": False, **settings})


def with_lm(program, *args, **settings):
    program.set_lm(lm(*args, **settings))
    return program


def blocking(base_url):
    return with_lm(dspy.Predict("question -> answer"), base_url)


def asynchronous(base_url):
    program = with_lm(dspy.Predict("question -> answer"), base_url, model_type="responses")

    async def agent(text):
        return (await program.acall(question=text)).answer

    return agent


def streaming(base_url):
    program = with_lm(dspy.Predict("question -> answer"), base_url, "anthropic/m")
    listeners = [dspy.streaming.StreamListener(signature_field_name="answer")]
    stream = dspy.streamify(program, stream_listeners=listeners)

    async def agent(text):
        *_, prediction = [chunk async for chunk in stream(question=text)]
        return prediction.answer

    return agent


def structured(base_url):
    class Structured(dspy.Module):
        def __init__(self):
            self.predict = dspy.Predict("question -> answer")

        def forward(self, question):
            with dspy.context(adapter=dspy.JSONAdapter()):
                return self.predict(question=question).answer

    return with_lm(Structured(), base_url, "openai/gpt-4o-mini")


def with_tools(base_url):
    program = with_lm(dspy.ReActV2("question -> answer", tools=[rain]), base_url, "openai/gpt-4o-mini")

    def agent(text):
        with dspy.context(adapter=dspy.ChatAdapter(use_native_function_calling=True)):
            return program(question=text).answer

    return agent


def in_threads(base_url):
    program = with_lm(dspy.Predict("question -> answer"), base_url, "gemini/m")

    def agent(text):
        examples = [dspy.Example(question=f"{text} {i}").with_inputs("question") for i in range(2)]
        parallel = dspy.Parallel(num_threads=2, disable_progress_bar=True, max_errors=1)
        return [prediction.answer for prediction in parallel([(program, example) for example in examples])]

    return agent


def delegating(base_url):
    class Delegating(dspy.Module):
        def __init__(self):
            self.draft = dspy.ChainOfThought("question -> answer")
            self.checks = [dspy.Predict("question, draft -> answer")]

        def forward(self, question):
            draft = self.draft(question=question).answer
            return self.checks[0](question=question, draft=draft)

    return with_lm(Delegating(), base_url)


def failing(base_url):
    def agent(text):
        raise LookupError(with_lm(dspy.Predict("question -> answer"), base_url)(question=text))

    return agent


def reply(request):
    """Answer in DSPy's format."""
    answer = scripted_reply(request)
    if request.get("response_format") or answer.get("tool_calls"):
        return answer
    fields = {"reasoning": "r", "answer": answer["content"]}
    return {
        "content": "".join(f"[[ ## {name} ## ]]\n{text}\n\n" for name, text in fields.items()) + "[[ ## completed ## ]]"
    }


async def test_programs_keep_every_rule_of_an_adapter():
    agents = {"sync": blocking, "async": asynchronous, "stream": streaming, "tools": with_tools}
    agents |= {"structured output": structured, "threads": in_threads, "nested agents": delegating, "failing": failing}
    checked = {
        "framework": "DSPy",
        "plugin": art_dspy,
        "packages": {"dspy"},
        "agent_names": {"draft.predict", "checks[0]"},
    }
    assert_documented(await check_adapter(agents, reply=reply, **checked))


def collected_from(folder, program, **settings):
    """Return what a task's rollouts recorded."""
    agent = with_lm(program, "http://127.0.0.1:9/v1", **settings)
    return collected(folder, agent, reply, to_input=lambda text: {"question": text})


class Untouched:
    def get(self, *args, **kwargs):
        raise AssertionError("a rollout used the cache")

    put = get


async def test_no_cache_answers_a_rollout(tmp_path, monkeypatch):
    # Not setattr, which would look at the cache first, and so make one on disk.
    monkeypatch.setitem(vars(dspy), "cache", Untouched())
    trajectories = await collected_from(tmp_path, dspy.ChainOfThought("question -> answer"), cache=True)
    assert [len(trajectory.calls) for trajectory in trajectories] == [1, 1]
    assert trajectories[0].output == {"reasoning": "r", "answer": "answer to task-000"}


async def test_a_call_that_is_tried_again_is_recorded_once(tmp_path, monkeypatch):
    read, lost = _sync.StdlibTransport._read_head, []

    def lose_the_first(*args, **kwargs):
        head = read(*args, **kwargs)
        if not lost:
            lost.append(head)
            raise _sync.ReadError("lost")
        return head

    monkeypatch.setattr(_sync.StdlibTransport, "_read_head", lose_the_first)
    trajectories = await collected_from(tmp_path, dspy.Predict("question -> answer"))
    assert lost and [len(trajectory.calls) for trajectory in trajectories] == [1, 1]


def test_a_task_that_is_no_dict_is_the_only_input():
    assert art_dspy._only_input(dspy.ChainOfThought("question -> answer")) == "question"
    with pytest.raises(ValueError, match="Predict has the inputs a, b: a task must be a dict of them"):
        art_dspy._only_input(dspy.Predict("a, b -> answer"))
