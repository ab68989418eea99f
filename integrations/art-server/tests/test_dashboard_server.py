"""A server, a worker and a script train the tiny model; the pages are looked at meanwhile."""

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
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def test_a_run_on_a_server_is_seen_to_learn_and_its_runs_are_opened_and_compared(tmp_path, desk):
    (tmp_path / "app.py").write_text(AGENT)
    (tmp_path / "drive.py").write_text(DRIVE)
    url = f"127.0.0.1:{free_port()}"
    port = url.partition(":")[2]
    with (
        process(tmp_path, "-m", "art_cli", "serve", "--port", port, "--run-dir", "tiny-run"),
        process(tmp_path, "-m", "art_cli", "worker", f"ws://{url}", "--id", "client_1", "--agent", "app.py:agent"),
    ):
        reached(url)
        page = desk.open(f"http://{url}/", http_credentials={"username": "anyone", "password": TOKEN})
        page.wait_for_function("() => document.getElementById('client-count').textContent === '1'", timeout=60_000)
        assert "client_1" in page.locator("#clients").inner_text()
        with process(tmp_path, "drive.py", f"http://{url}") as driver:
            assert driver.stdout.readline() == "step\n"
            page.wait_for_selector(".chart .u-wrap canvas")
            page.get_by_text("Metrics as a table").click()
            page.wait_for_function("() => document.querySelectorAll('.metrics-table tbody tr').length === 1")
            drawn = page.locator("canvas").first.evaluate("it => it.toDataURL()")
            driver.stdin.write("\n")
            driver.stdin.flush()
            assert driver.stdout.readline() == "step\n"
        page.wait_for_function("() => document.querySelectorAll('.metrics-table tbody tr').length === 2")
        assert page.locator("canvas").first.evaluate("it => it.toDataURL()") != drawn
        page.goto(f"http://{url}/#/run/tiny-run/rollouts?split=train")
        page.wait_for_selector("tbody [data-item]")
        page.keyboard.press("j")
        page.keyboard.press("Enter")
        page.wait_for_selector(".trajectory .message.assistant")
        page.goto(f"http://{url}/#/run/tiny-run/compare")
        page.wait_for_selector(".side-by-side .message")
        chosen = [it.locator("option:checked").inner_text() for it in page.locator(".side-head select").all()]
        assert [it.partition(",")[0].partition("·")[0].strip() for it in chosen] == ["step 1", "step 2"]
        page.close()  # before the server ends, so that it does not ask one that is gone


def reached(url):
    """Return when the server answers: its address is taken early, and answered once the engine is there."""
    while True:
        try:
            request = urllib.request.Request(f"http://{url}/status", headers={"Authorization": f"Bearer {TOKEN}"})
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.read()
        except urllib.error.URLError:  # not even that yet
            time.sleep(0.2)
