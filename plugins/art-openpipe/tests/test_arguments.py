"""What ``backend.train`` is given is taken for that step, mapped or refused; what is left out is LocalBackend's."""

import pytest

import art_openpipe as art
from art_core import losses
from art_core.errors import ConfigError


async def test_arguments_of_train_are_mapped(desk):
    async def trained(**given):
        await desk.backend.train(desk.model, [await desk.group(0.0, 1.0, 0.0)], **given)
        return desk.learner.loss

    loss = await trained(kl_penalty_coef=0.1, truncated_importance_sampling=2.0, verbose=True)
    assert (loss.func, loss.keywords) == (
        losses.cispo,
        {"clip_low": 1.0, "clip_high": 4.0, "kl": 0.1, "importance_cap": 2.0},
    )
    fixed = {"kl_penalty_coef": 0.1, "truncated_importance_sampling": 2.0}
    loss = await trained(loss_fn="ppo", epsilon=0.1, epsilon_high=0.3, scale_rewards=False, **fixed)
    assert (loss.func, loss.keywords["clip_low"], loss.keywords["clip_high"]) == (losses.grpo, 0.1, 0.3)
    assert desk.run.config.advantage == "mean" and desk.run.config.kl == 0.1
    assert (await trained(loss_fn="ppo", importance_sampling_level="sequence", **fixed)).func is losses.gspo
    await trained(save_checkpoint=False, **fixed)
    assert not (desk.run.run_dir / "checkpoints" / "step-000004").exists()
    loss = await trained(save_checkpoint=True, **fixed)
    assert (desk.run.run_dir / "checkpoints" / "step-000005").is_dir()
    assert loss.func is losses.cispo and desk.run.config.advantage == "mean_std"
    with pytest.raises(ConfigError, match="cannot change them half way"):
        await trained()


async def test_what_one_step_asks_for_holds_for_that_step_only(make_desk):
    desk = await make_desk(advantage="leave_one_out", checkpoint_every=2)

    async def trained(**given):
        result = await desk.backend.train(desk.model, [await desk.group(0.0, 1.0)], **given)
        return result.checkpoint_path is not None, desk.run.config.advantage

    assert await trained(scale_rewards=False, save_checkpoint=True) == (True, "mean")
    assert await trained(save_checkpoint=False) == (False, "leave_one_out")
    assert await trained() == (False, "leave_one_out")
    assert await trained() == (True, "leave_one_out")
    await trained(save_checkpoint=False)
    result = await desk.backend.train_sft(desk.model, [await desk.ask("hello")], art.TrainSFTConfig())
    assert result.checkpoint_path.endswith("step-000006")


async def test_what_a_step_does_not_ask_for_is_as_the_backend_was_given_it(make_desk):
    desk = await make_desk(kl=0.1, importance_cap=2.0, loss="dapo")

    async def trained(**given):
        await desk.backend.train(desk.model, [await desk.group(0.0, 1.0)], **given)
        return desk.learner.loss.func, desk.learner.loss.keywords

    fixed = {"kl": 0.1, "importance_cap": 2.0}
    assert await trained(learning_rate=1e-5) == (losses.dapo, fixed)
    assert (desk.run.config.kl, desk.run.config.importance_cap) == (0.1, 2.0)
    assert await trained(loss_fn="ppo") == (losses.grpo, {"clip_low": 0.2, "clip_high": 0.2, **fixed})
    assert await trained() == (losses.dapo, fixed)
    with pytest.raises(ConfigError, match="cannot change them half way"):
        await trained(kl_penalty_coef=0.0)


async def test_a_learner_without_a_loss_of_its_own_is_left_as_it_is_where_no_step_asks_for_one(make_desk):
    desk = await make_desk()
    del desk.learner.loss
    group = await desk.group(0.0, 1.0)
    assert (await desk.backend.train(desk.model, [group])).step == 1
    with pytest.raises(ConfigError, match="can't change loss from step to step"):
        await desk.backend.train(desk.model, [group], loss_fn="ppo")


@pytest.mark.parametrize(
    "given",
    [
        {"mask_prob_ratio": True},
        {"adam_params": {"beta1": 0.9}},
        {"loss_fn_config": {"a": 1}},
        {"precalculate_logprobs": True},
        {"kl_penalty_reference_step": 3},
        {"advantage_balance": 0.5},
        {"packed_sequence_length": 4096},
        {"loss_fn": "dapo"},
        {"importance_sampling_level": "average"},
        {"kl_penalty_source": "sample"},
        {"optimizer_save_interval": 1},
        {"final_training_step": 9},
        {"beta": 0.1},
        {"nonsense": 1},
    ],
    ids=lambda given: next(iter(given)),
)
async def test_arguments_that_art_has_not_are_refused_by_name(desk, given):
    with pytest.raises(ConfigError, match=next(iter(given))):
        await desk.backend.train(desk.model, [], **given)


async def test_a_config_has_the_keywords_of_train(desk):
    config = art.TrainConfig(learning_rate=3e-5, kl_penalty_coef=0.1)
    await desk.backend.train(desk.model, [await desk.group(0.0, 1.0)], **config.model_dump(exclude_unset=True))
    assert (desk.learner.learning_rate, desk.run.config.kl) == (3e-5, 0.1)
