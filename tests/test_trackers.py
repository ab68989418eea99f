"""Trackers are told everything in order, and nothing that they do stops a run."""

import threading

import pytest
from screens import Lines

import art_core as art
from art_core.attribution import destination
from art_core.config import TrainConfig
from art_core.errors import ConfigError
from art_core.loop import trackers
from art_core.plugins import Plugins
from art_core.testing import CountingLearner, FakeEngine, ScriptedAgent


class Told:
    """Keeps what it is told."""

    def __init__(self):
        self.told, self.threads, self.free = [], set(), []

    def log(self, step, metrics):
        self._keep("log", step, metrics["reward"])

    def log_groups(self, step, groups, split):
        runs = [t for group in groups for t in group.trajectories]
        assert all(t.calls and t.reward is not None and t.rollout_id for t in runs)
        self._keep("log_groups", step, split, len(runs))

    def log_evaluation(self, step, found):
        self._keep("log_evaluation", step, found["name"])

    def log_checkpoint(self, step, folder):
        assert folder.is_dir()
        self._keep("log_checkpoint", step)

    def log_report(self, report):
        self._keep("log_report", report["steps"])

    def close(self):
        self._keep("close")

    def _keep(self, *told):
        self.threads.add(threading.current_thread().name)
        self.free.append(destination("gpt-4.1") is None)
        self.told.append(told)


def number():
    count = 0

    def answer(request):
        nonlocal count
        count += 1
        return str(count)

    return answer


async def train(tmp_path, *tracked, **more):
    settings = {
        "model": "tiny", "steps": 2, "tasks_per_step": 1, "group_size": 2, "engine": FakeEngine(number()),
        "learner": CountingLearner(), "run_dir": tmp_path / "run", "progress": False,
        "reward": lambda trajectory: float(int(trajectory.output) % 2), **more,
    }  # fmt: skip
    return await art.train(ScriptedAgent(), ["a"], trackers=tracked, **settings)


async def test_a_tracker_is_told_everything_in_order_in_one_thread_that_is_no_rollouts(tmp_path):
    tracker = Told()
    await train(tmp_path, tracker, eval_tasks=["held out"], eval_every=1)
    assert [told for told in tracker.told if told[0] != "log"] == [
        ("log_groups", 0, "eval", 1),
        ("log_evaluation", 0, "before"),
        ("log_groups", 1, "train", 2),
        ("log_checkpoint", 1),
        ("log_groups", 1, "eval", 1),
        ("log_evaluation", 1, "step 1"),
        ("log_groups", 2, "train", 2),
        ("log_checkpoint", 2),
        ("log_groups", 2, "eval", 1),
        ("log_evaluation", 2, "after"),
        ("log_report", 2),
        ("close",),
    ]
    assert [told for told in tracker.told if told[0] == "log"] == [("log", 1, 0.5), ("log", 2, 0.5)]
    assert len(tracker.threads) == 1 and threading.current_thread().name not in tracker.threads
    assert all(tracker.free)


async def test_the_last_weights_are_told_where_not_every_step_has_a_checkpoint(tmp_path):
    tracker = Told()
    await train(tmp_path, tracker, steps=3, checkpoint_every=2)
    assert [told for told in tracker.told if told[0] == "log_checkpoint"] == [
        ("log_checkpoint", 2),
        ("log_checkpoint", 3),
    ]


async def test_a_tracker_that_fails_is_named_once_and_told_further(tmp_path):
    class Fails(Told):
        def log(self, step, metrics):
            super().log(step, metrics)
            raise OSError("no network")

    tracker, other, screen = Fails(), Told(), Lines()
    result = await train(tmp_path, tracker, other, progress=screen)
    assert result.report["steps"] == 2
    assert [told[0] for told in tracker.told].count("log") == 2 and other.told == tracker.told
    assert [line for line in screen.lines if "Fails 1" in line] == [
        "the tracker Fails 1 failed in log: OSError: no network; the run goes on, and what it missed is in the run folder"
    ]


async def test_a_tracker_that_hangs_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "WAITING", 1)
    free = threading.Event()

    class Hangs:
        def log(self, step, metrics):
            free.wait()

        def close(self):
            pass

    screen = Lines()
    result = await train(tmp_path, Hangs(), steps=4, progress=screen, tracker_timeout=0.05)
    free.set()
    assert result.report["steps"] == 4
    about = [line for line in screen.lines if "Hangs" in line]
    assert len(about) == 2 and "behind" in about[0] and "has not ended in 0.05 s" in about[1]


async def test_who_is_waited_for_at_the_end_is_said_and_so_is_what_was_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "SILENT_SECONDS", 0.05)
    waited = threading.Event()

    class Slow(Told):
        def log(self, step, metrics):
            raise OSError("no network")

        def close(self):
            assert waited.wait(30)
            raise OSError("2 steps were never sent")

    class Screen(Lines):
        def say(self, text):
            super().say(text)
            if "waiting for the tracker Slow 1, " in text and " s at most" in text:
                waited.set()

    screen = Screen()
    await train(tmp_path, Slow(), progress=screen)
    failed, _, lost = [line for line in screen.lines if "Slow 1" in line]
    assert "failed in log: OSError: no network; the run goes on" in failed
    assert "failed in close: OSError: 2 steps were never sent; what it missed is in the run folder" in lost


async def test_a_tracker_that_catches_up_is_closed(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "WAITING", 1)
    free, told = threading.Event(), []

    class Slow(Told):
        def log(self, step, metrics):
            free.wait()

        def log_report(self, report):
            told.append("report")

        def close(self):
            told.append("closed")

    class Frees:
        def log(self, step, metrics):
            pass

        def close(self):
            free.set()

    await train(tmp_path, Slow(), Frees(), steps=4)
    assert told == ["report", "closed"]


async def test_what_cannot_be_written_or_made_leaves_no_tracker_open(tmp_path, monkeypatch):
    def full(run):
        raise OSError("no space left")

    tracker = Told()
    monkeypatch.setattr("art_core.loop.train.write_report", full)
    with pytest.raises(OSError, match="no space"):
        await train(tmp_path, tracker)
    assert tracker.told[-1] == ("close",)

    def refuses(run_dir, config):
        raise ConfigError("not today")

    other = Told()
    with pytest.raises(ConfigError, match="not today"):
        trackers.Trackers({"other": lambda *_: other, "refuses": refuses}, tmp_path, TrainConfig(), print)
    assert other.told == [("close",)]


async def test_a_tracker_that_exits_is_named_and_a_thing_that_is_none_is_refused(tmp_path):
    class Exits(Told):
        def log(self, step, metrics):
            raise SystemExit(3)

    tracker, screen = Exits(), Lines()
    await train(tmp_path, tracker, progress=screen)
    assert tracker.told[-1] == ("close",) and any("Exits 1 failed in log: SystemExit" in line for line in screen.lines)
    with pytest.raises(ConfigError, match="is no tracker"):
        await train(tmp_path, object(), run_dir=tmp_path / "other")


async def test_a_tracker_that_cannot_work_here_is_refused_before_anything_runs(tmp_path):
    def factory(run_dir, config):
        raise AssertionError("made")

    def check():
        raise ConfigError("set MINE_KEY")

    class Offers:
        @art.hookimpl
        def register_trackers(self, register):
            register("mine", factory, check=check)

    plugins = Plugins(Offers(), installed=False)
    engine = FakeEngine()
    with pytest.raises(ConfigError, match="set MINE_KEY"):
        await train(tmp_path, "mine", plugins=plugins, engine=engine)
    with pytest.raises(ConfigError, match="mien"):
        await train(tmp_path, "mien", plugins=plugins, engine=engine)
    assert not engine.requests and not (tmp_path / "run").exists()
