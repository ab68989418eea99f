"""The audit: a real run is clean, and whatever is changed in its folder afterwards is found and named."""

import asyncio
import hashlib
import itertools
import json
import shutil
import sqlite3
import time
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

import art_audit
import art_core as art
from art_cli.main import command
from art_core.errors import ConfigError
from art_core.store import Store
from art_core.store.digest import call_digest, chain_digest
from art_core.testing import CountingLearner, FakeEngine, ScriptedAgent
from art_core.types import Call

AGENT = ScriptedAgent(turns=2, max_tokens=10)


_scored = itertools.count()


def contrast(trajectory):
    return float(next(_scored) % 2)


async def record(run_dir, **settings):
    """Three steps, the second without contrast, and an evaluation: weights of the versions 0, 1 and 2."""
    async with art.open_run(run_dir, model="tiny", learning_rate=2e-3, warmup_steps=0, **settings) as run:
        for reward in (contrast, lambda t: 1.0, contrast):
            await run.learn(await run.score(await run.collect(AGENT, ["one", "two"], group_size=4), reward))
        await run.collect(AGENT, ["three"], group_size=2, split="eval")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    asyncio.run(record(run_dir, keep_checkpoints=None))
    return run_dir


@pytest.fixture
def run_dir(recorded, tmp_path):
    """A copy of the run to tamper with."""
    return shutil.copytree(recorded, tmp_path / "run")


def change(run_dir, *statements):
    with sqlite3.connect(run_dir / "run.sqlite") as db:
        for statement in statements:
            assert db.execute(statement).rowcount == 1, statement
    db.close()


def refresh(run_dir):
    """Write all digests anew, as somebody would who knows them."""
    new = {}
    with Store(run_dir / "run.sqlite") as store, sqlite3.connect(store.path) as db:
        for rollout_id, _, _ in store.callers():
            previous = None
            for row in store.recorded(rollout_id):
                previous = chain_digest(rollout_id, previous, call_digest(row.call))
                db.execute("UPDATE calls SET digest = ? WHERE seq = ?", (previous, row.seq))
                new.setdefault(rollout_id, []).append(call_digest(row.call).hex())
        for seq, trained in db.execute("SELECT seq, trained FROM updates").fetchall():
            known = [[rollout_id, "".join(new[rollout_id])] for rollout_id, _ in json.loads(trained)]
            db.execute("UPDATE updates SET trained = ? WHERE seq = ?", (json.dumps(known).encode(), seq))
    db.close()


def audit(run_dir, **options):
    return art_audit.audit(run_dir, progress=False, **options)


def kinds(report):
    return {problem.kind for problem in report.problems}


LAST = "(SELECT max(seq) FROM calls)"
"""A later turn of the evaluation: it has a parent and was never trained."""
SECOND_TURN = "(SELECT min(seq) FROM calls WHERE parent IS NOT NULL AND finish_reason != 'aborted')"


def blob(*ids):
    return f"X'{np.array(ids, np.int32).tobytes().hex()}'"


@pytest.mark.system
def test_a_real_run_is_clean_and_every_call_is_checked(recorded):
    report = audit(recorded)
    assert report.clean, report.problems
    assert report.checked == report.calls == 2 * (3 * 8 + 2) and report.not_kept == 0
    assert report.mismatch_max < 1e-4 and report.mismatch_mean <= report.mismatch_max
    assert 0 <= report.kl_k3 < 1e-6 and abs(report.kl_k1) < 1e-4
    assert report.updates == 2, "the step without contrast took none"
    with Store(recorded / "run.sqlite") as store:
        trained = [metrics["targets"] for _, metrics in store.steps() if "targets" in metrics]
        versions = {call.policy_version for t in store.trajectories() for call in t.calls}
    assert report.trained_tokens == sum(trained) > 0
    assert versions == {0, 1, 2}


def test_calls_whose_weights_are_gone_are_counted(run_dir):
    shutil.rmtree(run_dir / "checkpoints" / "step-000001")
    shutil.rmtree(run_dir / "checkpoints" / "step-000002")
    report = audit(run_dir)
    assert report.clean
    assert (report.checked, report.not_kept) == (16 + 4, 32), "those of version 1 cannot be asked any more"


def test_a_sample_of_each_version_can_be_drawn(recorded):
    report = audit(recorded, sample=3)
    assert report.clean and (report.checked, report.not_drawn) == (9, report.calls - 9)


@pytest.mark.parametrize(
    ("statement", "kind"),
    [
        (
            f"UPDATE calls SET sampled = CAST({blob(5)} || substr(sampled, 5) AS BLOB) WHERE seq = {SECOND_TURN}",
            "digest",
        ),
        (
            f"UPDATE calls SET logprobs = CAST(X'0000803f' || substr(logprobs, 5) AS BLOB) WHERE seq = {SECOND_TURN}",
            "digest",
        ),
        (f"UPDATE calls SET suffix = CAST({blob(5)} || substr(suffix, 5) AS BLOB) WHERE seq = {SECOND_TURN}", "digest"),
        (f"UPDATE calls SET policy_version = 1 WHERE seq = {SECOND_TURN}", "digest"),
        (f"UPDATE calls SET finish_reason = 'aborted' WHERE seq = {SECOND_TURN}", "digest"),
        (f"UPDATE calls SET forced = {blob(0)} WHERE seq = {SECOND_TURN}", "digest"),
        (f"UPDATE calls SET temperature = 0.5 WHERE seq = {SECOND_TURN}", "digest"),
        (f"UPDATE calls SET parent = NULL WHERE seq = {SECOND_TURN}", "digest"),
        (f"UPDATE calls SET shared = shared - 1 WHERE seq = {SECOND_TURN}", "digest"),
        (f"UPDATE calls SET parent = parent - 1, shared = 9 WHERE seq = {LAST}", "digest"),
        (f"UPDATE calls SET shared = 100000 WHERE seq = {SECOND_TURN}", "file"),
        (f"UPDATE calls SET parent = seq WHERE seq = {SECOND_TURN}", "file"),
        (f"UPDATE calls SET parent = 100000 WHERE seq = {SECOND_TURN}", "file"),
        (f"UPDATE calls SET logprobs = X'00' WHERE seq = {SECOND_TURN}", "file"),
        (f"UPDATE calls SET forced = {blob(99)} WHERE seq = {SECOND_TURN}", "file"),
        (f"UPDATE calls SET suffix = 'text' WHERE seq = {SECOND_TURN}", "file"),
        (f"UPDATE calls SET sampled = 'text' WHERE seq = {SECOND_TURN}", "file"),
        (f"UPDATE calls SET rollout_id = 'other' WHERE seq = {SECOND_TURN}", "file"),
        (f"UPDATE calls SET replaced = 1 WHERE seq = {LAST}", "missing"),
        (f"DELETE FROM calls WHERE seq = {LAST}", "missing"),
        (f"DELETE FROM calls WHERE seq = {SECOND_TURN}", "missing"),
        ("DELETE FROM updates WHERE step = 1", "trained"),
        ("DELETE FROM updates WHERE step = 3", "trained"),
        ("UPDATE updates SET targets = targets - 1 WHERE step = 3", "trained"),
        ("UPDATE updates SET trained = CAST('[' AS BLOB) WHERE step = 1", "file"),
        ('UPDATE updates SET trained = CAST(\'[["r", "0g"]]\' AS BLOB) WHERE step = 3', "file"),
        ("UPDATE updates SET version = 'one' WHERE step = 1", "file"),
        ("UPDATE updates SET version = 7 WHERE step = 1", "trained"),
        ("UPDATE updates SET step = 7 WHERE step = 1", "trained"),
        (
            "INSERT INTO updates (step, version, targets, trained) "
            "SELECT step, version, targets, trained FROM updates WHERE step = 3",
            "trained",
        ),
    ],
)
def test_what_was_changed_in_the_store_is_found(run_dir, statement, kind):
    change(run_dir, statement)
    assert kind in kinds(audit(run_dir, sample=1))


def test_steps_that_a_resumed_run_repeated_are_no_problem(run_dir):
    change(
        run_dir,
        f"INSERT INTO openings (version, at) VALUES (0, {time.time()})",
        "INSERT INTO updates (step, version, targets, trained) "
        "SELECT 2, 1, targets, trained FROM updates WHERE step = 1",
    )
    assert audit(run_dir, sample=1).clean


def test_a_changed_call_is_named_and_its_unchanged_neighbours_are_not(run_dir):
    change(run_dir, f"UPDATE calls SET logprobs = CAST(X'0000803f' || substr(logprobs, 5) AS BLOB) WHERE seq = {LAST}")
    with Store(run_dir / "run.sqlite") as store:
        last = max((store.recorded(rollout_id)[-1].seq, rollout_id) for rollout_id, _, _ in store.callers())[1]
    report = audit(run_dir)
    assert {(problem.kind, problem.rollout_id, problem.call) for problem in report.problems} == {
        ("digest", last, 1),
        ("logprob", last, 1),
    }
    replayed = next(problem for problem in report.problems if problem.kind == "logprob")
    assert replayed.position == 0 and "position 0" in str(replayed)


@pytest.mark.system
@pytest.mark.parametrize(
    "statement",
    [
        f"UPDATE calls SET suffix = CAST({blob(5)} || substr(suffix, 5) AS BLOB) WHERE seq = {LAST}",
        f"UPDATE calls SET sampled = CAST({blob(5)} || substr(sampled, 5) AS BLOB) WHERE seq = {LAST}",
        f"UPDATE calls SET logprobs = CAST(X'0000803f' || substr(logprobs, 5) AS BLOB) WHERE seq = {LAST}",
        f"UPDATE calls SET logprobs = CAST(X'0000c07f' || substr(logprobs, 5) AS BLOB) WHERE seq = {LAST}",  # NaN
        f"UPDATE calls SET policy_version = 0 WHERE seq = {LAST}",
        f"UPDATE calls SET temperature = 0.5 WHERE seq = {LAST}",
        f"UPDATE calls SET shared = shared - 1, suffix = CAST({blob(5)} || suffix AS BLOB) WHERE seq = {LAST}",
    ],
)
def test_a_change_with_new_digests_is_found_by_its_logprobs(run_dir, statement):
    change(run_dir, statement)
    refresh(run_dir)
    assert kinds(audit(run_dir)) == {"logprob"}


def test_a_token_that_the_model_does_not_have_is_found(run_dir):
    change(run_dir, f"UPDATE calls SET sampled = CAST({blob(10**6)} || substr(sampled, 5) AS BLOB) WHERE seq = {LAST}")
    refresh(run_dir)
    report = audit(run_dir)
    assert kinds(report) == {"context"} and report.checked == report.calls


def test_trained_tokens_that_are_hidden_with_new_digests_are_missed_in_the_count(run_dir):
    change(run_dir, f"UPDATE calls SET forced = {blob(0, 1, 2)} WHERE seq = {SECOND_TURN}")
    refresh(run_dir)
    assert kinds(audit(run_dir, sample=1)) == {"trained"}


@pytest.mark.system
def test_a_step_that_trained_something_else_than_was_sampled_is_found(tmp_path):
    async def go():
        async with art.open_run(tmp_path / "run", model="tiny") as run:
            groups = await run.score(await run.collect(AGENT, ["one"], group_size=4), contrast)
            first, *rest = groups[0].trajectories
            call = first.calls[0]
            doctored = Call(call.prompt_ids, (*call.sampled_ids[:-1], 7), call.logprobs)
            first = art.Trajectory("one", (doctored,), reward=first.reward, rollout_id=first.rollout_id)
            await run.learn([art.Group("one", (first, *rest))])

    asyncio.run(go())
    [problem] = audit(tmp_path / "run").problems
    assert problem.kind == "trained" and "trained 1 of its calls that are missing" in problem.text


def test_weights_made_by_a_loop_that_was_killed_are_not_asked_about_its_calls(run_dir):
    # As if the run had been opened again from version 0, and had made the versions 1 and 2 anew.
    change(run_dir, f"INSERT INTO openings (version, at) VALUES (0, {time.time()})")
    report = audit(run_dir)
    assert report.clean and (report.checked, report.not_kept) == (16, 36)


def test_answers_that_a_continued_rollout_replayed_are_those_of_the_weights_that_were_lost(run_dir):
    with Store(run_dir / "run.sqlite") as store:
        store.add_opening(0)
        before = store.trajectories(split="eval")[0].rollout_id
        for again in ("second", "third"):  # each was interrupted before it ended
            store.add_rollout(again, task="three", split="eval", continues=before)
            for call in store.calls(before):
                store.record(again, replace(call, request_id=f"{again} {call.request_id}"))
            before = again
    report = audit(run_dir)
    assert report.clean and (report.checked, report.not_kept) == (16, 36 + 2 * 2)


@pytest.mark.system
def test_adapters_that_are_only_on_a_server_count_as_weights_that_are_gone(tmp_path):
    asyncio.run(record(tmp_path / "run", keep_checkpoints=None, lora_rank=4))
    for folder in (tmp_path / "run" / "checkpoints").iterdir():
        shutil.rmtree(folder / "adapter")
        manifest = json.loads((folder / "learner.json").read_text())
        files = {name: it for name, it in manifest["files"].items() if not name.startswith("adapter")}
        (folder / "learner.json").write_text(json.dumps({**manifest, "files": files}))
    report = audit(tmp_path / "run")
    assert report.clean and (report.checked, report.not_kept) == (16, 36)


def test_a_store_without_a_model_is_not_compared_with_the_working_directory(run_dir, monkeypatch):
    monkeypatch.chdir(max((run_dir / "checkpoints").iterdir()))
    change(run_dir, "DELETE FROM meta WHERE key = 'model'")
    report = audit(run_dir)
    assert report.clean and report.not_kept == 16, report.problems


def test_damaged_weights_and_changed_start_weights_are_named(run_dir):
    damaged = run_dir / "checkpoints" / "step-000001" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-4] + b"aaaa")
    (run_dir / "checkpoints" / "step-000003" / "learner.json").write_text("{}")
    change(run_dir, "UPDATE meta SET value = CAST('\"other\"' AS BLOB) WHERE key = 'start_weights'")
    shutil.rmtree(run_dir / "checkpoints" / "step-000002")
    report = audit(run_dir)
    said = " ".join(problem.text for problem in report.problems)
    assert kinds(report) == {"weights"} and (report.checked, report.not_kept) == (0, report.calls)
    for part in ("step-000001/model.safetensors is not what was saved", "step-000003/learner.json", "start weights"):
        assert part in said


def test_a_newest_checkpoint_that_is_damaged_is_named_though_no_call_was_sampled_from_it(run_dir):
    newest = max((run_dir / "checkpoints").iterdir())
    (newest / "optimizer.state").write_bytes(b"half")
    [problem] = audit(run_dir, sample=1).problems
    assert problem.kind == "weights" and f"{newest.name}/optimizer.state is not what was saved" in problem.text


@pytest.mark.system
def test_a_lora_run_is_checked_with_its_adapters(tmp_path):
    asyncio.run(record(tmp_path / "run", keep_checkpoints=1, lora_rank=4))
    report = audit(tmp_path / "run")
    assert report.clean, report.problems
    assert (report.checked, report.not_kept) == (16 + 4, 32), "the start weights are always there"
    assert report.mismatch_max < 1e-3


@pytest.mark.system
@pytest.mark.parametrize("damage", ["another rank", "cut short"])
def test_an_adapter_that_cannot_be_loaded_is_a_problem_also_where_its_hash_was_renewed(tmp_path, damage):
    asyncio.run(record(tmp_path / "run", keep_checkpoints=1, lora_rank=4))
    [folder] = (tmp_path / "run" / "checkpoints").iterdir()
    if damage == "cut short":
        file = folder / "adapter" / "adapter_model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
    else:
        file = folder / "adapter" / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "r": 2}))
    manifest = json.loads((folder / "learner.json").read_text())
    manifest["files"][str(file.relative_to(folder))] = hashlib.sha256(file.read_bytes()).hexdigest()
    (folder / "learner.json").write_text(json.dumps(manifest))
    report = audit(tmp_path / "run")
    assert kinds(report) == {"weights"} and report.not_kept == 32 + 4
    assert "cannot be loaded" in report.problems[0].text and "adapter" in report.problems[0].text


async def test_trained_tokens_are_those_of_the_calls_that_were_not_dropped(tmp_path):
    class Engine(FakeEngine):
        def _choice(self, request, index):
            cut = len(self.requests) % 2
            return {**super()._choice(request, index), **({"finish_reason": "length"} if cut else {})}

    class Learner(CountingLearner):
        def step(self, trees, *, loss=None):
            return {**super().step(trees), "targets": float(sum(tree.weights.sum() for tree in trees))}

    async with art.open_run(tmp_path / "run", engine=Engine("four"), learner=Learner(), overlong="drop") as run:
        groups = await run.score(await run.collect(ScriptedAgent(), ["one"], group_size=4), contrast)
        metrics = await run.learn(groups)
    report = audit(tmp_path / "run")
    assert report.trained_tokens == metrics["targets"] == metrics["sampled_tokens"] / 2 > 0
    assert "trained" not in kinds(report)


@pytest.mark.system
async def test_metrics_of_a_reward_are_not_taken_for_what_was_trained(tmp_path):
    def measured(trajectory):
        trajectory.metrics["targets"] = 99.0
        return 1.0

    def teaching(trajectory):
        measured(trajectory)
        return contrast(trajectory)

    async with art.open_run(tmp_path / "run", model="tiny") as run:
        for reward in (measured, teaching):
            metrics = await run.learn(await run.score(await run.collect(AGENT, ["one"], group_size=4), reward))
            assert metrics["targets"] == 99
    report = audit(tmp_path / "run")
    assert report.clean, report.problems
    assert report.trained_tokens == metrics["learner/targets"]


def test_what_is_not_a_run_folder_or_holds_no_calls_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is not a run folder"):
        audit(tmp_path)
    assert not list(tmp_path.iterdir()), "nothing is made by looking"
    Store(tmp_path / "run.sqlite").close()
    with pytest.raises(ConfigError, match="has no calls"):
        audit(tmp_path)


@pytest.mark.parametrize(("off", "told"), [(0.05, True), (5.0, False)])
def test_how_to_allow_what_an_engine_in_16_bits_rounds_is_said_where_it_may_be_that(run_dir, off, told):
    with sqlite3.connect(run_dir / "run.sqlite") as db:
        [(stored,)] = db.execute(f"SELECT logprobs FROM calls WHERE seq = {LAST}")
        rounded = (np.frombuffer(stored, np.float32) - np.float32(off)).tobytes()
        db.execute(f"UPDATE calls SET logprobs = ? WHERE seq = {LAST}", (rounded,))
    db.close()
    refresh(run_dir)
    said = CliRunner().invoke(command(), ["audit", str(run_dir)]).stdout
    assert "NOT CLEAN" in said and ("--tolerance 0.5" in said) == told


@pytest.mark.parametrize(
    ("change_in", "arguments", "parts"),
    [
        (None, [], ["clean: every call's"]),
        (None, ["--sample", "1"], ["clean as far as could be checked\n"]),
        ("weights", [], ["clean as far", "keep_checkpoints=None and checkpoint_every=1"]),
        ("trained", [], ["clean as far", "trajectories came from elsewhere"]),
    ],
)
def test_the_verdict_claims_only_what_was_checked(run_dir, change_in, arguments, parts):
    if change_in == "weights":
        shutil.rmtree(max((run_dir / "checkpoints").iterdir()))
    elif change_in == "trained":
        change(run_dir, "UPDATE updates SET trained = CAST('[[null, \"\"]]' AS BLOB) WHERE step = 1")
    said = CliRunner().invoke(command(), ["audit", str(run_dir), *arguments], env={"COLUMNS": "300"}).stdout
    for part in parts:
        assert part in said


@pytest.mark.smoke
@pytest.mark.system
def test_the_command_says_it_by_its_exit_code(run_dir):
    nowhere = CliRunner().invoke(command(), ["audit", str(run_dir / "nowhere")], env={"COLUMNS": "300"})
    assert nowhere.exit_code == 2 and "is not a run folder" in nowhere.output
    clean = CliRunner().invoke(command(), ["audit", str(run_dir), "--json"])
    assert clean.exit_code == 0 and json.loads(clean.stdout.splitlines()[-1])["clean"]
    change(run_dir, f"UPDATE calls SET temperature = 0.5 WHERE seq = {LAST}")
    bad = CliRunner().invoke(command(), ["audit", str(run_dir), "--sample", "1"])
    assert bad.exit_code == 1 and "NOT CLEAN" in bad.stdout and "digest: rollout" in bad.stdout
