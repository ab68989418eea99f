"""What scripts use around their loops."""

import asyncio
import json
import weakref

import litellm
import pytest
from openai.types.chat.chat_completion import ChoiceLogprobs

import art_openpipe as art
from art_core.errors import ConfigError
from art_embedded.rendering import Renderer
from art_openpipe.utils import format_message, get_model_step, iterate_dataset, limit_concurrency, log_http_errors
from art_openpipe.utils.litellm import convert_litellm_choice_to_openai
from art_openpipe.utils.sft import create_lr_schedule, create_sft_dataset_iterator, iterate_file, train_sft_from_file
from art_openpipe.utils.strip_logprobs import strip_logprobs


def test_a_dataset_comes_in_batches_and_goes_on_after_the_first_steps():
    batches = list(iterate_dataset(range(5), groups_per_step=2, num_epochs=2, use_tqdm=False))
    assert [(it.step, it.epoch, it.epoch_step, len(it.items)) for it in batches] == [
        (0, 0, 0, 2),
        (1, 0, 1, 2),
        (2, 0, 2, 1),
        (3, 1, 0, 2),
        (4, 1, 1, 2),
        (5, 1, 2, 1),
    ]
    assert sorted(item for it in batches[:3] for item in it.items) == list(range(5))
    later = list(iterate_dataset(range(5), groups_per_step=2, num_epochs=2, initial_step=4))
    assert [it.items for it in later] == [it.items for it in batches[4:]]


async def test_what_fails_is_tried_again():
    tried = []

    @art.retry(max_attempts=3, delay=0, exceptions=(KeyError,), on_retry=lambda error, attempt: tried.append(attempt))
    async def flaky(error):
        if len(tried) < 2:
            raise error
        return "ok"

    assert await flaky(KeyError()) == "ok" and tried == [1, 2]
    tried.clear()
    with pytest.raises(ValueError, match="other"):
        await flaky(ValueError("other"))


async def test_at_most_so_many_run_at_a_time():
    inside, most = 0, 0

    @limit_concurrency(2)
    async def work():
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0)
        inside -= 1

    await asyncio.gather(*(work() for _ in range(8)))
    assert most == 2


async def test_of_each_key_so_many_run_and_keys_that_are_over_are_forgotten():
    class Key:
        """A key that can be watched."""

    running, seen, release = [], [], asyncio.Event()

    @limit_concurrency(1, derive_key=lambda key: key)
    async def work(key):
        running.append(key)
        seen.append(weakref.ref(key))
        await release.wait()
        running.remove(key)

    one, other = Key(), Key()
    tasks = [asyncio.ensure_future(work(key)) for key in (one, one, other)]
    while len(running) < 2:
        await asyncio.sleep(0)
    assert running == [one, other]
    release.set()
    await asyncio.gather(*tasks)
    tasks.clear()
    del one, other
    assert len(seen) == 3 and [it() for it in seen] == [None] * 3


async def test_errors_of_servers_are_logged_and_raised(caplog):
    class Answer:
        status_code, text = 418, "teapot"

    @log_http_errors
    async def ask():
        error = OSError("failed")
        error.response = Answer()
        raise error

    with pytest.raises(OSError, match="failed"):
        await ask()
    assert "418: teapot" in caplog.text


def test_messages_are_lines_for_people():
    call = {"function": {"name": "look", "arguments": "{}"}}
    assert format_message({"role": "assistant", "content": None, "tool_calls": [call]}) == "assistant:\nlook({})"


async def test_litellm_asks_the_model_and_its_choices_are_trained(desk):
    async def rollout(reward):
        asked = [{"role": "user", "content": "hello"}]
        answer = await litellm.acompletion(messages=asked, **desk.model.litellm_completion_params())
        choice = convert_litellm_choice_to_openai(answer.choices[0])
        return art.Trajectory(messages_and_choices=[*asked, choice], reward=reward)

    group = await art.TrajectoryGroup([rollout(0.0), rollout(1.0)])
    await desk.backend.train(desk.model, [group])
    assert [len(calls) for calls in desk.trained()] == [1, 1]
    assert get_model_step(desk.model, desk.backend._path) == 1


async def test_conversations_without_choices_are_imitated_to_the_end_of_their_turn(desk, tmp_path):
    good = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there"}]
    file = tmp_path / "good.jsonl"
    file.write_text("".join(json.dumps({"messages": good}) + "\n" for _ in range(3)))
    await train_sft_from_file(desk.model, file, epochs=1, batch_size=2, peak_lr=3e-4, schedule_type="constant")
    assert await desk.model.get_step() == 2
    assert [it.name for it in (desk.run.run_dir / "checkpoints").iterdir()] == ["step-000002"]
    history = json.loads((desk.backend.folder(desk.model) / "history.jsonl").read_text().splitlines()[-1])
    assert history["loss/learning_rate"] == pytest.approx(3e-4) and "time/step_backend_train_s" in history
    [tree] = desk.learner.trees[-1]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(desk.run.model_folder)
    assert tokenizer.decode(tree.tokens[tree.target_tokens]) == "Hello there" + tokenizer.eos_token
    assert tokenizer.decode(tree.tokens) == tokenizer.apply_chat_template(good, tokenize=False).rstrip()


async def test_tool_calls_are_imitated_as_the_engine_shows_them(desk):
    look = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    function = {"name": "look", "arguments": '{"where": "desk"}'}
    messages = [
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "t1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "t1", "content": "a key"},
        {"role": "assistant", "content": "There."},
    ]
    await desk.model.train_sft([art.Trajectory(messages_and_choices=messages, tools=[look])], art.TrainSFTConfig())
    [tree] = desk.learner.trees[-1]
    renderer = Renderer(desk.run.model_folder)
    calls = (
        renderer.call(messages[:1], messages[1], tools=[look]),
        renderer.call(messages[:3], messages[3], tools=[look]),
    )
    assert tree.tokens.tolist() == [*calls[1].prompt_ids, *calls[1].sampled_ids]
    assert tree.num_targets == sum(len(call.sampled_ids) for call in calls)


async def test_conversations_that_the_template_cannot_say_are_refused(desk):
    trajectory = art.Trajectory(messages_and_choices=[{"role": "assistant", "content": "Nobody asked."}])
    with pytest.raises(ConfigError, match="chat template can't render"):
        await desk.model.train_sft([trajectory], art.TrainSFTConfig())


async def test_the_models_own_choices_are_imitated_as_they_were_sampled(desk):
    run = await desk.ask("hello")
    config = art.TrainSFTConfig(learning_rate=[1e-4, 2e-4], batch_size=1)
    result = await desk.backend.train_sft(desk.model, [run, run], config)
    assert result.metrics["loss/learning_rate"] == pytest.approx(1.5e-4)
    [tree] = desk.learner.trees[-1]
    assert bytes(tree.tokens[tree.target_tokens].tolist()) == b"ok</>"
    assert await desk.model.get_step() == 2
    with pytest.raises(ConfigError, match="one per batch"):
        await desk.model.train_sft([run], art.TrainSFTConfig(learning_rate=[1e-4, 2e-4], batch_size=1))


async def test_the_rates_of_imitation_end_with_it(desk):
    await desk.backend.train(desk.model, [await desk.group(0.0, 1.0)], learning_rate=5e-4)
    run = await desk.ask("hello")
    config = art.TrainSFTConfig(learning_rate=create_lr_schedule(2, 2e-4), batch_size=1)
    assert config.learning_rate[-1] == 0
    await desk.model.train_sft([run, run], config)
    unsayable = art.Trajectory(messages_and_choices=[{"role": "assistant", "content": "Nobody asked."}])
    with pytest.raises(ConfigError, match="chat template can't render"):
        await desk.model.train_sft([run, unsayable], config)
    result = await desk.backend.train(desk.model, [await desk.group(0.0, 1.0)])
    assert result.metrics["loss/learning_rate"] == 5e-4


async def test_only_the_last_answer_of_a_conversation_is_imitated_where_that_is_asked_for(desk):
    turns = [(role, f"{role} {number}") for number in (1, 2) for role in ("user", "assistant")]
    messages = [{"role": role, "content": content} for role, content in turns]
    for turns, most in (("last", 1), ("all", 2)):
        config = art.TrainSFTConfig(assistant_turns=turns)
        await desk.model.train_sft([art.Trajectory(messages_and_choices=messages)], config)
        [tree] = desk.learner.trees[-1]
        assert len(set(tree.call.tolist())) == most


def test_schedules_rise_in_the_warmup_and_fall_as_they_are_named():
    assert create_lr_schedule(5, 1.0, "linear", warmup_steps=2) == pytest.approx([0.5, 1.0, 1.0, 0.5, 0.0])
    assert create_lr_schedule(3, 1.0, "cosine", min_lr=0.5) == pytest.approx([1.0, 0.75, 0.5])
    assert create_lr_schedule(2, 1.0, "constant") == [1.0, 1.0] and create_lr_schedule(0, 1.0) == []
    with pytest.raises(ConfigError, match="'square'"):
        create_lr_schedule(2, 1.0, "square")


def test_a_data_set_comes_in_chunks_of_batches_with_their_part_of_one_schedule():
    trajectories = [art.Trajectory(reward=number) for number in range(5)]
    options = {
        "epochs": 2,
        "batch_size": 2,
        "chunk_size": 2,
        "peak_lr": 1.0,
        "warmup_ratio": 0.5,
        "show_progress": False,
    }
    chunks = list(create_sft_dataset_iterator(trajectories, **options))
    assert [(it.step, it.epoch, it.epoch_step, len(it.trajectories)) for it in chunks] == [
        (0, 0, 0, 4),
        (2, 0, 2, 1),
        (3, 1, 0, 4),
        (5, 1, 2, 1),
    ]
    rates = [rate for it in chunks for rate in it.config.learning_rate]
    assert rates == create_lr_schedule(6, 1.0, warmup_steps=3)
    assert sorted(it.reward for chunk in chunks[:2] for it in chunk.trajectories) == [0, 1, 2, 3, 4]
    assert list(create_sft_dataset_iterator(trajectories, initial_step=2, **options)) == chunks[1:]


def test_a_file_is_read_in_pieces_and_shuffled_differently_in_every_epoch(tmp_path):
    file = tmp_path / "lines.jsonl"
    file.write_text("\n".join(json.dumps({"messages": [{"role": "user", "content": str(n)}]}) for n in range(9)))
    read = [it.messages()[0]["content"] for it in iterate_file(file, epochs=2, shuffle_buffer_size=4)]
    assert sorted(read[:9]) == sorted(read[9:]) == [str(n) for n in range(9)] and read[:9] != read[9:]
    later = [it.messages()[0]["content"] for it in iterate_file(file, epochs=2, shuffle_buffer_size=4, initial_skip=5)]
    assert later == read[5:]


async def test_logprobs_are_stripped_from_a_copy(desk):
    trajectory = await desk.ask("hello")
    choice = trajectory.messages_and_choices[-1]
    choice.logprobs = ChoiceLogprobs(content=[])
    copy = strip_logprobs([{"logprobs": 1, "answer": trajectory}])
    assert copy[0]["answer"].messages_and_choices[-1].logprobs is None and "logprobs" not in copy[0]
    assert choice.logprobs and copy[0]["answer"].messages() == trajectory.messages()
