"""The dashboard while a server, a worker and a script train the tiny model."""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]

AGENT = """
from art_core.testing import ScriptedAgent

agent = ScriptedAgent(turns=2, max_tokens=24)
"""
DRIVE = """
import asyncio
import sys
import art_server

def letters(trajectory):
    trajectory.metrics["success"] = float(len(set(trajectory.output or "")) > 12)
    return float(len(set(trajectory.output or "")))

async def main():
    async with art_server.connect(sys.argv[1]) as run:
        for _ in range(2):
            groups = await run.collect(None, ["Which city is the offsite in?", "Who wrote about the invoice?"], group_size=4)
            await run.learn(await run.score(groups, letters))
            print("step", flush=True)
            sys.stdin.readline()

asyncio.run(main())
"""
TOKEN = "0123456789abcdef0123456789abcdef"
ENV = {name: value for name, value in os.environ.items() if not name.startswith("ART_")}
ENV |= {"OMP_WAIT_POLICY": "PASSIVE", "ART_SERVER_TOKEN": TOKEN}


@contextmanager
def process(folder, *command):
    started = subprocess.Popen(
        [sys.executable, *map(str, command)],
        cwd=folder,
        env=ENV,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield started
    finally:
        started.kill()
        started.wait()
        started.stdin.close()
        started.stdout.close()


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_a_servers_run_is_shown_live(tmp_path, desk):
    (tmp_path / "app.py").write_text(AGENT)
    (tmp_path / "drive.py").write_text(DRIVE)
    url = f"127.0.0.1:{free_port()}"
    port = url.partition(":")[2]
    with (
        process(tmp_path, "-m", "art_cli", "serve", "--port", port, "--run-dir", "tiny-run"),
        process(tmp_path, "-m", "art_cli", "worker", f"ws://{url}", "--id", "client_1", "--agent", "app.py:agent"),
    ):
        wait_for_server(url)
        page = desk.open(f"http://{url}/", http_credentials={"username": "anyone", "password": TOKEN})
        page.wait_for_function("() => document.getElementById('client-count').textContent === '1'", timeout=60_000)
        assert "client_1" in page.locator("#clients").inner_text()
        with process(tmp_path, "drive.py", f"http://{url}") as driver:
            assert driver.stdout.readline() == "step\n"
            page.wait_for_selector(".chart .u-wrap canvas")
            page.get_by_text("Metrics as a table").click()
            page.wait_for_function("() => document.querySelectorAll('.metrics-table tbody tr').length === 1")
            before = page.locator("canvas").first.evaluate("canvas => canvas.toDataURL()")
            driver.stdin.write("\n")
            driver.stdin.flush()
            assert driver.stdout.readline() == "step\n"
        page.wait_for_function("() => document.querySelectorAll('.metrics-table tbody tr').length === 2")
        assert page.locator("canvas").first.evaluate("canvas => canvas.toDataURL()") != before
        page.goto(f"http://{url}/#/run/tiny-run/rollouts?split=train")
        page.wait_for_selector("tbody [data-item]")
        page.keyboard.press("j")
        page.keyboard.press("Enter")
        page.wait_for_selector(".trajectory .message.assistant")
        page.goto(f"http://{url}/#/run/tiny-run/compare")
        page.wait_for_selector(".side-by-side .message")
        chosen = [select.locator("option:checked").inner_text() for select in page.locator(".side-head select").all()]
        assert [text.partition(",")[0].partition("·")[0].strip() for text in chosen] == ["step 1", "step 2"]
        page.close()  # before the server stops, so that the page does not poll a stopped server


def wait_for_server(url):
    """Return when the server responds. It binds its address early, and responds once the engine has started."""
    while True:
        try:
            request = urllib.request.Request(f"http://{url}/status", headers={"Authorization": f"Bearer {TOKEN}"})
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.read()
        except urllib.error.URLError:  # not bound yet
            time.sleep(0.2)
