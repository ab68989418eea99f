"""``loss="distill"``: the student's own samples, scored token by token by a teacher."""

import functools
import math
from dataclasses import replace

import pytest
import torch
from small_learner import make_learner, make_trees, save_model
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from tree_cases import FORKED, VOCAB, make_model

import art_core as art
from art_core.errors import ConfigError
from art_core.learner import tree_logprobs
from art_core.losses import dapo, distill, grpo, needs_teacher
from art_core.testing import CountingLearner, FakeEngine, ScriptedAgent
from art_core.token_tree import build_tree
from art_core.types import LossInputs


def with_tokenizer(folder, *, words=VOCAB):
    vocabulary = {f"w{number}": number for number in range(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    return with_tokenizer(save_model(tmp_path_factory.mktemp("student")))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher")
    torch.manual_seed(77)
    make_model("llama").save_pretrained(folder)
    return with_tokenizer(folder)


def inputs_of(logprobs, reference, **fields):
    count = len(logprobs)
    values = {
        "logprobs": logprobs, "old_logprobs": logprobs.detach(), "ref_logprobs": reference, "advantages": torch.zeros(count),
        "weights": torch.ones(count), "trajectory": torch.zeros(count, dtype=torch.int64),
        "call": torch.zeros(count, dtype=torch.int64),
    }  # fmt: skip
    return LossInputs(**(values | fields))


@pytest.mark.parametrize(("settings", "weight", "kl"), [({}, 0.0, 0.0), ({"reward_weight": 0.1, "kl": 0.3}, 0.1, 0.3)])
def test_a_token_is_worth_what_the_teacher_gives_it_above_the_student_and_its_reward(settings, weight, kl):
    change, above = [0.0, 0.5, -0.1, -0.7], [1.0, 2.0, -4.0, -1.0]
    old = torch.tensor([-1.0, -2.0, -3.0, -2.0], dtype=torch.float64)
    new, reference = old + torch.tensor(change, dtype=torch.float64), old + torch.tensor(above, dtype=torch.float64)
    rewards = [10.0, 10.0, -10.0, -10.0]
    rows = {"old_logprobs": old, "advantages": torch.tensor(rewards), "trajectory": torch.tensor([0, 0, 1, 1])}
    loss = distill(inputs_of(new, reference, **rows), **settings).loss
    ratios = [1.0, 1.2, math.exp(-0.1), 0.8]  # exp(0.5) and exp(-0.7) are clipped
    worth = [it + weight * reward for it, reward in zip(above, rewards, strict=True)]
    apart = [it - moved for it, moved in zip(above, change, strict=True)]
    gains = [ratio * it - kl * (math.exp(d) - d - 1) for ratio, it, d in zip(ratios, worth, apart, strict=True)]
    assert loss.item() == pytest.approx(-sum(gains) / 4)


@pytest.mark.parametrize("proximal", [False, True])
def test_the_expected_gradient_is_that_of_the_reverse_divergence(proximal):
    generator = torch.Generator().manual_seed(0)
    logits, others = torch.randn(2, VOCAB, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    mine, its = logits.log_softmax(-1), others.log_softmax(-1)
    (exact,) = torch.autograd.grad((mine.exp() * (mine - its)).sum(), logits, retain_graph=True)
    # Every token once, as often as the student samples it; the engine's own logprobs count only without proximal ones.
    near = {"proximal_logprobs": mine.detach(), "old_logprobs": mine.detach() - 0.3} if proximal else {}
    outputs = distill(
        inputs_of(mine, its, weights=mine.detach().exp(), **near), importance_cap=1.0 if proximal else None
    )
    (estimated,) = torch.autograd.grad(outputs.loss, logits)
    torch.testing.assert_close(estimated, exact, rtol=0, atol=1e-12)


def test_the_gradient_on_the_tree_is_that_of_two_models_and_one_row_per_call():
    torch.manual_seed(5)
    student, teacher = make_model("qwen3").double(), make_model("llama").double()
    tree = build_tree(FORKED, [1.0, -1.0, 0.5])
    logprobs = tree_logprobs(student, tree)
    with torch.no_grad():
        reference = tree_logprobs(teacher, tree)
    names = ("advantages", "weights", "trajectory", "call")
    rows = {name: torch.from_numpy(getattr(tree, name)) for name in names}
    distill(inputs_of(logprobs, reference, **rows), reward_weight=0.5).loss.backward()
    by_tree = {name: parameter.grad.clone() for name, parameter in student.named_parameters()}

    def row(model, call):
        ids = torch.tensor([[*call.prompt_ids, *call.sampled_ids]])
        logprobs = (model(ids).logits[0, :-1] / call.temperature).log_softmax(-1)
        return logprobs.gather(1, ids[0, 1:, None])[-len(call.sampled_ids) :, 0]

    student.zero_grad()
    plain = 0.0
    for trajectory, advantage in zip(FORKED[:2], [1.0, -1.0], strict=True):  # the third's call was aborted
        rows = [(row(student, call), row(teacher, call)) for call in trajectory.calls]
        gains = [(its - mine + 0.5 * advantage).detach() * mine for mine, its in rows]
        plain = plain - torch.cat(gains).mean() / 2
    plain.backward()
    for name, parameter in student.named_parameters():
        torch.testing.assert_close(by_tree[name], parameter.grad, rtol=0, atol=1e-6)


def test_the_teacher_computes_each_token_of_the_tree_once_and_the_student_comes_closer(student, teacher, monkeypatch):
    from art_core.learner import torch_learner

    computed = []

    def load(*given):
        model = torch_learner_load(*given)
        model.get_input_embeddings().register_forward_hook(lambda _, ids, __: computed.append(ids[0].numel()))
        return model

    torch_learner_load = torch_learner.load_teacher
    monkeypatch.setattr(torch_learner, "load_teacher", load)
    learner = make_learner(student, distill, teacher=str(teacher), learning_rate=0.01)
    [tree] = make_trees(learner)
    flat = replace(tree, advantages=0 * tree.advantages)
    first = learner.step([flat])  # which also compares the ways to compute a tree
    computed.clear()
    gaps = [learner.step([flat])["kl_ref"] for _ in range(12)]
    assert computed == [tree.num_tokens] * 12
    assert gaps[-1] < 0.7 * first["kl_ref"]


@pytest.mark.parametrize("rank", [0, 2])
def test_a_kl_term_pulls_towards_the_teacher_if_there_is_one(student, teacher, rank):
    learner = make_learner(student, kl=3.0, teacher=str(teacher), learning_rate=0.01, lora_rank=rank)
    trees = make_trees(learner)
    gaps = [learner.step(trees)["kl_ref"] for _ in range(12)]
    assert gaps[-1] < gaps[0]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"loss": functools.partial(distill, reward_weight=1.0)},
            "loss='distill' learns from a teacher; pass teacher=",
        ),
        ({"loss": "distill", "teacher": "./x"}, "no model folder ./x"),
        ({"teacher": "tiny"}, "nothing learns from teacher= with loss='grpo' and kl=0"),
        ({"loss": "distill", "teacher": "tiny", "max_kl": 1.0}, "pass a small kl=, such as 1e-4, and no teacher="),
    ],
)
async def test_settings_that_a_teacher_does_not_fit_are_refused_before_the_run_starts(tmp_path, settings, said):
    with pytest.raises(ConfigError, match=said):
        async with art.open_run(tmp_path / "run", engine=FakeEngine(), learner=CountingLearner(), **settings):
            raise AssertionError
    assert not (tmp_path / "run").exists()


def test_a_teacher_with_other_tokens_is_refused(student, tmp_path):
    make_model("llama").save_pretrained(tmp_path)
    with_tokenizer(tmp_path, words=VOCAB - 2)
    with pytest.raises(ConfigError, match=r"has other ids for 2 of the 12 tokens .*a teacher of the same family"):
        make_learner(student, distill, teacher=str(tmp_path))
    with pytest.raises(ValueError, match="distill needs ref_logprobs"):
        distill(inputs_of(torch.zeros(2), None))


def test_only_distillation_needs_a_teacher():
    assert needs_teacher(functools.partial(functools.partial(distill, kl=0.1), reward_weight=1.0))
    assert not any(map(needs_teacher, (grpo, dapo, functools.partial(grpo, kl=0.1))))


@pytest.mark.parametrize(("loss", "trained"), [("distill", 2), ("grpo", 0)])
async def test_only_distillation_learns_from_groups_without_contrast(tmp_path, loss, trained):
    learner = CountingLearner()
    async with art.open_run(tmp_path, engine=FakeEngine(), learner=learner, loss=loss, teacher="tiny", kl=0.1) as run:
        groups = await run.collect(ScriptedAgent(), ["a", "b"], group_size=2)
        metrics = await run.learn(await run.score(groups, lambda _: 1.0))
    assert sum(map(len, learner.trees)) == metrics["groups_with_contrast"] == trained
