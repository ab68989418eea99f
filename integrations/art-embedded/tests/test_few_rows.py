"""Which parts of a forward pass with few rows have several threads."""

import pytest
import torch

from art_embedded import TINY
from art_embedded.few_rows import FEW, FewRows
from art_embedded.kv import Batch
from art_embedded.loading import load_model, make_key_values
from art_embedded.plain import PlainKeyValues


@pytest.fixture(autouse=True)
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def model():
    return load_model(str(TINY))


def threads_seen(model, cache, rows):
    """The threads of linear layers and of norms in a step with so many rows."""
    seen = {"Linear": set(), "Norm": set()}
    for module in model.modules():
        kind = next((kind for kind in seen if kind in type(module).__name__), None)
        if kind:
            module.forward = noting(module.forward, seen[kind])
    places = list(range(rows))
    cache.resize(rows, 8)
    cache.forward(Batch([5] * rows, [0] * rows, places, decoding=rows, outputs=places))
    return seen


def noting(forward, seen):
    def noted(*arguments, **keywords):
        seen.add(torch.get_num_threads())
        return forward(*arguments, **keywords)

    return noted


@pytest.mark.parametrize(
    ("rows", "expected"), [(4, {"Linear": {3}, "Norm": {1}}), (FEW + 1, {"Linear": {3}, "Norm": {3}})]
)
@torch.inference_mode()
def test_with_few_rows_only_matrix_products_are_computed_in_parallel(model, rows, expected):
    assert threads_seen(model, make_key_values(model), rows) == expected
    assert torch.get_num_threads() == 3


@torch.inference_mode()
def test_a_pass_that_fails_gives_the_threads_back(model):
    cache = make_key_values(model)
    cache.resize(1, 8)
    model.model.layers[0].mlp.forward = lambda _: 1 / 0
    with pytest.raises(ZeroDivisionError):
        cache.forward(Batch([5], [0], [0], decoding=1, outputs=[0]))
    assert torch.get_num_threads() == 3


def test_a_model_that_cannot_be_packed_is_left_as_it_was(model):
    model._supports_attention_backend = False
    assert isinstance(make_key_values(model), PlainKeyValues)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_model_with_most_weights_outside_of_linear_layers_keeps_its_threads(model):
    model.experts = torch.nn.Parameter(torch.zeros(1000, 1000))
    few_rows = FewRows(model)
    with few_rows.apart(4):
        assert torch.get_num_threads() == 3
