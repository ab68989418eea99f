"""The email agent gets better for real: the demo's path with fewer steps, on the known answer and on a judge's scores."""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from art_core.store import Store

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]


def test_the_email_agent_gets_visibly_better(tmp_path):
    from examples.email_search.train import run

    report = run(steps=12, run_dir=tmp_path / "run", eval_tasks=150).report
    before, after = report["before"], report["after"]
    assert 0.10 <= before["success"] <= 0.40
    assert after["success"] - before["success"] > 0.15


class Judge(BaseHTTPRequestHandler):
    """An OpenAI-compatible server that prefers runs which read a message before they answer."""

    asked = 0

    def do_POST(self):
        Judge.asked += 1
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        text = "\n".join(str(message["content"]) for message in body["messages"])
        answer = {"scores": [score(label, part) for label, part in runs_in(text)]}
        message = {"role": "assistant", "content": json.dumps(answer)}
        reply = json.dumps(
            {
                "id": "j", "object": "chat.completion", "created": 1, "model": body["model"],
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
            }
        ).encode()  # fmt: skip
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *args):
        pass


def runs_in(text):
    """Return (label, text) of every run that the judge is shown."""
    parts = re.split(r'<trajectory id="([a-z]+)">', text)
    return list(zip(parts[1::2], parts[2::2], strict=True))


def score(label, text):
    return {"trajectory_id": label, "explanation": "", "score": 0.9 if "calls read_email(" in text else 0.1}


def test_the_demo_trains_on_a_judges_scores(tmp_path, monkeypatch):
    from examples.email_search.train import run

    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("OPENAI_API_BASE", f"http://127.0.0.1:{server.server_port}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "a judge's key")
    try:
        result = run(steps=3, judge="openai/scripted", run_dir=tmp_path / "run", eval_tasks=8)
    finally:
        server.shutdown()
        server.server_close()
    assert Judge.asked >= 3 * 4
    with Store(tmp_path / "run" / "run.sqlite") as store:
        rewards = {t.reward for t in store.trajectories(split="train")}
    assert rewards <= {0.1, 0.9, None} and {0.1, 0.9} <= rewards
    assert result.report["after"]["n"] == 8
