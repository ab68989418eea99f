"""deploy/rented.sh: training on a machine that is reached by SSH, driven from here."""

import asyncio
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from ssh_server import command, rented_machine

from art_vllm.process import free_port

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(sys.platform != "linux", reason="the rented machine, here this one, must have Linux"),
]

DEPLOY = Path(__file__).parents[1] / "deploy"
SCRIPT = ["sh", str(DEPLOY / "rented.sh")]
DRIVE = """
import asyncio, os, sys
import art_server
from openai import OpenAI

def agent(question):
    client = OpenAI(api_key="unused")
    messages = [{"role": "user", "content": question}]
    return client.chat.completions.create(model="m", messages=messages, max_completion_tokens=8).choices[0].message.content

async def main():
    async with art_server.connect(os.environ["ART_URL"]) as run:
        first = (await run.status())["step"]
        for step in range(first, int(sys.argv[1])):
            groups = await run.collect(agent, ["Which city?", "Where is it?"], group_size=4)
            groups = await run.score(groups, lambda trajectory: len(trajectory.output or ""))
            await run.learn(groups)
            print("step", step, flush=True)

asyncio.run(main())
"""
UV = f"""
echo "$@" >> ~/uv.log
if [ "$1" = venv ]; then
  mkdir -p env/bin
  printf '#!/bin/sh\\nexec {sys.executable} "$@"\\n' > env/bin/python
  printf '#!/bin/sh\\nexec {sys.executable} -m art_cli "$@"\\n' > env/bin/art
  chmod +x env/bin/*
fi
"""
"""Instead of uv there: its environment is that of the tests, so that nothing is installed."""


def environment(folder, **variables):
    return os.environ | {"PATH": f"{folder}/bin:{os.environ['PATH']}"} | variables


async def start(folder, steps, program="drive.py"):
    (folder / "drive.py").write_text(DRIVE)
    ports = {"PORT": str(free_port()), "SERVER_PORT": str(free_port())}
    return await asyncio.create_subprocess_exec(
        *SCRIPT, "rented", "--model", "tiny", "--set", "max_context=512", "--", sys.executable, program, str(steps),
        cwd=folder, env=environment(folder, **ports), start_new_session=True,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip


async def read_until(process, text):
    said = ""
    while text not in said:
        line = (await process.stdout.readline()).decode()
        assert line, said
        said += line
    return said


def steps_of(folder):
    with sqlite3.connect(folder / "runs" / "rented" / "run.sqlite") as store:
        return [step for (step,) in store.execute("select step from steps order by step")]


async def test_a_run_there_outlives_a_lost_connection_and_ctrl_c_and_comes_home(tmp_path):
    async with rented_machine(tmp_path) as machine:
        command(machine.home / ".local" / "bin" / "uv", UV)

        process = await start(tmp_path, 100)
        said = await read_until(process, "step 0\n")
        assert "no GPU: training on the CPU" in said and "serving at http://127.0.0.1" in said
        machine.drop_connections()
        await read_until(process, "step 2\n")
        os.killpg(process.pid, signal.SIGINT)
        said = (await process.communicate())[0].decode()
        assert process.returncode == 130, said
        assert "copying the run to runs/rented" in said and "failed" not in said
        done = steps_of(tmp_path)
        assert done[:3] == [1, 2, 3]
        (tmp_path / "runs" / "rented" / "run.sqlite-wal").write_bytes(b"from before")

        process = await start(tmp_path, 100)
        said = await read_until(process, f"step {len(done)}\n")
        assert "step 0\n" not in said
        os.killpg(process.pid, signal.SIGTERM)  # as systemd does: its own background process too
        said = (await process.communicate())[0].decode()
        assert process.returncode == 130 and "copying the run to runs/rented" in said, said
        assert steps_of(tmp_path)[: len(done) + 1] == [*done, len(done) + 1]
        assert (tmp_path / "runs" / "rented.before" / "run.sqlite-wal").read_bytes() == b"from before"

    assert (machine.home / "art-rented" / "checkout" / "art_core" / "__init__.py").is_file()
    assert "-e checkout[train]" in (machine.home / "uv.log").read_text()


async def test_the_run_of_an_earlier_machine_is_kept_beside_that_of_the_next(tmp_path):
    async with rented_machine(tmp_path) as machine:
        command(machine.home / ".local" / "bin" / "uv", UV)
        for earlier in range(2):
            process = await start(tmp_path, 0, "-V")
            said = (await process.communicate())[0].decode()
            assert process.returncode == 0 and ("is another run's" in said) == bool(earlier), said
            (tmp_path / "runs" / "rented" / "mine").write_text(f"machine {earlier}")
            shutil.rmtree(machine.home / "art-rented")
        process = await start(tmp_path, 0, "-V")
        await process.communicate()
    kept = sorted(file.read_text() for file in tmp_path.glob("runs/rented*/mine"))
    assert kept == ["machine 0", "machine 1"]


async def test_a_server_that_does_not_start_is_shown_with_its_own_words(tmp_path):
    async with rented_machine(tmp_path) as machine:
        failing = UV.replace(f'exec {sys.executable} -m art_cli "$@"', "echo no such model; exit 1")
        command(machine.home / ".local" / "bin" / "uv", failing)
        process = await start(tmp_path, 1)
        said = (await process.communicate())[0].decode()
        assert process.returncode == 1
        assert "no such model" in said and "step" not in said and "copying the run" not in said


async def test_a_machine_that_is_gone_at_the_end_is_not_said_to_have_stopped(tmp_path):
    async with rented_machine(tmp_path) as machine:
        command(machine.home / ".local" / "bin" / "uv", UV)
        process = await start(tmp_path, 100)
        await read_until(process, "step 0\n")
        command(tmp_path / "bin" / "ssh", "exit 255")
        machine.drop_connections()
        os.killpg(process.pid, signal.SIGINT)
        said = (await process.communicate())[0].decode()
        assert process.returncode == 130 and "rented can't be reached: its server may still be running" in said, said


def test_a_dry_run_prints_every_command_and_calls_none(tmp_path):
    command(tmp_path / "bin" / "ssh", "echo called > called")
    done = subprocess.run(
        [*SCRIPT, "--dry-run", "gpu.example", "--set", "note=it's", "--", "python", "drive.py"],
        cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, check=True,
    )  # fmt: skip
    for part in (
        "ssh -M -f -tt", "-L 127.0.0.1:8000:127.0.0.1:8000 gpu.example", "| ssh gpu.example tar -C art-rented/checkout -xf -",
        "uv pip install", "art doctor --install vllm", "art serve --port 8000 --run-dir runs/rented '--set' 'note=it'\\''s'",
        "running 'python' 'drive.py', dashboard at http://127.0.0.1:8000", "tar -C art-rented/runs -cf - rented",
    ):  # fmt: skip
        assert part in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"bin"}


@pytest.mark.parametrize(
    ("options", "variables", "said"),
    [
        (["--port", "9000"], {}, "drop --port"),
        (["--token=abc"], {}, "drop --token=abc"),
        ([], {"RUN": "my run"}, "a run's name may have"),
        ([], {"RUN": "../x"}, "a run's name may have"),
    ],
)
def test_what_would_not_reach_the_server_is_refused(tmp_path, options, variables, said):
    done = subprocess.run(
        [*SCRIPT, "--dry-run", "gpu.example", *options, "--", "true"],
        cwd=tmp_path, env=environment(tmp_path, **variables), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2 and said in done.stderr


def test_without_a_host_and_a_command_the_usage_is_shown(tmp_path):
    done = subprocess.run([*SCRIPT, "gpu.example", "--model", "tiny"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "rented.sh [--dry-run] HOST [OPTION OF art serve]... -- COMMAND" in done.stderr


def test_skypilot_is_asked_for_one_gpu_that_is_stopped_and_kept_when_idle():
    resources = yaml.safe_load((DEPLOY / "sky.yaml").read_text())["resources"]
    assert set(resources["accelerators"].values()) == {1}
    assert "-tt" in (DEPLOY / "rented.sh").read_text()  # SkyPilot counts only terminals as SSH connections
    assert resources["autostop"] == {"idle_minutes": 30, "down": False, "wait_for": "jobs_and_ssh"}
