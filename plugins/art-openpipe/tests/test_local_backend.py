"""Training: what is trained are the recorded calls of the choices, and nothing is ignored in silence."""

import asyncio
import json

import openai
import pytest

import art_openpipe as art
from art_core import hookimpl
from art_core.errors import CaptureError, ConfigError, RewardError
from art_core.testing import FakeEngine
from art_openpipe.local import LocalBackend
from art_openpipe.trajectories import LegacyHistory

LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALL = {"tool_calls": [{"id": "t1", "type": "function", "function": {"name": "look", "arguments": "{}"}}]}


async def test_a_model_that_is_registered_says_that_its_engine_is_being_started(make_desk, capsys):
    await make_desk(name="agent-001")
    assert "agent-001: starting the engine" in capsys.readouterr().err


async def test_train_takes_a_step_that_is_served_and_logs_nothing_by_itself(desk):
    groups = [await desk.group(0.0, 1.0, 0.5)]
    assert await desk.model.get_step() == 0
    result = await desk.backend.train(desk.model, groups, learning_rate=1e-5)
    assert isinstance(result, art.LocalTrainResult)
    assert (result.step, result.metrics["train/reward"]) == (1, 0.5)
    assert result.metrics["data/step_num_trajectories"] == 3
    assert result.checkpoint_path.endswith("step-000001")
    assert await desk.model.get_step() == desk.engine.version == desk.learner.version == 1
    assert desk.learner.learning_rate == 1e-5
    history = desk.backend.folder(desk.model) / "history.jsonl"
    assert not history.exists()
    await desk.model.log(groups, metrics=result.metrics, step=result.step, split="train")
    [line] = [json.loads(line) for line in history.read_text().splitlines()]
    assert (line["step"], line["train/reward"]) == (1, 0.5) and line["data/step_num_trajectories"] == 3
    assert desk.run.store.trajectories(split="eval") == ()
    later = await desk.ask("hello")
    await desk.model.log([later])
    assert (later.initial_policy_version, later.final_policy_version) == (1, 1)


async def test_what_is_trained_is_what_was_sampled_token_for_token(make_desk):
    desk = await make_desk([CALL, "There is rain."])

    async def rollout():
        trajectory = await desk.ask("weather?", tools=[LOOK])
        trajectory.messages_and_choices.append({"role": "tool", "tool_call_id": "t1", "content": "rain"})
        completion = await desk.model.openai_client().chat.completions.create(
            model="m", messages=trajectory.messages(), tools=[LOOK], temperature=0.7
        )
        trajectory.messages_and_choices.append(completion.choices[0])
        return trajectory

    one, two = await rollout(), await rollout()
    one.reward = 1.0
    await desk.backend.train(desk.model, [art.TrajectoryGroup([one, two])])
    for first, second in desk.trained():
        # The tool call stands once in what the model was shown, and so once in what is trained.
        assert bytes(second.prompt_ids).count(b'[["look", {}]]') == 1
        assert second.prompt_ids[: len(first.prompt_ids + first.sampled_ids)] == first.prompt_ids + first.sampled_ids
        assert first.logprobs == (-0.5,) * len(first.sampled_ids)
        assert (first.temperature, second.temperature) == (1.0, 0.7)
    [[tree]] = desk.learner.trees
    assert tree.num_targets == sum(len(call.sampled_ids) for calls in desk.trained() for call in calls)


async def test_each_of_several_choices_is_a_call_of_its_own(make_desk):
    desk = await make_desk(["a", "bb", "ccc"])
    asked = [{"role": "user", "content": "hello"}]
    completion = await desk.model.openai_client().chat.completions.create(model="m", messages=asked, n=3)
    runs = [art.Trajectory(messages_and_choices=[*asked, it], reward=it.index) for it in completion.choices]
    await desk.backend.train(desk.model, [art.TrajectoryGroup(runs)])
    assert [[bytes(call.sampled_ids) for call in calls] for calls in desk.trained()] == [
        [b"a</>"],
        [b"bb</>"],
        [b"ccc</>"],
    ]


async def test_streamed_choices_and_those_of_other_clients_are_found_too(desk):
    asked = [{"role": "user", "content": "hello"}]
    async with desk.model.openai_client().chat.completions.stream(model="m", messages=asked) as stream:
        streamed = (await stream.get_final_completion()).choices[0]
    with openai.OpenAI(base_url=desk.model.inference_base_url, api_key=desk.model.inference_api_key) as client:
        blocking = client.chat.completions.create(model="m", messages=asked).choices[0]
    runs = [art.Trajectory(messages_and_choices=[*asked, it], reward=n) for n, it in enumerate((streamed, blocking))]
    # They may be kept as JSON meanwhile.
    runs = [art.Trajectory.model_validate_json(it.model_dump_json()) for it in runs]
    await desk.backend.train(desk.model, [art.TrajectoryGroup(runs)])
    assert [len(calls) for calls in desk.trained()] == [1, 1]


async def test_additional_histories_are_trained_as_part_of_their_run(desk):
    runs = [await desk.ask("main"), await desk.ask("main")]
    for run in runs:
        sub = await desk.ask("sub-agent")
        run.additional_histories.append(
            LegacyHistory(messages_and_choices=[*sub.messages_and_choices, run.messages_and_choices[1]])
        )
    runs[0].reward = 1.0
    await desk.backend.train(desk.model, [art.TrajectoryGroup(runs)])
    assert [[call.request["messages"][0]["content"] for call in calls] for calls in desk.trained()] == [
        ["main", "sub-agent"]
    ] * 2


async def test_one_choice_may_stand_in_two_trajectories(desk):
    run = await desk.ask("hello")
    other = run.model_copy(deep=True)
    other.reward = 1.0
    await desk.backend.train(desk.model, [art.TrajectoryGroup([run, other])])
    assert [len(calls) for calls in desk.trained()] == [1, 1]


async def test_a_choice_that_this_model_did_not_answer_is_an_error_that_says_why(make_desk):
    desk = await make_desk()
    other = await make_desk(name="other")
    by_hand = await desk.ask("hello")
    del by_hand.messages_and_choices[1].art_call
    with pytest.raises(CaptureError, match=r"built by hand.*never guessed"):
        await desk.backend.train(desk.model, [art.TrajectoryGroup([by_hand, await desk.ask("x")])])
    with pytest.raises(CaptureError, match="not in the record of this model"):
        await desk.backend.train(desk.model, [await other.group(0.0, 1.0)])
    texts = art.Trajectory(messages_and_choices=[*by_hand.messages()])
    with pytest.raises(ConfigError, match=r"no trajectory has an exchange"):
        await desk.backend.train(desk.model, [art.TrajectoryGroup([texts])])
    with pytest.raises(ConfigError, match=r"into an art\.TrajectoryGroup"):
        await desk.backend.train(desk.model, [by_hand])
    assert await desk.model.get_step() == 0


async def test_a_rollout_that_failed_is_recorded_with_its_error_and_moves_nobody(desk):
    async def failing():
        await desk.ask("hello")
        raise ValueError("broken")

    async def fine(reward):
        trajectory = await desk.ask("hello")
        trajectory.reward = reward
        return trajectory

    rollouts = [failing(), fine(0.0), fine(1.0)]
    [group] = await art.gather_trajectory_groups([art.TrajectoryGroup(rollouts)], max_exceptions=1, pbar_desc=None)
    result = await desk.backend.train(desk.model, [group])
    stored = desk.run.store.trajectories(split="train", step=1)
    assert [(it.reward, it.error, len(it.calls)) for it in stored] == [
        (0.0, None, 1),
        (1.0, None, 1),
        (None, "ValueError: broken", 0),
    ]
    assert result.metrics["train/exception_rate"] == pytest.approx(1 / 3)
    [[tree]] = desk.learner.trees
    assert sorted(set(tree.advantages.tolist())) == pytest.approx([-0.707, 0.707], abs=1e-3)


async def test_groups_without_contrast_count_as_a_step_and_train_nothing(desk):
    result = await desk.backend.train(desk.model, [await desk.group(1.0, 1.0)])
    assert (result.step, desk.learner.version, result.metrics["data/step_num_groups_trainable"]) == (1, 0, 0.0)


async def test_a_step_that_fails_leaves_the_model_serving(desk):
    def failing(trees, *, loss=None):
        raise ArithmeticError("broken")

    group = await desk.group(0.0, 1.0)
    desk.learner.step, step = failing, desk.learner.step
    with pytest.raises(ArithmeticError, match="broken"):
        await desk.backend.train(desk.model, [group])
    assert (await desk.ask("hello")).choices()[0].message.content == "ok"
    desk.learner.step = step
    assert (await desk.backend.train(desk.model, [group])).step == 1


async def test_a_copy_of_a_model_asks_like_the_model_and_after_its_client_was_closed(desk):
    copy = desk.model.model_copy(deep=True)
    assert copy.openai_client() is desk.model.openai_client() and await copy.get_step() == 0
    await copy.aclose()
    assert (await desk.ask("hello")).choices()[0].message.content == "ok"


async def test_a_model_whose_backend_was_closed_says_that_training_has_to_stop(desk):
    await desk.backend.close()
    with pytest.raises(art.LocalServingUnavailableError, match="register the model again"):
        await desk.ask("hello")


async def test_a_reward_that_is_no_number_is_refused(desk):
    group = await desk.group(0.0, 1.0)
    group.trajectories[0].reward = float("nan")
    with pytest.raises(RewardError, match="finite"):
        await desk.backend.train(desk.model, [group])


async def test_what_was_logged_is_a_mean_in_the_history_and_never_training_data(desk):
    group = await desk.group(0.0, 1.0)
    group.trajectories[0].metrics["win"] = 1
    await desk.model.log([group])
    await desk.model.log(await desk.group(0.5), split="test")
    await desk.model.log(metrics={"mine": 3.0, "loss/mine": 4.0})
    lines = [json.loads(line) for line in (desk.backend.folder(desk.model) / "history.jsonl").read_text().splitlines()]
    assert (lines[0]["val/reward"], lines[0]["val/win"], lines[1]["test/reward"], lines[2]["val/mine"]) == (
        0.5,
        1,
        0.5,
        3,
    )
    assert lines[2]["loss/mine"] == 4.0
    assert desk.run.store.trajectories(split="train") == ()
    assert len(desk.run.store.trajectories(split="eval")) == 3


async def test_trackers_are_told_of_steps_groups_and_checkpoints(make_desk):
    class Told(list):
        def log(self, step, metrics):
            self.append(("log", step, metrics["reward"]))

        def log_groups(self, step, groups, split):
            self.append((split, step, [it.reward for group in groups for it in group.trajectories]))

        def log_checkpoint(self, step, folder):
            self.append(("checkpoint", step, folder.name))

        def close(self):
            self.append("closed")

    told = Told()
    desk = await make_desk(trackers=[told])
    await desk.backend.train(desk.model, [await desk.group(0.0, 1.0)])
    await desk.model.log([await desk.group(0.5)])
    await desk.backend.close()
    assert told == [
        ("log", 1, 0.5),
        ("train", 1, [0.0, 1.0]),
        ("checkpoint", 1, "step-000001"),
        ("eval", 1, [0.5]),
        "closed",
    ]
    assert json.loads((desk.backend.folder(desk.model) / "metrics.jsonl").read_text())["step"] == 1


async def test_a_tracker_object_is_told_of_one_model_only_and_a_name_of_all(make_desk, monkeypatch):
    class Tracker:
        def log(self, step, metrics): ...

        def close(self): ...

    @hookimpl
    def register_trackers(register):
        register("mine", lambda run_dir, config: Tracker())

    monkeypatch.setattr(art, "register_trackers", register_trackers, raising=False)

    desk = await make_desk(trackers=[Tracker()])
    await desk.model.register(desk.backend)
    other = art.TrainableModel(name="other", run_name="other", project="p", base_model="tiny")
    with pytest.raises(ConfigError, match="by name, or use a separate LocalBackend for each model"):
        await other.register(desk.backend)
    async with LocalBackend(path=desk.backend._path, trackers=["mine"], engine=FakeEngine()) as backend:
        third = art.TrainableModel(name="third", run_name="third", project="p", base_model="tiny")
        await other.register(backend)
        await third.register(backend)


async def test_one_model_may_be_registered_several_times_at_once(tmp_path):
    model, again = (art.TrainableModel(name="m", run_name="m", project="p", base_model="tiny") for _ in range(2))
    async with LocalBackend(path=str(tmp_path), engine=FakeEngine()) as backend:
        await asyncio.gather(model.register(backend), again.register(backend), model.register(backend))
        assert model.inference_base_url == again.inference_base_url


async def test_a_run_goes_on_where_it_stopped_and_its_earlier_choices_are_still_known(make_desk):
    desk = await make_desk()
    group = await desk.group(0.0, 1.0)
    await desk.backend.train(desk.model, [group])
    desk.model.merge_state({"seen": 3})
    await desk.backend.close()
    again = await make_desk()
    assert await again.model.get_step() == 1
    assert again.model.merge_state({"more": {"a": 1}}) == {"seen": 3, "more": {"a": 1}} == again.model.read_state()
    assert again.model.merge_state({"more": {"b": 2}})["more"] == {"a": 1, "b": 2}
    await again.backend.train(again.model, [group])
    assert await again.model.get_step() == 2


async def test_only_the_newest_and_the_best_checkpoint_are_left(desk):
    for reward in (0.1, 0.9, 0.5, 0.2):
        await desk.backend.train(desk.model, [await desk.group(0.0, 1.0)])
        await desk.model.log(await desk.group(reward))
    await desk.model.delete_checkpoints()
    folders = sorted(it.name for it in (desk.run.run_dir / "checkpoints").iterdir())
    assert folders == ["step-000002", "step-000004"]


async def test_the_configuration_of_engine_and_adapter_is_mapped_or_refused(tmp_path):
    config = art.dev.InternalModelConfig(
        init_args=art.dev.InitArgs(max_seq_length=8192),
        engine_args=art.dev.EngineArgs(enforce_eager=True, gpu_memory_utilization=0.8),
    )
    assert art.dev.settings_of(config, art.LoRAConfig(rank=16)) == {
        "max_context": 8192,
        "engine_args": {"enforce-eager": True, "gpu-memory-utilization": 0.8},
        "lora_rank": 16,
    }
    for lora, internal in (
        ({"dropout": 0.1}, {}),
        ({}, {"init_args": {"fast_inference": True}}),
        ({}, {"trainer_gpu_ids": [0]}),
    ):
        with pytest.raises(ConfigError, match=r"dropout|fast_inference|trainer_gpu_ids"):
            art.dev.settings_of(internal, lora)


@pytest.mark.parametrize("settings", [{"engine_args": {"enforce-eager": True}}, {}])
async def test_options_of_vllm_are_ignored_without_it_if_they_are_the_models(settings, tmp_path, caplog):
    model = art.TrainableModel(name="m", run_name="m", project="p", base_model="tiny")
    model._internal_config = art.dev.InternalModelConfig(engine_args=art.dev.EngineArgs(gpu_memory_utilization=0.7))
    backend = LocalBackend(in_process=True, path=str(tmp_path), **settings)
    if settings:
        with pytest.raises(ConfigError, match=r"engine_args.*vLLM's"):
            await model.register(backend)
    else:
        assert "engine_args" not in backend._settings_of(model, "tiny") and "gpu-memory-utilization" in caplog.text


async def test_a_run_is_in_the_folder_of_its_name_and_answers_by_the_models(tmp_path):
    model = art.TrainableModel(name="served", run_name="run-7", project="p", base_model="tiny")
    async with LocalBackend(path=str(tmp_path), engine=FakeEngine()) as backend:
        await model.register(backend)
        assert (tmp_path / "p/models/run-7/run.sqlite").is_file() and model.get_inference_name() == "served"


async def test_the_model_that_a_script_names_is_replaced_by_art_model(monkeypatch, tmp_path):
    monkeypatch.setenv("ART_MODEL", "tiny")
    monkeypatch.setenv("ART_PATH", str(tmp_path / "elsewhere"))
    model = art.TrainableModel(name="m", run_name="m", project="p", base_model="Qwen/Qwen2.5-7B-Instruct")
    async with LocalBackend(engine=FakeEngine()) as backend:
        await model.register(backend)
        assert (tmp_path / "elsewhere/p/models/m/run.sqlite").is_file()
        assert backend.opened(model).run.config.model == "tiny"


def test_a_backend_goes_on_in_another_event_loop_and_nothing_needs_to_be_closed(tmp_path):
    backend = LocalBackend(path=str(tmp_path), engine=FakeEngine())
    model = art.TrainableModel(name="m", run_name="m", project="p", base_model="tiny")

    async def main():
        await model.register(backend)
        again = art.TrainableModel(name="m", run_name="m", project="p", base_model="tiny")
        await again.register(backend)
        assert again.inference_base_url == model.inference_base_url
        asked = [{"role": "user", "content": "hello"}]
        return await model.openai_client().chat.completions.create(model="m", messages=asked)

    answers = [asyncio.run(main()) for _ in range(2)]
    assert [it.choices[0].message.content for it in answers] == ["ok", "ok"]
    with pytest.raises(ConfigError, match="not registered"):
        backend.opened(model)


async def test_a_model_that_is_only_prompted_is_logged_and_never_trained(desk):
    model = art.Model(name="gpt", project="p", inference_base_url="http://127.0.0.1:9/v1", inference_api_key="k")
    await model.register(desk.backend)
    await model.log([art.Trajectory(reward=0.5)])
    assert '"val/reward": 0.5' in (desk.backend.folder(model) / "history.jsonl").read_text()
    assert str(model.openai_client().base_url) == "http://127.0.0.1:9/v1/"
    assert model.litellm_completion_params()["model"] == "gpt" and await model.get_step() == 0
    with pytest.raises(ConfigError, match="no address"):
        art.Model(name="gpt", project="p").openai_client()
    assert "inference_api_key" not in model.safe_model_dump()


async def test_older_checkpoints_are_not_served_and_that_is_said(desk):
    assert desk.model.get_inference_name(step=0) == desk.model.get_inference_name() == "m"
    with pytest.raises(ConfigError, match="newest weights only"):
        desk.model.get_inference_name(step=3)
