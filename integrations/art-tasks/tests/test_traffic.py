"""Tasks from traffic: what is read from each source, what is the same task, what is held out."""

import json
import random
import string
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from typer.testing import CliRunner

from art_cli.arguments import load_tasks
from art_cli.main import command
from art_core.errors import ConfigError
from art_core.store import Store
from art_core.types import Call
from art_tasks.traffic import Request, curate, read
from art_tasks.traffic.curate import text_of
from art_tasks.traffic.similar import Found

WORDS = (
    "cancel order refund invoice parcel address delivery broken late colour size exchange account password email phone store "
    "opening hours monday shipping abroad coupon discount gift card receipt warranty repair manual battery charger cable screen"
)
BEGAN = datetime(2026, 11, 1, tzinfo=UTC)


def sentence(random_: random.Random, words: int = 14) -> str:
    return " ".join(random_.choice(WORDS.split()) for _ in range(words)) + f" {random_.randrange(10_000)}"


def altered(text: str, random_: random.Random) -> str:
    """The text as another person types it: one letter lost, doubled or exchanged in a long word."""
    places = [place for place, letter in enumerate(text) if letter.isalpha()]
    place = random_.choice(places)
    letter = random_.choice(["", text[place] * 2, random_.choice(string.ascii_lowercase)])
    return text[:place] + letter + text[place + 1 :]


def restyled(text: str, random_: random.Random) -> str:
    how = random_.randrange(4)
    return [text.upper(), f"  {text}!?", text.replace(" ", ",  "), f"“{text.title()}”"][how]


def requests(*texts: str) -> list[Request]:
    return [Request(text, f"c{number}", time=BEGAN + timedelta(hours=number)) for number, text in enumerate(texts)]


def inputs(tasks) -> list:
    return [task["input"] for task in tasks]


def test_two_hundred_planted_repetitions_are_all_found():
    random_ = random.Random(1)
    texts = [sentence(random_) for _ in range(400)]
    planted = [restyled(text, random_) for text in texts[:100]] + [altered(text, random_) for text in texts[100:200]]
    curated = curate(requests(*texts, *planted), held_out=0.3)
    assert Counter(inputs(curated.tasks)) == Counter(texts)
    assert sum(curated.dropped.values()) == 200
    assert sum(task["seen"] for task in curated.tasks) == 600


def test_none_of_two_hundred_held_out_tasks_leaks_into_training():
    random_ = random.Random(2)
    texts = [sentence(random_) for _ in range(200)]
    held_out = [{"input": text, "seen": 1} for text in texts]
    leaks = [restyled(text, random_) for text in texts[:100]] + [altered(text, random_) for text in texts[100:]]
    new = [sentence(random_) for _ in range(100)]
    curated = curate(requests(*leaks, *new), known=held_out, held_out=0)
    assert inputs(curated.train) == new
    assert curated.dropped == {"the same as a known task, or nearly": 200}


def test_no_held_out_task_is_nearly_a_training_task_and_no_conversation_is_on_both_sides():
    random_ = random.Random(3)
    texts = [sentence(random_, 6) for _ in range(300)]
    mixed = [
        altered(random_.choice(texts), random_) if random_.random() < 0.5 else random_.choice(texts) for _ in range(900)
    ]
    asked = [
        Request(text, f"c{random_.randrange(100)}", time=BEGAN + timedelta(hours=n)) for n, text in enumerate(mixed)
    ]
    curated = curate(asked)
    train = Found()
    for text in inputs(curated.train):
        train.add(text)
    assert [train.near(text) for text in inputs(curated.held_out)] == [None] * len(curated.held_out)
    sides = [{it["conversation"] for it in side} for side in (curated.train, curated.held_out)]
    assert not sides[0] & sides[1]
    assert len(sides[1]) == round(0.2 * sum(map(len, sides)))


def test_the_newest_conversations_by_their_last_request_are_held_out():
    asked = [
        Request("when do you open on sundays", "old", time=BEGAN),
        Request("is my parcel lost", "long", time=BEGAN + timedelta(hours=1)),
        Request("how much is shipping abroad", "middle", time=BEGAN + timedelta(hours=2)),
        Request("can i return a gift", "long", time=BEGAN + timedelta(hours=3)),
    ]
    curated = curate(asked, held_out=0.34)
    assert inputs(curated.held_out) == ["is my parcel lost", "can i return a gift"]
    assert inputs(curated.train) == ["when do you open on sundays", "how much is shipping abroad"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("please refund order 1017 to my card", "please refund order 1018 to my card"),
        ("what is 3 + 5 times the number of apples", "what is 3 * 5 times the number of apples"),
        ("the value is 1.25 of the usual amount", "the value is 12.5 of the usual amount"),
        ("move the arm by 5 degrees to the left", "move the arm by -5 degrees to the left"),
        ("is the value of x > y in the first example", "is the value of x < y in the first example"),
        ("write a parser for this format in C++", "write a parser for this format in C#"),
        ("please enable the login in two steps for ann", "please disable the login in two steps for ann"),
        ("book me a train from Paris to Rome for monday", "book me a train from Rome to Paris for monday"),
        (f"{WORDS} which of these are parts of a phone", f"{WORDS} how many of these have seven letters"),
    ],
)
def test_inputs_that_ask_something_else_are_other_tasks_of_the_same_kind(one, other):
    curated = curate(requests(one, other), held_out=0)
    assert inputs(curated.train) == [one, other]
    assert curated.train[0]["kind"] == curated.train[1]["kind"] == 1


@pytest.mark.parametrize(
    "other",
    [
        "Please cancel my order. 17 items are missing!",
        "please cancel my order - 17 items are missing",
        "please cancel my ordr, 17 items are missing",
        "Hello, please cancel my order 17 items are missing",
        "PLEASE cancel my order: \u201c17\u201d items are\u200b missing",
    ],
)
def test_inputs_that_are_typed_in_another_way_are_the_same_task(other):
    curated = curate(requests("please cancel my order 17 items are missing", other), held_out=0.5)
    assert [len(curated.train), len(curated.held_out), sum(curated.dropped.values())] == [1, 0, 1]


def test_of_a_kind_the_newest_are_kept():
    asked = requests(*(f"please refund order {1000 + number} to my card" for number in range(10)), "when do you open")
    curated = curate(asked, per_kind=3, held_out=0)
    assert [text[20:24] for text in inputs(curated.train)] == ["1007", "1008", "1009", ""]
    assert curated.dropped == {"beyond --per-kind": 7}


def test_only_requests_to_the_named_agent_are_kept():
    asked = [
        Request("book a flight", "a", system="You plan travels."),
        Request("pick a title", "b", system="You name chats."),
    ]
    curated = curate(asked, system="travels", held_out=0)
    assert inputs(curated.train) == ["book a flight"]
    assert curated.dropped == {"with another system prompt": 1}


def test_a_conversation_of_a_known_task_stays_out_of_the_next_round():
    known = [{"input": "where is my parcel", "conversation": "b"}]
    curated = curate([Request("when do you open", "a"), Request("and on sundays", "b")], known=known, held_out=0)
    assert inputs(curated.train) == ["when do you open"]
    assert curated.dropped == {"in a conversation of a known task": 1}


def test_at_least_one_of_several_conversations_is_held_out():
    curated = curate(requests("when do you open", "where is my parcel"), held_out=0.1)
    assert [len(curated.train), len(curated.held_out)] == [1, 1]


def test_what_has_no_text_is_dropped():
    assert curate([Request("  ", "a"), Request([], "b")]).dropped == {"without text": 2}


@pytest.mark.parametrize("settings", [{"held_out": 1.0}, {"held_out": -0.1}, {"same": 0.3}, {"same": 1.5}])
def test_impossible_settings_are_refused(settings):
    with pytest.raises(ConfigError, match="must be"):
        curate([], **settings)


# Sources


def lines(path, *rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path


def chat(*pairs: tuple[str, str]) -> list[dict]:
    return [{"role": role, "content": content} for role, content in pairs]


def text_call(messages, answer, **fields) -> Call:
    return Call(
        prompt_ids=(), sampled_ids=(), logprobs=(), policy_version=-1, finish_reason="stop", request={"messages": messages},
        response={"role": "assistant", "content": answer}, **fields,
    )  # fmt: skip


def test_a_gateways_conversations_ask_what_their_users_said_first(tmp_path):
    first = chat(("system", "You sell shoes."), ("user", "do you have size 45"))
    with Store(tmp_path / "run.sqlite") as store:
        store.add_rollout("c1", task="c1", split="gateway")
        store.record("c1", text_call(first, "yes"))
        store.record("c1", text_call([*first, *chat(("assistant", "yes"), ("user", "in blue?"))], "no"))
        store.add_rollout("c2", task="c2", split="gateway")
        store.record("c2", text_call(chat(("user", "hello"), ("user", "anybody there?")), "hi"))
        store.add_rollout("c3", task={"input": "named by the client", "answer": 7}, split="gateway")
        store.record("c3", text_call(first, "yes"))
        store.add_rollout("c4", task="c4", split="gateway")
        store.add_rollout("c5", task="c5", split="gateway")
        store.record("c5", replace(text_call(first, "yes"), request={}))
    traffic = read(tmp_path)
    one, two, three = traffic.requests
    assert (one.input, one.answer, one.system, one.conversation) == (
        "do you have size 45",
        "yes",
        "You sell shoes.",
        "c1",
    )
    assert one.time is not None
    assert two.input == chat(("user", "hello"), ("user", "anybody there?"))
    assert three.input == "named by the client"
    assert traffic.unread == {"a rollout without a call": 1, "a rollout without a readable request": 1}


def test_an_answer_that_was_cut_off_is_left_out(tmp_path):
    with Store(tmp_path / "run.sqlite") as store:
        store.add_rollout("c1", task="c1", split="gateway")
        store.record("c1", replace(text_call(chat(("user", "a long story")), "Once upon"), finish_reason="aborted"))
    [request] = read(tmp_path).requests
    assert (request.input, request.answer) == ("a long story", None)


def test_a_recorded_tasks_other_fields_stay_with_it_for_its_reward(tmp_path):
    with Store(tmp_path / "run.sqlite") as store:
        store.add_rollout("r1", task={"id": 7, "input": "2 + 2", "answer": 4, "conversation": "older"}, split="eval")
        store.record("r1", text_call(chat(("user", "2 + 2")), "5"))
        store.add_rollout("r2", task={"question": "who?", "expected": "me"}, split="eval")
        store.add_rollout("r3", task="plain", split="eval")
    train = curate(read(tmp_path).requests, held_out=0).train
    told = [{name: it for name, it in task.items() if name not in ("time", "seen", "kind")} for task in train]
    assert told == [
        {"id": 7, "input": "2 + 2", "answer": 4, "conversation": "r1"},
        {"question": "who?", "expected": "me", "input": {"question": "who?", "expected": "me"}, "conversation": "r2"},
        {"input": "plain", "conversation": "r3"},
    ]


def test_rows_of_two_exports_that_number_them_alike_are_of_other_conversations(tmp_path):
    """A row's id is not that of a conversation."""
    old = ["where is my parcel", "when do you open"]
    new = ["is there a discount", "the charger is broken", "how much is shipping abroad"]
    before, after = (
        read(lines(tmp_path / f"{name}.jsonl", *({"id": number, "input": it} for number, it in enumerate(texts, 1))))
        for name, texts in (("before", old), ("after", new))
    )
    known = curate(before.requests, held_out=0).train
    curated = curate(after.requests, known=known, held_out=0)
    assert inputs(curated.train) == new and not curated.dropped


def test_rows_of_chat_messages_inputs_and_tasks_are_read(tmp_path):
    path = lines(
        tmp_path / "rows.jsonl",
        {"messages": chat(("system", "Be brief."), ("user", "why?"), ("assistant", "because")), "session_id": "s1"},
        {
            "request": {"messages": chat(("user", "how?"))},
            "response": {"choices": [{"message": chat(("assistant", "so"))[0]}]},
        },
        {
            "id": "t1",
            "timestamp": "2026-11-03T10:00:00Z",
            "name": "x",
            "sessionId": "s2",
            "input": '"where?"',
            "output": "here",
        },
        {"input": "2 + 2", "answer": 4},
        {"question": "who?", "expected": "me"},
        "plain text",
        '"a text"',
        {"id": "only"},
    )
    traffic = read(path)
    found = [(it.input, it.answer, dict(it.facts)) for it in traffic.requests]
    assert found == [
        ("why?", "because", {}),
        ("how?", "so", {}),
        ('"where?"', "here", {}),
        ("2 + 2", None, {"answer": 4}),
        ({"question": "who?", "expected": "me"}, None, {"question": "who?", "expected": "me"}),
        ("a text", None, {}),
    ]
    assert [traffic.requests[place].conversation for place in (0, 2)] == ["s1", "s2"]
    assert traffic.requests[2].time == datetime(2026, 11, 3, 10, tzinfo=UTC)
    assert traffic.unread == {"not JSON": 1, "a row without an input": 1}
    assert traffic.first_unread["not JSON"] == f"{path}, line 6"


def otlp(*spans) -> dict:
    return {"resourceSpans": [{"scopeSpans": [{"spans": list(spans)}]}]}


def span(id, parent=None, *, trace="t1", at=1, **attributes) -> dict:
    listed = [{"key": name.replace("__", "."), "value": {"stringValue": value}} for name, value in attributes.items()]
    return {
        "traceId": trace, "spanId": id, "parentSpanId": parent or "", "attributes": listed, "name": id,
        "startTimeUnixNano": str(1_793_000_000_000_000_000 + at * 10**9),
    }  # fmt: skip


ASKED = json.dumps([{"role": "user", "parts": [{"type": "text", "content": "find a hotel"}]}])
ANSWER = json.dumps(
    [{"role": "assistant", "parts": [{"type": "text", "content": "The Ritz"}], "finish_reason": "stop"}]
)
SPANS = {
    "the GenAI conventions": [
        span("root", gen_ai__operation__name="invoke_agent", gen_ai__conversation__id="s9"),
        span("call", "root", gen_ai__operation__name="chat", gen_ai__input__messages=ASKED, gen_ai__output__messages=ANSWER),
    ],
    "OpenInference": [
        span("root", input__value="find a hotel", output__value="The Ritz", session__id="s9"),
        span("llm", "root", at=2, llm__input_messages__0__message__role="user", llm__input_messages__0__message__content="x"),
    ],
    "OpenLLMetry": [
        span(
            "chat", gen_ai__prompt__0__role="user", gen_ai__prompt__0__content="find a hotel",
            gen_ai__completion__0__content="The Ritz", traceloop__association__properties__session_id="s9",
        )
    ],
}  # fmt: skip


@pytest.mark.parametrize("vocabulary", SPANS)
def test_a_trace_of_spans_is_one_request(vocabulary, tmp_path):
    (request,) = read(lines(tmp_path / "spans.jsonl", *(otlp(it) for it in reversed(SPANS[vocabulary])))).requests
    assert (request.input, request.answer, request.conversation) == ("find a hotel", "The Ritz", "s9")
    assert request.time == datetime.fromtimestamp(1_793_000_001, UTC)


@pytest.mark.parametrize(
    ("bad", "unread"),
    [
        ({"gen_ai__input__messages": ASKED[:-5]}, {"messages that are cut off, or no JSON": 1}),
        (None, {"not in a form that is known": 1}),
    ],
)
def test_a_span_that_cannot_be_read_costs_only_its_own_trace(bad, unread, tmp_path):
    """A collector writes one value for each batch, with the spans of many traces."""
    batch = [span("chat", trace=f"t{number}", at=number, input__value=f"task {number}") for number in range(8)]
    batch[1] = span("chat", trace="t1", **bad) if bad else {"traceId": "t1", "attributes": [{"value": {}}]}
    traffic = read(lines(tmp_path / "spans.json", otlp(*batch)))
    assert [it.input for it in traffic.requests] == [f"task {number}" for number in (0, 2, 3, 4, 5, 6, 7)]
    assert traffic.unread == unread


def test_a_trace_is_read_if_only_a_later_call_is_cut_off(tmp_path):
    looks = json.dumps([{"role": "assistant", "parts": [{"type": "text", "content": "I look for one."}]}])
    first = span("first", "root", gen_ai__input__messages=ASKED, gen_ai__output__messages=looks)
    later = span("later", "root", at=2, gen_ai__input__messages=ASKED[:-5], gen_ai__output__messages=ANSWER)
    root = span("root", gen_ai__operation__name="invoke_agent")
    traffic = read(lines(tmp_path / "spans.json", otlp(root, first, later)))
    assert [(it.input, it.answer) for it in traffic.requests] == [("find a hotel", "The Ritz")]
    assert not traffic.unread


def test_an_inner_step_is_not_taken_for_what_a_cut_off_root_was_asked(tmp_path):
    root = span("root", gen_ai__input__messages=ASKED[:-5])
    inner = span("inner", "root", at=2, input__value="a query of the database")
    traffic = read(lines(tmp_path / "spans.json", otlp(root, inner)))
    assert not traffic.requests and sum(traffic.unread.values()) == 1


def test_the_console_exporters_spans_with_messages_as_events_are_read(tmp_path):
    exported = {
        "name": "chat", "context": {"trace_id": "0x1", "span_id": "0x2"}, "parent_id": None,
        "start_time": "2026-11-05T09:00:00.000000Z", "attributes": {"gen_ai.operation.name": "chat"},
        "events": [
            {"name": "gen_ai.system.message", "attributes": {"content": "Be kind."}},
            {"name": "gen_ai.user.message", "attributes": {"content": "find a hotel"}},
        ],
    }  # fmt: skip
    path = tmp_path / "spans.json"
    path.write_text(json.dumps([exported]))
    (request,) = read(path).requests
    assert (request.input, request.system) == ("find a hotel", "Be kind.")
    assert request.time == datetime(2026, 11, 5, 9, tzinfo=UTC)


def serialized(kind: str, content: str) -> dict:
    return {
        "lc": 1,
        "type": "constructor",
        "id": ["langchain", "schema", "messages", kind],
        "kwargs": {"content": content},
    }


def test_runs_of_langsmith_are_read_by_trace(tmp_path):
    thread = {"metadata": {"thread_id": "th"}}
    graph = {"id": "1", "trace_id": "1", "run_type": "chain", "start_time": "2026-11-05T09:00:00", "extra": thread}
    model = {"id": "2", "trace_id": "1", "parent_run_id": "1", "run_type": "llm", "start_time": "2026-11-05T09:00:01"}
    alone = {"id": "3", "trace_id": "3", "run_type": "llm", "start_time": "2026-11-05T10:00:00"}
    human = serialized("HumanMessage", "find a hotel")
    path = lines(
        tmp_path / "runs.jsonl",
        model | {"inputs": {"messages": [[human]]}},
        graph
        | {"inputs": {"messages": [{"type": "human", "content": "find a hotel"}]}, "outputs": {"output": "The Ritz"}},
        alone | {"inputs": {"messages": [[serialized("SystemMessage", "Be kind."), human]]}},
    )
    one, other = read(path).requests
    assert (one.input, one.answer, one.conversation) == ("find a hotel", "The Ritz", "th")
    assert (other.input, other.system, other.conversation) == ("find a hotel", "Be kind.", "3")


@pytest.mark.parametrize(
    ("outputs", "answer"),
    [
        ({"generations": [[{"text": "The Ritz"}]]}, "The Ritz"),
        ({"generations": [[{"text": "", "message": serialized("AIMessage", "The Ritz")}]]}, "The Ritz"),
        ({"messages": [serialized("HumanMessage", "find a hotel"), serialized("AIMessage", "The Ritz")]}, "The Ritz"),
    ],
)
def test_what_langchain_answered_is_read_as_text(outputs, answer, tmp_path):
    run = {"id": "1", "trace_id": "1", "run_type": "llm", "start_time": None, "outputs": outputs}
    (request,) = read(
        lines(tmp_path / "runs.jsonl", run | {"inputs": {"messages": [["user", "find a hotel"]]}})
    ).requests
    assert (request.input, request.answer) == ("find a hotel", answer)


MESSAGE = {"role": "user", "content": "hi"}
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [IMAGE, {"role": "assistant", "content": "a cat"}]},
        {"messages": [{"role": "robot", "content": "x"}, MESSAGE]},
        {"messages": "hello"},
        {"messages": [None]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "user", "content": [None]}]},
        {"messages": [{"role": "assistant", "tool_calls": ["a"]}, MESSAGE]},
        {"run_type": "llm", "id": "1", "extra": "x", "inputs": {"messages": [MESSAGE]}},
        {"resourceSpans": [None]},
        {"resourceMetrics": []},
        otlp(span("chat", gen_ai__input__messages=ASKED[:-5])),
        otlp({"traceId": "t", "spanId": "s", "attributes": [{"value": {}}]}),
        {"traceId": "t", "parentObservationId": "o", "input": "a query of the database"},
        None,
    ],
)
def test_what_has_another_form_is_counted_and_the_rest_is_read(row, tmp_path):
    traffic = read(lines(tmp_path / "rows.jsonl", row, {"input": "what is left"}))
    assert [request.input for request in traffic.requests] == ["what is left"]
    assert sum(traffic.unread.values()) == 1


def test_deeply_nested_text_is_counted(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("[" * 100_000 + "\n" + '"what is left"')
    assert [request.input for request in read(path).requests] == ["what is left"]


@pytest.mark.parametrize("name", ["spans.json", "spans.jsonl"])
@pytest.mark.parametrize("pretty", [False, True])
def test_one_value_per_line_or_one_in_all_is_read_whatever_the_files_name(name, pretty, tmp_path):
    values = [otlp(it) for it in SPANS["the GenAI conventions"]]
    path = tmp_path / name
    path.write_text(
        json.dumps(values, indent=1) if pretty else "\n".join(map(json.dumps, values)), encoding="utf-8-sig"
    )
    assert [request.input for request in read(path).requests] == ["find a hotel"]


def test_files_that_are_not_text_are_refused(tmp_path):
    path = tmp_path / "traces.parquet"
    path.write_bytes(b"PAR1\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not text"):
        read(path)


def test_a_source_that_does_not_exist_is_refused_with_what_can_be_read(tmp_path):
    with pytest.raises(ConfigError, match="neither a run folder nor a file"):
        read(tmp_path / "nothing")


def test_the_text_of_an_input_has_no_roles_in_it():
    assert text_of(chat(("user", "one"), ("user", "two"))) == "one\ntwo"
    assert text_of({"question": "who?", "count": 3}) == "who?\n3"


# The command


def run(*arguments: str):
    return CliRunner().invoke(command(), ["tasks", *arguments])


def test_the_command_writes_tasks_and_says_what_was_dropped_and_why(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"input": f"refund order {1000 + number} please", "session_id": f"s{number}"} for number in range(10)]
    lines(tmp_path / "rows.jsonl", *rows, rows[0], "no json")
    result = run("from", "rows.jsonl")
    assert result.exit_code == 0, result.output
    train = [json.loads(line) for line in (tmp_path / "tasks.jsonl").read_text().splitlines()]
    held_out = [json.loads(line) for line in (tmp_path / "held_out.jsonl").read_text().splitlines()]
    assert [len(train), len(held_out)] == [8, 2]
    # The repeated request is the last, so its conversation is one of the two newest.
    assert held_out[0] == {"input": "refund order 1000 please", "conversation": "s0", "seen": 2, "kind": 1}
    assert held_out[1]["conversation"] == "s9"
    assert "11 requests in 10 conversations of rows.jsonl" in result.output
    assert "not read: 1, not JSON (the first: rows.jsonl, line 12)" in result.output
    assert "dropped: 1, the same as another" in result.output
    assert "kind 1: 10 tasks, such as 'refund order 1001 please'" in result.output
    assert "next: art eval" in result.output


def test_the_command_does_not_replace_edited_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines(tmp_path / "rows.jsonl", '"one"')
    (tmp_path / "held_out.jsonl").write_text("edited")
    result = run("from", "rows.jsonl")
    assert result.exit_code != 0
    assert "held_out.jsonl exists" in str(result.exception or result.output)
    assert (tmp_path / "held_out.jsonl").read_text() == "edited"
    assert not (tmp_path / "tasks.jsonl").exists()


def test_the_next_round_leaves_out_the_held_out_tasks_of_the_last(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines(tmp_path / "held_out.jsonl", {"input": "where is my parcel", "seen": 1})
    lines(tmp_path / "rows.jsonl", '"Where is my parcel?"', '"when do you open"')
    options = "--known held_out.jsonl --share 0 --out new.jsonl --held-out none.jsonl"
    result = run("from", "rows.jsonl", *options.split())
    assert result.exit_code == 0, result.output
    assert "next: art eval AGENT new.jsonl " in result.output, "the file with tasks"
    assert [json.loads(line)["input"] for line in (tmp_path / "new.jsonl").read_text().splitlines()] == [
        "when do you open"
    ]
    assert "dropped: 1, the same as a known task, or nearly" in result.output


def test_text_with_other_ends_of_lines_or_half_an_emoji_can_be_read_back(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = ["one\u2028two\u0085three", "half \ud83d of it"]
    lines(tmp_path / "rows.jsonl", *({"input": text} for text in texts))
    assert run("from", "rows.jsonl", "--share", "0").exit_code == 0
    assert inputs(load_tasks("tasks.jsonl")) == texts
    assert len((tmp_path / "tasks.jsonl").read_text().splitlines()) == 2


def test_both_kinds_of_tasks_in_one_file_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines(tmp_path / "rows.jsonl", '"one"')
    assert run("from", "rows.jsonl", "--held-out", "./tasks.jsonl").exit_code != 0
    assert not (tmp_path / "tasks.jsonl").exists()


def test_nothing_to_make_tasks_of_is_an_exit_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines(tmp_path / "rows.jsonl", {"id": "only"})
    result = run("from", "rows.jsonl")
    assert result.exit_code == 1
    assert not (tmp_path / "tasks.jsonl").exists()
