"""What a machine does to a run: each fault ends in a clear message, and in a run that goes on."""

import ctypes
import os
import resource
import signal
import subprocess
import sys

import psutil
import pytest
from trainings import MAIN, Place

pytestmark = pytest.mark.system

REWARDS = """
class Absent:
    async def score(self, group):
        return [None] * len(group.trajectories)

absent = Absent()

def constant(trajectory):
    return 1.0
"""


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


def test_sigterm_to_all_processes_ends_in_good_order(place):
    # As a shell starts what it does not wait for.
    process = place.start(1000, before="import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)")
    place.reach(2, process)
    os.killpg(process.pid, signal.SIGTERM)
    status, said = place.ends(process)
    assert status == 143 and "art train --resume run resumes after the last finished step" in said
    place.goes_on(len(place.steps) + 1)


def test_an_engine_that_the_kernel_kills_for_memory_is_named(place):
    process = place.start(1000)
    place.reach(1, process)
    [engine] = psutil.Process(process.pid).children()
    engine.kill()
    status, said = place.ends(process)
    assert status == 1 and "the serving process died: it was killed by SIGKILL" in said
    assert "running out of memory is the usual cause" in said and "with the same run_dir to resume" in said
    place.goes_on(len(place.steps) + 1)


@pytest.mark.parametrize(
    ("size", "named"), [(150_000, "run.sqlite"), (6_000_000, "checkpoint")], ids=["store", "checkpoint"]
)
def test_a_disk_that_is_full_is_named(place, size, named):
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {resource.RLIM_INFINITY}))"
    status, said = place.ends(place.start(1000, before=limit))
    assert status == 1 and named in said and "StoreError" in said
    place.goes_on(3)


def without_override():
    """Let root be refused like everybody else, in the program that is executed next."""
    if os.geteuid() == 0:
        drop_bounding, override = 24, 1
        assert ctypes.CDLL(None).prctl(drop_bounding, override, 0, 0, 0) == 0


@pytest.mark.skipif(sys.platform != "linux" and os.geteuid() == 0, reason="only Linux can take root's rights away")
def test_a_folder_that_became_read_only_is_named(place):
    place.goes_on(2)
    paths = [place.run_dir, *place.run_dir.rglob("*")]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    done = subprocess.run(
        [sys.executable, "-c", MAIN, *place.arguments(4)],
        cwd=place.folder, preexec_fn=without_override, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    for path in paths:
        path.chmod(0o755 if path.is_dir() else 0o644)
    assert done.returncode == 1 and "StoreError" in done.stderr and "cannot" in done.stderr
    assert "Traceback" not in done.stderr
    place.goes_on(4)


@pytest.mark.parametrize(
    ("reward", "setting", "code"),
    [("absent", "max_unscored_steps=2", 75), ("constant", "max_flat_groups=2", 3)],
)
def test_a_training_that_ended_early_says_by_its_exit_code_whether_that_may_pass(place, reward, setting, code):
    with (place.folder / "agent.py").open("a") as file:
        file.write(REWARDS)
    process = place.start(9, "--reward", f"agent.py:{reward}", "--set", setting)
    assert place.ends(process)[0] == code and place.steps == [1, 2]


def test_a_clock_that_goes_backwards_changes_nothing(place):
    backwards = "import time; now = time.time; begun = now(); time.time = lambda: begun - 3 * (now() - begun) - 86400"
    process = place.start(2)
    assert place.ends(process)[0] == 0
    status, said = place.ends(place.start(4, before=backwards))
    assert status == 0, said
    place.goes_on(5)


def test_output_that_cannot_be_written_does_not_stop_a_run(place):
    with open("/dev/full", "w") as full:
        status, said = place.ends(place.start(2, stdout=full))
    assert (status, place.steps) == (1, [1, 2]) and "the disk that stdout is written to is full" in said, said
    place.goes_on(3)


@pytest.mark.parametrize("from_the_start", [True, False])
def test_a_run_whose_output_nobody_reads_any_more_goes_on_to_its_end(place, from_the_start):
    reading, writing = os.pipe()
    if from_the_start:
        os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        process = place.start(3, stderr=pipe)
    if not from_the_start:
        place.reach(1, process)
        os.close(reading)
    assert process.wait(120) == 0 and place.steps == [1, 2, 3]
    assert "everything is in run" in " ".join((place.folder / "stdout").read_text().split())
