"""`art gateway --record-text`: any provider behind it, conversations recorded as text, whether or not clients name them."""

import asyncio
import json

import anthropic
import openai
import pytest

import art_core as art
from art_gateway import dialects
from art_gateway.text import Conversations, TextUpstream
from art_gateway.text_gateway import TextGateway

SYSTEM = {"role": "system", "content": "You are brief."}


def user(text):
    return {"role": "user", "content": text}


@pytest.fixture
def recording(start, provider):
    """``async with recording(key) as desk``: a gateway that records text before ``provider``, with its own key if set."""

    def recording(key=None, **options):
        upstreams = [TextUpstream(provider.base_url, api_key=key)]
        return start(upstreams=upstreams, dialects=dialects(), kind=TextGateway, **options)

    return recording


def chat(client, messages, **settings):
    return client.chat.completions.create(model="gpt-x", messages=messages, **settings).choices[0].message


async def test_a_client_changes_only_its_base_url(recording, provider):
    def talk(url):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="sk-own")
        messages = [SYSTEM, user("Please do task-001.")]
        messages.append(chat(client, messages).to_dict())
        return chat(client, [*messages, user("And task-002?")]).content

    async with recording() as desk:
        assert await asyncio.to_thread(talk, desk.url) == "answer to task-001"
        [rollout] = desk.store.rollouts()
        calls = desk.store.calls(rollout.rollout_id)
    assert len(calls) == 2 and calls[1].request["messages"][-1]["content"] == "And task-002?"
    assert calls[0].usage["prompt_tokens"] > 0 and not calls[0].prompt_ids
    assert [dict(request.headers)["authorization"] for request in provider.requests] == ["Bearer sk-own"] * 2


async def test_conversations_that_begin_alike_are_told_apart_once_they_differ(recording):
    def talk(url):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="k")
        begun = [[SYSTEM, user(f"Please do task-00{number}.")] for number in (1, 2)]
        for messages in begun:
            messages.append(chat(client, messages).to_dict())
        for messages in begun:
            chat(client, [*messages, user("Again.")], stream=False)

    async with recording() as desk:
        await asyncio.to_thread(talk, desk.url)
        rollouts = [desk.store.calls(rollout.rollout_id) for rollout in desk.store.rollouts()]
    assert [len(calls) for calls in rollouts] == [2, 2]


async def test_other_dialects_and_named_rollouts_are_recorded_too(recording):
    def talk(url):
        messages = [user("Please do task-001.")]
        client = anthropic.Anthropic(base_url=url, api_key="sk-own")
        answer = client.messages.create(model="claude", max_tokens=9, messages=messages)
        more = [
            *messages,
            {"role": "assistant", "content": [block.to_dict() for block in answer.content]},
            user("Again."),
        ]
        client.messages.create(model="claude", max_tokens=9, messages=more)
        named = openai.OpenAI(base_url=f"{url}/rollouts/mine/v1", api_key="k")
        for chunk in named.chat.completions.create(model="m", messages=messages, stream=True):
            yield chunk.id

    async with recording() as desk:
        assert await asyncio.to_thread(lambda: list(talk(desk.url)))
        found = {rollout.rollout_id: len(desk.store.calls(rollout.rollout_id)) for rollout in desk.store.rollouts()}
    assert found.pop("mine") == 1
    assert list(found.values()) == [2]


async def test_the_providers_key_replaces_that_of_the_gateway(recording, provider):
    def talk(url):
        chat(openai.OpenAI(base_url=f"{url}/v1", api_key="ours"), [user("Please do task-001.")])
        client = anthropic.Anthropic(base_url=url, api_key="ours")
        client.messages.create(model="claude", max_tokens=9, messages=[user("Please do task-001.")])
        with pytest.raises(openai.AuthenticationError):
            chat(openai.OpenAI(base_url=f"{url}/v1", api_key="other"), [user("x")])

    async with recording("sk-provider", api_key="ours") as desk:
        await asyncio.to_thread(talk, desk.url)
    sent = [dict(request.headers) for request in provider.requests]
    assert sent[0]["authorization"] == "Bearer sk-provider" and sent[1]["x-api-key"] == "sk-provider"
    assert "ours" not in json.dumps(sent)


async def test_conversations_are_loaded_like_any_trajectory(recording, tmp_path):
    async with recording() as desk:
        await asyncio.to_thread(lambda: chat(openai.OpenAI(base_url=f"{desk.url}/v1", api_key="k"), [user("task-001")]))
    [trajectory] = art.load_trajectories(tmp_path)
    assert trajectory.messages()[-1]["content"] == "answer to task-001"


async def post(desk, path, body):
    async with desk.client.post(desk.url + path, json=body, headers={"authorization": "Bearer sk-own"}) as response:
        return response.status, await response.text()


async def test_what_is_no_model_call_or_cannot_be_read_is_the_providers_affair(recording, provider):
    async with recording() as desk:
        assert await post(desk, "/v1/embeddings?a=1", {"model": "m", "input": "x"}) == (
            404, '{"error":{"message":"there is no /v1/embeddings here"}}'
        )  # fmt: skip
        status, answer = await post(
            desk, "/v1/chat/completions", {"model": "m", "messages": [user("Please do refused-000.")]}
        )
        assert status == 400 and "refused-000 is refused" in answer
        assert desk.store.rollouts() == ()
    assert provider.requests[0].path == "/v1/embeddings"


NESTED = json.loads("[" * 300 + "]" * 300)


@pytest.mark.parametrize(
    "messages",
    [
        ["hi"],
        [{"role": "assistant", "tool_calls": [{"function": "look"}]}],
        [{"role": "assistant", "tool_calls": 5}],
        [{"role": "user", "content": [{"type": "data", "data": NESTED}]}],
        "hi",
        5,
        None,
    ],
)
async def test_messages_of_an_unexpected_form_pass_to_the_provider_and_are_recorded(start, another_upstream, messages):
    class AnswersAnything(another_upstream):
        async def answer(self, writer, request):
            message = {"role": "assistant", "content": "fine"}
            self.send(writer, 200, json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}))

    async with (
        AnswersAnything() as provider,
        start(upstreams=[TextUpstream(provider.url)], dialects=dialects(), kind=TextGateway) as desk,
    ):
        for path in ("/v1", "/rollouts/named/v1"):
            status, answer = await post(desk, f"{path}/chat/completions", {"model": "m", "messages": messages})
            assert status == 200 and "fine" in answer, answer
        calls = [call for rollout in desk.store.rollouts() for call in desk.store.calls(rollout.rollout_id)]
    recorded = [call.request.get("unread_messages", call.request.get("messages")) for call in calls]
    assert [(request, call.response["content"]) for request, call in zip(recorded, calls, strict=True)] == [
        (messages, "fine")
    ] * 2
    for message in [message for call in calls for message in call.messages()]:
        assert isinstance(message.get("tool_calls") or [], list), "as those who read calls rely on"


@pytest.mark.parametrize(
    ("fields", "said", "shown"),
    [({}, "Hi \ud83d", "Hi \ufffd"), ({"top_p": float("nan")}, "Hi", "Hi")],
    ids=["half an emoji", "NaN"],
)
async def test_requests_and_answers_that_strict_json_refuses_are_recorded(start, another_upstream, fields, said, shown):
    class Echo(another_upstream):
        async def answer(self, writer, request):
            message = {"role": "assistant", "content": said}
            self.send(writer, 200, json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}))

    body = json.dumps({"model": "m", "messages": [user(said)], **fields})
    async with (
        Echo() as provider,
        start(upstreams=[TextUpstream(provider.url)], dialects=dialects(), kind=TextGateway) as desk,
        desk.client.post(f"{desk.url}/v1/chat/completions", data=body) as response,
    ):
        assert response.status == 200
        [rollout] = desk.store.rollouts()
        [call] = desk.store.calls(rollout.rollout_id)
    assert [message["content"] for message in call.messages()] == [shown, shown]


async def test_an_answer_whose_request_cannot_be_read_is_recorded_with_a_warning(start, another_upstream, caplog):
    class AnswersAnything(another_upstream):
        async def answer(self, writer, request):
            self.send(
                writer, 200, '{"choices": [{"index": 0, "message": {"content": "fine"}, "finish_reason": "stop"}]}'
            )

    async with (
        AnswersAnything() as provider,
        start(upstreams=[TextUpstream(provider.url)], dialects=dialects(), kind=TextGateway) as desk,
        desk.client.post(f"{desk.url}/v1/chat/completions", data="[]") as response,
    ):
        assert response.status == 200
    assert "recorded without its request, which isn't a JSON object" in caplog.text


async def test_a_model_in_the_path_is_recorded(recording):
    body = {"contents": [{"role": "user", "parts": [{"text": "Please do task-001."}]}]}
    async with recording() as desk:
        assert (await post(desk, "/v1beta/models/gemini-x:generateContent", body))[0] == 200
        [rollout] = desk.store.rollouts()
        [call] = desk.store.calls(rollout.rollout_id)
    assert call.request["model"] == "gemini-x" and call.response["content"] == "answer to task-001"


@pytest.mark.parametrize(
    ("base", "target", "url"),
    [
        ("https://api.openai.com/v1", "/v1/chat/completions", "https://api.openai.com/v1/chat/completions"),
        ("https://api.z.ai/api/paas/v4", "/v1/chat/completions", "https://api.z.ai/api/paas/v4/chat/completions"),
        ("https://host/v1beta/openai", "/v1/chat/completions?a=b", "https://host/v1beta/openai/chat/completions?a=b"),
        ("https://api.anthropic.com", "/v1/messages", "https://api.anthropic.com/v1/messages"),
        ("https://api.anthropic.com/v1", "/v1/messages", "https://api.anthropic.com/v1/messages"),
        (
            "https://google",
            "/v1beta/models/m:generateContent?alt=sse",
            "https://google/v1beta/models/m:generateContent?alt=sse",
        ),
        ("https://bedrock", "/model/arn%3Aaws%2Fx/converse", "https://bedrock/model/arn%3Aaws%2Fx/converse"),
        ("http://127.0.0.1:11434", "/api/chat", "http://127.0.0.1:11434/api/chat"),
    ],
)
def test_a_request_keeps_its_path_below_the_providers_address(base, target, url):
    assert TextUpstream(base).url(target) == url


def test_conversations_that_are_the_same_so_far_are_each_continued_once():
    known, answer = Conversations(), {"role": "assistant", "content": "Hello!"}
    known.add([user("Hi"), answer], "first")
    known.add([user("Hi"), answer], "second")
    continued = [known.continued([user("Hi"), answer, user(text)]) for text in ("a", "b", "b, sent again")]
    assert continued == ["first", "second", "second"]


def test_a_conversation_is_recognised_however_its_client_spells_the_answer():
    known = Conversations()
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"a":1,"b":2}'}}
    known.add([user("x"), {"role": "assistant", "content": None, "tool_calls": [call]}], "first")
    again = {"id": "other", "type": "function", "function": {"name": "look", "arguments": '{"a": 1, "b": 2}'}}
    answered = [
        user("x"),
        {"role": "assistant", "content": "", "tool_calls": [again]},
        {"role": "tool", "content": "found"},
    ]
    assert known.continued(answered) == "first"
    assert known.continued([user("x")]) is None
    assert known.continued([user("y"), *answered[1:]]) is None
