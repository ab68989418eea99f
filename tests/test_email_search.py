"""The example agent: its mailboxes, its tasks, its reward, and the agent itself against a local OpenAI-compatible server."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("langchain_openai")
pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, AutoTokenizer

from art_core.types import Trajectory
from art_embedded import TINY
from examples.email_search import agent as example
from examples.email_search.mailbox import SHOWN, Mailbox, format_results, open_mailbox
from examples.email_search.reward import reward
from examples.email_search.tasks import HELD_OUT_MAILBOXES, TRAINING_MAILBOXES, held_out_tasks, training_tasks
from tiny.demonstrations import MAKING_MAILBOXES, OPENAI_TOOLS, Habits, demonstrate

RIGHT = Habits(both_keywords=1, project_only=0, right_message=1, right_attribute=1, answer_unread=0)

Respond = Callable[[dict[str, Any]], str]


@dataclass
class PolicyServer:
    """Answers chat completions with what ``respond`` makes of the request; a tool call in the text becomes one."""

    respond: Respond = field(default=lambda request: "hello")
    requests: list[dict[str, Any]] = field(default_factory=list)
    sampled: list[str] = field(default_factory=list)

    def completion(self, request: dict[str, Any]) -> dict[str, Any]:
        text = self.respond(request)
        self.requests.append(request)
        self.sampled.append(text)
        choice = {"index": 0, "finish_reason": "stop", "message": as_message(text, f"call_{len(self.requests)}")}
        return {"id": "c", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}


def as_message(text: str, call_id: str) -> dict[str, Any]:
    try:
        said = json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
        function = {"name": said["name"], "arguments": json.dumps(said["arguments"])}
    except (ValueError, TypeError, KeyError):
        return {"role": "assistant", "content": text}
    tool_call = {"id": call_id, "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [tool_call]}


def as_text(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[PolicyServer]:
    policy = PolicyServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *_: object) -> None: ...

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            answer = json.dumps(policy.completion(body)).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setenv("OPENAI_BASE_URL", f"http://127.0.0.1:{http.server_port}/v1")
    yield policy
    http.shutdown()
    http.server_close()
    thread.join()


def run_agent(task: dict[str, Any]) -> Trajectory:
    return Trajectory(task=task, calls=(), output=example.build_agent().invoke(task["input"]))


def saying(*texts: str) -> Respond:
    left = iter(texts)
    return lambda request: next(left)


def test_a_seed_is_always_the_same_mailbox():
    first, again, other = Mailbox(7), Mailbox(7), Mailbox(8)
    assert first.facts == again.facts != other.facts
    assert first.search([first.facts[0].project]) == again.search([first.facts[0].project])


def test_a_search_wants_every_keyword_as_a_whole_word_and_shows_the_newest_first():
    mailbox = Mailbox(7)
    fact = mailbox.facts[0]
    wide, narrow = mailbox.search([fact.project]), mailbox.search([fact.project.lower(), fact.kind])
    assert {m.id for m in narrow} < {m.id for m in wide}
    assert fact.message_id in {m.id for m in narrow}
    assert [m.sent for m in wide] == sorted((m.sent for m in wide), reverse=True)
    assert mailbox.search([fact.project[:-1]]) == []


def test_a_search_filters_by_sender_and_dates():
    mailbox = Mailbox(7)
    wide = mailbox.search([mailbox.facts[0].project])
    middle = wide[len(wide) // 2]
    assert middle in mailbox.search([], sender=middle.sender.lower())
    newer, older = mailbox.search([], sent_after=middle.sent), mailbox.search([], sent_before=middle.sent)
    assert newer and min(m.sent for m in newer) > middle.sent
    assert older and max(m.sent for m in older) < middle.sent


@pytest.mark.parametrize("keywords", [[], [""], ["?!"], ['"'], ["a OR b"], ["NEAR(a b)"], ["subject:x"], ["*"]])
def test_no_keyword_is_read_as_query_syntax(keywords: list[str]):
    assert Mailbox(7).search(keywords) == []


def test_operators_between_words_that_occur_are_words_themselves():
    mailbox = Mailbox(7)
    one, other, *_ = dict.fromkeys(fact.project for fact in mailbox.facts)
    assert mailbox.search([one]) and mailbox.search([other])
    assert mailbox.search([f"{one} OR {other}"]) == mailbox.search([f"{one} NOT {other}"]) == []


def test_what_is_shown_ends_with_the_id_and_stops_after_four():
    mailbox = Mailbox(7)
    found = mailbox.search(["The"])
    shown = format_results(found).splitlines()
    assert shown[0] == f"{len(found)} results" and len(shown) == 1 + SHOWN
    assert shown[1].endswith(f" id {found[0].id}")
    assert format_results([]) == "no results"
    assert example.format_message(None) == "no such email"


def test_one_mailbox_serves_many_threads():
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda n: open_mailbox(n % 5).search(["The"]), range(200)))
    assert all(messages == open_mailbox(n % 5).search(["The"]) for n, messages in enumerate(found))


def test_making_training_and_held_out_share_no_mailbox():
    ranges = [MAKING_MAILBOXES, TRAINING_MAILBOXES, HELD_OUT_MAILBOXES]
    ordered = sorted(ranges, key=lambda seeds: seeds.start)
    assert all(before.stop <= after.start for before, after in pairwise(ordered))
    for tasks, seeds in ((training_tasks(50, 1), TRAINING_MAILBOXES), (held_out_tasks(50, 1), HELD_OUT_MAILBOXES)):
        used = [task["input"]["mailbox"] for task in tasks]
        assert len(set(used)) == 50 and all(seed in seeds for seed in used)


def test_tasks_are_json_and_the_same_for_the_same_seed():
    tasks = training_tasks(5, seed=3)
    assert json.loads(json.dumps(tasks)) == tasks == training_tasks(5, seed=3) != training_tasks(5, seed=4)
    for task in tasks:
        body = open_mailbox(task["input"]["mailbox"]).read(task["message_id"]).body
        assert task["answer"] in body


def test_the_agent_and_its_mailbox_do_not_know_that_they_are_trained():
    for module in ("agent.py", "mailbox.py"):
        assert "art_core" not in (Path(example.__file__).parent / module).read_text()


def test_a_right_answer_is_rewarded_and_its_way_is_measured(server: PolicyServer):
    task = training_tasks(1)[0]
    fact = next(f for f in open_mailbox(task["input"]["mailbox"]).facts if f.message_id == task["message_id"])
    server.respond = saying(
        as_text("search_inbox", keywords=[fact.project, fact.kind]),
        as_text("read_email", id=fact.message_id),
        as_text("return_final_answer", answer=task["answer"]),
    )
    trajectory = run_agent(task)
    assert reward(trajectory) == pytest.approx(1.1)
    assert trajectory.metrics == {"success": 1.0, "found": 1.0, "read": 1.0, "malformed": 0.0}
    assert len(server.requests) == 3


def test_a_reply_that_is_no_tool_call_ends_the_run_and_is_malformed(server: PolicyServer):
    server.respond = saying('<tool_call>\n{"name": "read_email", "arguments": {"id": 1}\n</tool_call>')
    trajectory = run_agent(training_tasks(1)[0])
    assert reward(trajectory) == pytest.approx(-0.2)
    assert trajectory.metrics["malformed"] == 1.0
    assert len(server.requests) == 1


def test_a_call_that_a_tool_refuses_is_malformed_and_the_agent_goes_on(server: PolicyServer):
    task = training_tasks(1)[0]
    server.respond = saying(as_text("read_email", number=1), as_text("return_final_answer", answer=task["answer"]))
    trajectory = run_agent(task)
    assert reward(trajectory) == pytest.approx(0.9)
    assert trajectory.metrics == {"success": 1.0, "found": 0.0, "read": 0.0, "malformed": 1.0}


def test_the_agent_stops_after_six_model_calls_without_an_answer(server: PolicyServer):
    server.respond = lambda request: as_text("search_inbox", keywords=["Falcon"])
    trajectory = run_agent(training_tasks(1)[0])
    assert len(server.requests) == example.MAX_MODEL_CALLS == 6
    assert reward(trajectory) == pytest.approx(-0.1)
    assert trajectory.metrics["malformed"] == 0.0


def test_a_failed_run_has_a_reward_too():
    trajectory = Trajectory(task=training_tasks(1)[0], calls=(), error="ValueError: broken")
    assert reward(trajectory) == pytest.approx(-0.1)
    assert trajectory.metrics["success"] == 0.0


def test_the_tiny_model_was_shown_what_the_agent_really_sends(server: PolicyServer):
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    rng = random.Random(0)
    for seed in range(5):
        mailbox = open_mailbox(seed)
        fact = rng.choice(mailbox.facts)
        shown = demonstrate(rng, mailbox, fact, Habits()).messages
        calls = [m["tool_calls"][0]["function"] for m in shown if m["role"] == "assistant"]
        server.respond = saying(*(as_text(c["name"], **json.loads(c["arguments"])) for c in calls))
        example.build_agent().invoke({"messages": [shown[1]], "mailbox": seed})
        last = server.requests[-1]
        assert last["tools"] == OPENAI_TOOLS
        sent, shown_ids = (
            tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)
            for messages, tools in ((last["messages"], last["tools"]), (shown[:-1], OPENAI_TOOLS))
        )
        assert sent == shown_ids


@pytest.mark.system
def test_every_prompt_of_the_real_agent_extends_the_one_before_and_its_sampled_tokens(server: PolicyServer):
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    model = AutoModelForCausalLM.from_pretrained(TINY)
    turns: list[tuple[list[int], list[int]]] = []

    def sample(request: dict[str, Any]) -> str:
        prompt = tokenizer.apply_chat_template(
            request["messages"], tools=request["tools"], add_generation_prompt=True, return_tensors="pt"
        )
        ids = model.generate(**prompt, do_sample=False, max_new_tokens=64)[0].tolist()
        length = prompt["input_ids"].shape[1]
        turns.append((ids[:length], ids[length:]))
        return tokenizer.decode(ids[length:]).removesuffix(tokenizer.eos_token)

    server.respond = sample
    extended = 0
    for task in held_out_tasks(4):
        turns.clear()
        run_agent(task)
        for (prompt, sampled), (following, _) in pairwise(turns):
            assert following[: len(prompt) + len(sampled)] == prompt + sampled
            extended += 1
    assert extended >= 4
