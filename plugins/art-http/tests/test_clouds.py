"""Amazon Bedrock and Vertex AI: their own clients, with their own addresses, are answered by the policy."""

import json

import anthropic
import boto3
import httpx
import pytest
from botocore.exceptions import ClientError, HTTPClientError
from google import genai
from google.oauth2.credentials import Credentials
from http_server import serving
from starlette.responses import JSONResponse
from starlette.routing import Route

import art_core as art
import art_http
from art_core.plugin_api import inside_rollout
from art_core.testing import CountingLearner, FakeEngine
from art_core.types import RolloutAddress

ARN = "arn:aws:bedrock:us-east-1:1:inference-profile/us.claude:0"
ASKED = {"modelId": ARN, "messages": [{"role": "user", "content": [{"text": "hi"}]}]}
CLAUDE = {"model": "us.claude:0", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
CONTENTS = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}


@pytest.fixture
async def rolled_out(tmp_path):
    """``await rolled_out(function)``: the trajectory of one rollout of it, in a thread as a user's."""
    async with art.open_run(tmp_path / "run", engine=FakeEngine("four"), learner=CountingLearner()) as run:

        async def collect(function):
            [group] = await run.collect(lambda task: function(), ["a"], group_size=1, allow_no_calls=True)
            return group.trajectories[0]

        yield collect


def bedrock():
    """A client that signs, with keys of a login that ends."""
    return boto3.Session("AKIA-secret", "secret", "token-secret").client("bedrock-runtime", "us-east-1")


async def test_bedrock_is_answered_by_the_policy_whole_streamed_and_counted(rolled_out):
    def ask():
        client = bedrock()
        whole = client.converse(**ASKED)["output"]["message"]["content"][0]["text"]
        events = list(client.converse_stream(**ASKED)["stream"])
        deltas = [event["contentBlockDelta"]["delta"]["text"] for event in events if "contentBlockDelta" in event]
        counted = client.count_tokens(modelId=ARN, input={"converse": {"messages": ASKED["messages"]}})
        return [whole, "".join(deltas), counted["inputTokens"]]

    trajectory = await rolled_out(ask)
    assert trajectory.error is None
    first, second = trajectory.calls
    assert trajectory.output == ["four", "four", len(first.prompt_ids)]
    assert first.request["model"] == second.request["model"] == ARN
    assert first.prompt_ids == second.prompt_ids and first.sampled_ids == second.sampled_ids
    assert "secret" not in repr(trajectory)


async def test_anthropics_client_of_bedrock_is_answered_by_the_policy(rolled_out):
    def ask():
        with anthropic.AnthropicBedrock(aws_access_key="a", aws_secret_key="b", aws_region="us-east-1") as client:
            whole = client.messages.create(**CLAUDE).content[0].text
            with client.messages.stream(**CLAUDE) as stream:
                return [whole, stream.get_final_text()]

    trajectory = await rolled_out(ask)
    assert (trajectory.error, trajectory.output, len(trajectory.calls)) == (None, ["four", "four"], 2)


def test_the_keys_of_amazon_stay_here():
    seen = []

    async def answer(request):
        seen.append((request.scope["raw_path"], dict(request.headers)))
        return JSONResponse({"output": {"message": {"role": "assistant", "content": []}}, "stopReason": "end_turn"})

    signed = []
    art_http.redirect_clients()
    with serving(Route("/{path:path}", answer, methods=["POST"])) as url:
        client = bedrock()
        client.meta.events.register("before-send.*", lambda request, **_: signed.append(dict(request.headers)))
        with inside_rollout(RolloutAddress("r1", f"{url}/rollouts/r1/v1", "key", "policy", frozenset())):
            client.converse(**ASKED)
    assert b"AWS4-HMAC-SHA256 Credential=AKIA-secret" in signed[0]["Authorization"]
    [(path, headers)] = seen
    assert (
        path
        == b"/rollouts/r1/v1/model/arn%3Aaws%3Abedrock%3Aus-east-1%3A1%3Ainference-profile%2Fus.claude%3A0/converse"
    )
    assert headers["authorization"] == "Bearer key" and "secret" not in json.dumps(headers)


async def test_a_refusal_is_a_readable_error_of_boto3_and_not_asked_again(rolled_out):
    sent = []

    def ask():
        client = bedrock()
        client.meta.events.register("before-send.*", lambda **_: sent.append(1))
        config = {"guardrailIdentifier": "g", "guardrailVersion": "1"}
        with pytest.raises(ClientError) as error:
            client.converse(**ASKED, guardrailConfig=config)
        with pytest.raises(ClientError, match="isn't Anthropic's"):
            client.invoke_model(modelId="amazon.nova", body="{}")
        return str(error.value)

    trajectory = await rolled_out(ask)
    assert trajectory.error is None and len(sent) == 2 and not trajectory.calls
    assert trajectory.output.startswith(
        "An error occurred (ValidationException) when calling the Converse operation: 'guardrail"
    )


async def test_without_the_gateway_bedrock_is_refused_before_it_leaves(rolled_out, monkeypatch):
    monkeypatch.setattr(art_http, "_gateway", lambda: False)

    def ask():
        with pytest.raises(HTTPClientError, match=r"was refused before it left.*docs/dialects\.md"):
            bedrock().converse(**ASKED)

    trajectory = await rolled_out(ask)
    # boto3 takes it for a lost connection, and tries a few times.
    assert trajectory.error is None and 1 <= sum(trajectory.unrecorded["refused"].values()) <= 5


async def test_vertex_ai_is_recorded_as_the_gemini_api_is(rolled_out):
    def ask():
        vertex = {"vertexai": True, "project": "p", "location": "europe-west1", "credentials": Credentials("secret")}
        answers = []
        for options in ({"api_key": "k"}, vertex):
            with genai.Client(**options) as client:
                asked = {"model": "gemini-3-pro", "contents": "hi"}
                answers.append(client.models.generate_content(**asked).text)
                answers.append("".join(part.text for part in client.models.generate_content_stream(**asked)))
                answers.append(client.models.count_tokens(**asked).total_tokens)
        return answers

    trajectory = await rolled_out(ask)
    assert trajectory.error is None
    length = len(trajectory.calls[0].prompt_ids)
    assert trajectory.output == ["four", "four", length] * 2
    gemini, vertex = trajectory.calls[:2], trajectory.calls[2:]
    for one, other in zip(gemini, vertex, strict=True):
        assert (one.request, one.response, one.prompt_ids) == (other.request, other.response, other.prompt_ids)
        assert other.request["model"] == "gemini-3-pro"


@pytest.mark.parametrize(
    "url",
    [
        "https://aiplatform.googleapis.com/v1/publishers/google/models/gemini:generateContent",
        "https://aiplatform.googleapis.com/v1/projects/p/locations/global/publishers/google/models/gemini:generateContent",
        "https://us-central1-aiplatform.googleapis.com/v1beta1/projects/p/locations/l/endpoints/12:generateContent",
    ],
)
async def test_every_address_of_a_model_of_vertex_ai_is_answered(rolled_out, url):
    trajectory = await rolled_out(lambda: httpx.post(url, json=CONTENTS).raise_for_status().json())
    assert (trajectory.error, len(trajectory.calls)) == (None, 1)


async def test_counting_for_a_tuned_model_does_not_leave(rolled_out):
    url = "https://us-central1-aiplatform.googleapis.com/v1/projects/p/locations/l/endpoints/12:countTokens"
    trajectory = await rolled_out(lambda: httpx.post(url, json=CONTENTS).raise_for_status().json()["totalTokens"])
    assert trajectory.error is None and trajectory.output > 0 and not trajectory.calls
