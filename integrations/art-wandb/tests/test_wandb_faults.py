"""Nothing that happens to wandb stops a training, nothing of wandb outlives it, and an offline run asks nobody anything."""

import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from offline_run import runs_in
from screens import Lines
from short_training import train

pytestmark = pytest.mark.system

HERE = Path(__file__).parent


def wandb_processes(pid=None):
    """The processes of wandb that this process, or another, has."""
    return [it for it in psutil.Process(pid).children(recursive=True) if it.name().startswith("wandb")]


@pytest.mark.engines
def test_training_goes_on_where_wandbs_process_is_gone(tmp_path):
    # In a process of its own, because wandb cannot be used in it any more.
    done = subprocess.run(
        [sys.executable, HERE / "lost_wandb_process.py", tmp_path / "run"], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    *said, last = done.stdout.splitlines()
    (line,) = [line for line in said if "failed in" in line]
    assert "Robbed 1 failed in log_groups: Connection" in line and "training is not affected" in line
    assert last == "3 steps"


async def test_a_tracker_that_cannot_begin_says_so_once(tmp_path):
    screen, folder = Lines(), tmp_path / "run"
    folder.mkdir()
    (folder / "wandb.json").write_text("{")
    result = await train(folder, progress=screen)
    assert result.report["steps"] == 2
    (line,) = [line for line in screen.lines if "tracker" in line]
    assert "wandb failed in log: StoreError" in line and "wandb.json is damaged" in line


@pytest.mark.engines
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_a_training_that_is_ended_leaves_no_process_of_wandbs(tmp_path, ending):
    folder = tmp_path / "run"
    training = subprocess.Popen(
        [sys.executable, HERE / "endless_training.py", folder],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with training:
        for line in training.stdout:
            if line == "told 3\n":
                break
        started = wandb_processes(training.pid)
        assert "wandb-core" in {it.name() for it in started}
        training.send_signal(ending)
        training.communicate(timeout=60)
    _, left = psutil.wait_procs(started, timeout=30)
    assert not left
    if ending == signal.SIGINT:
        (run,) = runs_in(folder)
        assert run.finished and [step for step, _ in run.values("train/reward")][:3] == [1, 2, 3]


@contextmanager
def proxy():
    """A proxy that answers nothing; gives its address and what it was asked."""
    asked = []

    def listen():
        while True:
            connection, _ = listener.accept()
            with connection:
                if not (line := connection.recv(100)):
                    return
                asked.append(line)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=listen)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", asked
        finally:
            socket.create_connection(listener.getsockname()).close()
            thread.join()


@pytest.mark.engines
@pytest.mark.parametrize("reports", [None, "true"])
def test_an_offline_run_asks_nobody_anything(tmp_path, reports):
    with proxy() as (address, asked):
        environment = {**os.environ, "ART_EPOCHS": "2", "NO_PROXY": "", "no_proxy": ""}
        environment |= dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), address)
        if reports:  # what wandb reports about itself shows that the proxy would be asked
            environment["WANDB_ERROR_REPORTING"] = reports
        subprocess.run([sys.executable, HERE / "wandb_integration.py"], env=environment, check=True, timeout=100)
    assert bool(asked) == bool(reports)
    assert len(runs_in(tmp_path)) == 1
