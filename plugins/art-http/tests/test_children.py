"""Programs that a rollout starts call the policy with the SDKs of the providers, told by their environment alone."""

import os
import subprocess
import sys

import pytest

import art_core as art
from art_core.testing import CountingLearner, FakeEngine

GENAI = """
from google import genai
from google.oauth2.credentials import Credentials
client = genai.Client({})
print(client.models.generate_content(model='m', contents='hi').text)
"""
PROGRAMS = {
    "google-genai": GENAI.format(""),
    "google-genai, Vertex AI": GENAI.format(
        "vertexai=True, project='p', location='europe-west1', credentials=Credentials('token')"
    ),
    "google-genai, Vertex AI with a key": GENAI.format("vertexai=True"),
    "Ollama client": """
import ollama
print(ollama.chat('m', [{'role': 'user', 'content': 'hi'}]).message.content)
""",
    "boto3": """
import boto3
messages = [{'role': 'user', 'content': [{'text': 'hi'}]}]
answer = boto3.client('bedrock-runtime', 'us-east-1').converse(modelId='m', messages=messages)
print(answer['output']['message']['content'][0]['text'])
""",
    "AnthropicBedrock": """
import anthropic
messages = [{'role': 'user', 'content': 'hi'}]
client = anthropic.AnthropicBedrock(aws_region='us-east-1')
print(client.messages.create(model='m', max_tokens=9, messages=messages).content[0].text)
""",
}
KEYS = ("AWS_BEARER_TOKEN_BEDROCK", "GEMINI_API_KEY", "GOOGLE_API_KEY", "OLLAMA_API_KEY")


@pytest.mark.system
@pytest.mark.parametrize("program", PROGRAMS)
async def test_a_program_with_this_sdk_is_recorded_and_has_no_key_of_its_provider(tmp_path, monkeypatch, program):
    for name in KEYS:
        monkeypatch.setenv(name, "the-providers-own")
    if program == "boto3":  # it sends tokens over TLS only
        monkeypatch.delenv("AWS_BEARER_TOKEN_BEDROCK")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    code = f"{PROGRAMS[program]}\nimport os; print({{os.environ[name] for name in {KEYS} if name in os.environ}})"

    def agent(task):
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
        return done.stdout.splitlines()

    async with art.open_run(tmp_path / "run", engine=FakeEngine("four"), learner=CountingLearner()) as run:
        [group] = await run.collect(agent, ["a"], group_size=1)
    [trajectory] = group.trajectories
    assert (trajectory.error, len(trajectory.calls)) == (None, 1)
    assert trajectory.output == ["four", "{'art-rollout'}"]
    assert {os.environ[name] for name in KEYS if name in os.environ} == {"the-providers-own"}
