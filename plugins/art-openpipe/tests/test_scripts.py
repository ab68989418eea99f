"""OpenPipe ART's examples, as scripts of their users, trained for real; the run folder proves the tokens."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import warm
from http_server import serving
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import art_audit
from art_core.store import Store

SCRIPTS = Path(__file__).parent / "scripts"
PAGE = Path(__file__).parents[3] / "docs" / "from-openpipe-art.md"
FOLDERS = {
    "tic_tac_toe": "tic-tac-toe/models/001-script",
    "game_2048": "2048/models/agent-002",
    "email_search": "email/models/email-001",
    "email_langgraph": "email/models/email-graph",
    "mcp_rl": "mcp-rl/models/mcp-001",
    "summarizer": "summaries/models/sft-rl",
    "yes_no_maybe": "words/models/yes-no-maybe",
    "nim": "nim/models/nim-001",
}
IMITATED = {"summarizer": 3}
"""Steps of imitation before the first one with rewards."""


async def _provider(request: Request) -> JSONResponse:
    """Answer as a teacher, a judge who prefers the later ones, or a player."""
    body = await request.json()
    text = "\n".join(message["content"] for message in body["messages"])
    labels = re.findall(r'<trajectory id="(\w+)">', text)
    scores = [{"trajectory_id": label, "explanation": "", "score": place / 9} for place, label in enumerate(labels)]
    schema = json.dumps(body.get("response_format", ""))
    answers = {"texts": {"texts": ["It rained.", "She slept."]}, "take": {"take": 1}}
    answer = {"scores": scores} if labels else next((answers[name] for name in answers if name in schema), "Wet.")
    message = {"role": "assistant", "content": answer if isinstance(answer, str) else json.dumps(answer)}
    choices = [{"index": 0, "finish_reason": "stop", "message": message}]
    return JSONResponse({"id": "1", "object": "chat.completion", "created": 1, "model": "any", "choices": choices})


@pytest.fixture(scope="module")
def provider():
    with serving(Route("/v1/chat/completions", _provider, methods=["POST"])) as address:
        yield {"OPENAI_BASE_URL": f"{address}/v1", "OPENAI_API_KEY": "key"}


def _run(script: Path, folder: Path) -> tuple[int, str]:
    """Return the exit status and what it said; it starts as ``python SCRIPT`` does, but forked."""
    with (folder / "said").open("w+") as said:
        code = f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
        status = warm.program(code, [], cwd=folder, stdout=said.fileno(), stderr=said.fileno()).wait(200)
        return status, Path(said.name).read_text()


@pytest.mark.engines
@pytest.mark.timeout(240)  # that of every test; with the mark the file is begun early
@pytest.mark.parametrize("script", FOLDERS)
def test_the_script_trains_and_its_run_folder_is_clean(script, provider, tmp_path, monkeypatch):
    variables = provider | {"ART_MODEL": "tiny", "ART_PATH": str(tmp_path), "STEPS": "2", "GAMES": "6"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    status, said = _run(SCRIPTS / f"{script}.py", tmp_path)
    assert status == 0 and "Traceback" not in said, said[-3000:]
    run_dir, before = tmp_path / FOLDERS[script], IMITATED.get(script, 0)
    with Store(run_dir / "run.sqlite") as store:
        trained = store.trajectories(split="train")
        assert len(trained) == 2 * 2 * 6 and all(it.calls for it in trained if not it.error)
        assert sum(it.error is None for it in trained) > len(trained) / 2
        temperatures = {call.temperature for it in trained for call in it.calls}
        assert temperatures == ({0.9} if script == "game_2048" else {1.0})
        assert not any(call.agent and call.agent.startswith("scope-") for it in trained for call in it.calls)
        # Where all of a step are worth the same there is nothing to learn, and the step changes no weights.
        assert store.updates() and store.meta("ended") == ""
    steps = [json.loads(line) for line in (run_dir / "history.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps if "train/reward" in line] == [before + 1, before + 2]
    audit = art_audit.audit(run_dir, progress=False)
    assert audit.clean, audit.problems


@pytest.mark.engines
def test_the_program_of_the_docs_trains(tmp_path):
    [program] = re.findall(r"runs this -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert [line.split()[0] for line in ended.stdout.splitlines()] == ["1", "2"]
