"""A server process, worker processes and a faulty proxy between them: every episode is finished exactly once.

The agents' answers and the driver's scores name what they belong to, so that whatever is lost, doubled or mixed up is seen in
the run's file.
"""

import asyncio
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fault_setting import Setting, check_file, check_runs
from faults import (
    HALVES,
    acknowledgement_lost,
    connections_cut,
    connections_silent,
    server_restarted,
    worker_killed,
    worker_stopped,
)
from process_marks import marked

import art_server

pytestmark = pytest.mark.system

SIZE = 4
"""Runs of a task."""


async def endure(setting, tasks, faults, *, rounds=2):
    """Collect, score and learn while the faults come one after the other, until all were there; return the driver's groups."""

    async def befall():
        for fault in faults:
            await asyncio.sleep(random.uniform(0.2, 1.5))
            await fault(setting)

    seen, befalling = [], asyncio.create_task(befall())
    async with art_server.connect(setting.proxy.url) as run:
        while len(seen) < rounds or not befalling.done():
            groups = await run.collect(None, tasks, group_size=SIZE, key=f"round-{len(seen)}")
            seen.append(groups)
            scored = await run.score(groups, lambda t: random.random())
            await run.learn(scored, key=f"step-{len(seen)}")
        await befalling
        assert (await run.status())["step"] == len(seen)
    return seen


def check(setting, tasks, seen):
    """Assert that each run was made once, and that the driver was told of those."""
    dead = {name: setting.log(name) for name, it in setting.workers.items() if it.poll() is not None}
    assert not dead
    for number, groups in enumerate(seen):
        kept = check_runs(setting.run_dir, f"round-{number}", tasks, SIZE)
        told = [[t.rollout_id for t in group.trajectories] for group in groups]
        assert told == [[t.rollout_id for t in group] for group in kept]
    ended = check_file(setting.run_dir, len(seen))
    assert ended["well"] == len(seen) * len(tasks) * SIZE
    assert ended.keys() <= {"well", "open", "RolloutLost", "CancelledError"}


async def begun(setting, workers, *server):
    """Start workers, and after them the server; return when all are connected."""
    for number in range(workers):
        setting.start_worker(f"w{number}", "fault_agents.py:" + ("patient", "lively")[number % 2])
    setting.start_server(*server)
    await setting.served()
    await setting.connected(workers)


@pytest.mark.timeout(600)
async def test_every_run_is_finished_once_though_a_worker_is_killed_the_network_cut_and_the_server_restarted(tmp_path):
    tasks = [f"task {number}" for number in range(8)]
    halves = [HALVES["half of what a worker is told"], HALVES["half of a model's answer"]]
    faults = [*halves, connections_cut(2), worker_killed("w2"), acknowledgement_lost, server_restarted(signal.SIGKILL)]
    async with Setting(tmp_path, lease=5) as setting:
        await begun(setting, 3)
        seen = await endure(setting, tasks, faults, rounds=1)
        check(setting, tasks, seen)
    assert not marked(f"FAULTS={tmp_path}")


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(3 if os.environ.get("LONG") == "whole" else 1))
async def test_eight_workers_a_storm_of_faults_and_every_run_is_finished_once(tmp_path, monkeypatch, seed):
    monkeypatch.setenv("FAULT_PAUSE", "1.0")
    tasks = [f"task {number}" for number in range(40)]
    faults = [
        *HALVES.values(), acknowledgement_lost, acknowledgement_lost, connections_cut(10), connections_silent(10, cut=False),
        connections_silent(12, cut=True), worker_killed("w7"), worker_stopped("w6", 16), server_restarted(signal.SIGKILL),
        server_restarted(signal.SIGTERM), server_restarted(signal.SIGINT), server_restarted(signal.SIGKILL),
    ]  # fmt: skip
    random.seed(seed)
    random.shuffle(faults)
    async with Setting(tmp_path, lease=10) as setting:
        await begun(setting, 8)
        check(setting, tasks, await endure(setting, tasks, faults))
    assert not marked(f"FAULTS={tmp_path}")


def real_server(setting):
    """The command of ``art serve`` with the real engine."""
    where = ["--run-dir", str(setting.run_dir), "--port", str(setting.port)]
    return ["-m", "art_cli", "serve", *where, "--lease", "10"]


@pytest.mark.engines
@pytest.mark.timeout(1800)
async def test_with_the_real_engine_what_was_trained_is_what_was_sampled(tmp_path):
    tasks = [f"task {number}" for number in range(8)]
    faults = [
        HALVES["half of a model call"], HALVES["half of a model's answer"], connections_cut(10), worker_killed("w3"),
        server_restarted(signal.SIGKILL), worker_stopped("w2", 16), server_restarted(signal.SIGTERM),
    ]  # fmt: skip
    async with Setting(tmp_path, lease=10) as setting:
        serve = real_server(setting)
        faults[4], faults[6] = (server_restarted(it, *serve) for it in (signal.SIGKILL, signal.SIGTERM))
        await begun(setting, 4, *serve)
        check(setting, tasks, await endure(setting, tasks, faults))
        await asyncio.to_thread(setting.kill_server, signal.SIGTERM)
    command = [sys.executable, "-m", "art_cli", "audit", str(setting.run_dir)]
    audit = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
    assert audit.returncode == 0, audit.stdout + audit.stderr
    assert not marked(f"FAULTS={tmp_path}")


@pytest.mark.engines
@pytest.mark.timeout(600)
@pytest.mark.parametrize("told", [False, True])
async def test_a_server_whose_engine_was_killed_ends_and_started_again_goes_on(tmp_path, monkeypatch, told):
    monkeypatch.setenv("FAULT_PAUSE", "2")
    async with Setting(tmp_path, lease=10) as setting:
        serve = real_server(setting)
        await begun(setting, 1, *serve)
        async with art_server.connect(setting.proxy.url) as run:
            collecting = asyncio.create_task(run.collect(None, ["a"], group_size=SIZE + 4, key="round-0"))
            while not (await setting.status())["results_available"]:
                await asyncio.sleep(0.05)
            server = setting.server.pid
            [engine] = Path(f"/proc/{server}/task/{server}/children").read_text().split()
            # As a supervisor does that ends all processes of a service; the engine leaves its end to the server then.
            os.kill(int(engine), signal.SIGTERM if told else signal.SIGKILL)
            if told:
                setting.server.terminate()
            assert (await asyncio.to_thread(setting.server.wait, 60) == 1) is not told
            setting.start_server(*serve)
            await asyncio.wait_for(collecting, 120)
        check_runs(setting.run_dir, "round-0", ["a"], SIZE + 4)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.timeout(300)
async def test_a_job_is_known_after_a_server_that_ended_right_after_taking_it(tmp_path, number):
    async with Setting(tmp_path) as setting:
        setting.start_server()
        await setting.served()
        async with art_server.connect(setting.proxy.url) as run:
            request = {"kind": "collect", "tasks": ["a"], "group_size": 2}
            taken = await run._request("PUT", "/api/jobs/k", request)
            await asyncio.to_thread(setting.kill_server, number)
            setting.start_server()
            assert taken["state"] == (await run._request("GET", "/api/jobs/k"))["state"] == "running"
        assert "resuming job k" in setting.log("server")
