"""Which library computes matrix products on a CPU: a setting of the whole process, which blocks of several threads share."""

import pytest

torch = pytest.importorskip("torch")
from art_core.runtime import cpu  # noqa: E402


@pytest.fixture
def setting(monkeypatch):
    """torch's setting, on a machine on which oneDNN is faster."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    return torch.backends.mkldnn.matmul


def test_attention_with_few_queries_is_left_to_mkl_inside_a_block_of_onednn(setting):
    with cpu.attention_of(1):
        assert setting.fp32_precision == "none"
    with cpu.onednn_products():
        assert setting.fp32_precision == "bf16"
        with cpu.attention_of(1):
            assert setting.fp32_precision == "none"
        with cpu.attention_of(1000):
            assert setting.fp32_precision == "bf16"
        assert setting.fp32_precision == "bf16"
    assert setting.fp32_precision == "none"


def test_blocks_of_two_threads_may_end_in_any_order(setting):
    outer, inner, mine, theirs = cpu.onednn_products(), cpu.onednn_products(), cpu.attention_of(1), cpu.attention_of(1)
    for block in (outer, inner, mine, theirs):
        block.__enter__()
    mine.__exit__(None, None, None)
    theirs.__exit__(None, None, None)
    assert setting.fp32_precision == "bf16"
    outer.__exit__(None, None, None)
    assert setting.fp32_precision == "bf16"
    inner.__exit__(None, None, None)
    assert setting.fp32_precision == "none"
