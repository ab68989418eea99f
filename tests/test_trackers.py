"""Trackers are called in order, and nothing that they do stops a run."""

import threading

import pytest
from screens import Lines

import art_core as art
from art_core.attribution import destination
from art_core.config import TrainConfig
from art_core.errors import ConfigError
from art_core.loop import trackers
from art_core.loop.trackers import Tracker
from art_core.plugins import Plugins
from art_core.testing import CountingLearner, FakeEngine, ScriptedAgent


class Recorder(Tracker):
    """Keeps its calls."""

    def __init__(self):
        self.calls, self.threads, self.exempt = [], set(), []

    def log(self, step, metrics):
        self._keep("log", step, metrics["reward"])

    def log_groups(self, step, groups, split):
        trajectories = [t for group in groups for t in group.trajectories]
        assert all(t.calls and t.reward is not None and t.rollout_id for t in trajectories)
        self._keep("log_groups", step, split, len(trajectories))

    def log_evaluation(self, step, evaluation):
        self._keep("log_evaluation", step, evaluation["name"])

    def log_checkpoint(self, step, folder):
        assert folder.is_dir()
        self._keep("log_checkpoint", step)

    def log_report(self, report):
        self._keep("log_report", report["steps"])

    def close(self):
        self._keep("close")

    def _keep(self, *call):
        self.threads.add(threading.current_thread().name)
        self.exempt.append(destination("gpt-4.1") is None)
        self.calls.append(call)


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


async def test_all_methods_are_called_in_order_in_one_thread_outside_of_rollouts(tmp_path):
    tracker = Recorder()
    await train(tmp_path, tracker, eval_tasks=["held out"], eval_every=1)
    assert [call for call in tracker.calls if call[0] != "log"] == [
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
    assert [call for call in tracker.calls if call[0] == "log"] == [("log", 1, 0.5), ("log", 2, 0.5)]
    assert len(tracker.threads) == 1 and threading.current_thread().name not in tracker.threads
    assert all(tracker.exempt)


async def test_the_last_weights_are_logged_even_if_not_every_step_has_a_checkpoint(tmp_path):
    tracker = Recorder()
    await train(tmp_path, tracker, steps=3, checkpoint_every=2)
    assert [call for call in tracker.calls if call[0] == "log_checkpoint"] == [
        ("log_checkpoint", 2),
        ("log_checkpoint", 3),
    ]


async def test_a_tracker_that_fails_is_named_once_and_still_called(tmp_path):
    class Fails(Recorder):
        def log(self, step, metrics):
            super().log(step, metrics)
            raise OSError("no network")

    tracker, other, screen = Fails(), Recorder(), Lines()
    result = await train(tmp_path, tracker, other, progress=screen)
    assert result.report["steps"] == 2
    assert [call[0] for call in tracker.calls].count("log") == 2 and other.calls == tracker.calls
    assert [line for line in screen.lines if "Fails 1" in line] == [
        "the tracker Fails 1 failed in log: OSError: no network; training is not affected, and the run folder has what it missed"
    ]


async def test_a_tracker_that_hangs_is_abandoned(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "MAX_QUEUED", 1)
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
    assert [line for line in screen.lines if "Hangs" in line] == [
        "the tracker Hangs 1 is too slow; calls are skipped until it catches up",
        "the tracker Hangs 1 did not close within 0.05 s (tracker_timeout) and is abandoned",
    ]


async def test_a_slow_tracker_is_named_at_the_end_and_so_is_what_it_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "SILENT_SECONDS", 0.05)
    waited = threading.Event()

    class Slow(Recorder):
        def log(self, step, metrics):
            raise OSError("no network")

        def close(self):
            assert waited.wait(30)
            raise OSError("2 steps were never sent")

    class Screen(Lines):
        def say(self, text):
            super().say(text)
            if text.startswith("waiting up to ") and text.endswith(" s for the tracker Slow 1"):
                waited.set()

    screen = Screen()
    await train(tmp_path, Slow(), progress=screen)
    failed, _, lost = [line for line in screen.lines if "Slow 1" in line]
    assert "failed in log: OSError: no network; training is not affected" in failed
    assert "failed in close: OSError: 2 steps were never sent; training is not affected" in lost


async def test_a_tracker_that_catches_up_is_closed(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "MAX_QUEUED", 1)
    free, calls = threading.Event(), []

    class Slow(Recorder):
        def log(self, step, metrics):
            free.wait()

        def log_report(self, report):
            calls.append("report")

        def close(self):
            calls.append("closed")

    class Frees:
        def log(self, step, metrics):
            pass

        def close(self):
            free.set()

    await train(tmp_path, Slow(), Frees(), steps=4)
    assert calls == ["report", "closed"]


async def test_trackers_are_closed_if_the_report_or_another_tracker_fails(tmp_path, monkeypatch):
    def full(run):
        raise OSError("no space left")

    tracker = Recorder()
    monkeypatch.setattr("art_core.loop.training.write_report", full)
    with pytest.raises(OSError, match="no space"):
        await train(tmp_path, tracker)
    assert tracker.calls[-1] == ("close",)

    def refuses(run_dir, config):
        raise ConfigError("not today")

    other = Recorder()
    with pytest.raises(ConfigError, match="not today"):
        trackers.Trackers({"other": lambda *_: other, "refuses": refuses}, tmp_path, TrainConfig(), print)
    assert other.calls == [("close",)]


async def test_a_tracker_that_exits_is_named_and_an_object_that_is_no_tracker_is_refused(tmp_path):
    class Wordless(Exception):
        def __str__(self):
            return None

    class Exits(Recorder):
        def log(self, step, metrics):
            raise SystemExit(3)

        def log_report(self, report):
            raise Wordless

    tracker, screen = Exits(), Lines()
    await train(tmp_path, tracker, progress=screen)
    assert tracker.calls[-1] == ("close",) and any("Exits 1 failed in log: SystemExit" in line for line in screen.lines)
    with pytest.raises(ConfigError, match="isn't a tracker"):
        await train(tmp_path, object(), run_dir=tmp_path / "other")


async def test_a_tracker_whose_check_fails_is_refused_before_anything_runs(tmp_path):
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


async def test_a_tracker_has_defaults_for_what_it_lacks_whether_it_inherits_them_or_not(tmp_path):
    class Inherits(Tracker):
        def log_report(self, report):
            steps.append(report["steps"])

    class Own:
        def log(self, step, metrics):
            steps.append(step)

        def close(self):
            pass

    steps, screen = [], Lines()
    await train(tmp_path, Inherits(), Own(), steps=1, progress=screen)
    assert steps == [1, 1] and not [line for line in screen.lines if "tracker" in line]
