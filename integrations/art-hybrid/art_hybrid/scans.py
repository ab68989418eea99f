"""The recurrences of hybrid models along a tree: every token is computed once, and a state is forked where calls branch.

What happens within a chunk is computed for all chunks at once, as for a row. What passes from chunk to chunk is computed level by
level: in one product, all chunks whose parents are done, each from its parent's state. Autograd adds up the gradients of the
branches. Arguments and results are those of the functions of transformers that these replace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.linalg import solve_triangular
from torch.nn.functional import pad, silu, softplus

from art_hybrid.plan import Chunks, Piece

CHUNK = 16
"""Tokens of a chunk at most. Branches leave short segments, which larger chunks would fill with padding."""
Step = Callable[..., tuple[Tensor, Tensor]]
"""(the states that a level's chunks continue, what was computed within these chunks ...) -> their outputs (chunks, heads, size,
width), and the states after them."""


def delta_rule(
    piece: Piece,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Return the outputs of the gated delta rule, and the states that later pieces continue.

    ``query``, ``key``: (1, tokens, key heads, key width), where a key head serves heads / key heads consecutive heads (before
    transformers 5.24 there are as many); ``value``: (1, tokens, heads, value width); ``beta``: (1, tokens, heads);
    ``g``, the logarithm of the decay: (1, tokens, heads), or (1, tokens, heads, key width) if each channel decays on its own.
    A state S is (heads, key width, value width); each token decays it, then writes beta k (v - k S) (Gated DeltaNet, arXiv
    2412.06464, equation 10; per channel: Kimi Linear, arXiv 2510.26692). Within a chunk, what the tokens write follows from one
    triangular system (section 3.3 there).
    """
    precise = torch.promote_types(query.dtype, torch.float32)
    inputs = [tensor[0].to(precise) for tensor in (query, key, value, g, beta)]
    if use_qk_l2norm_in_kernel:
        inputs[:2] = [x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in inputs[:2]]
    if (repeats := value.shape[2] // query.shape[2]) > 1:
        inputs[:2] = [x.repeat_interleave(repeats, dim=1) for x in inputs[:2]]
    chunks = piece.chunks(CHUNK)
    q, k, v, decay, write = (_chunked(tensor, chunks) for tensor in inputs)
    q = q * q.shape[-1] ** -0.5
    if decay.dim() == 4:
        scores, pairs, rest = _products_by_channel(q, k, decay)
    else:
        within = _within(decay)
        scores, pairs, rest = (q @ k.mT) * within, (k @ k.mT) * within, within[:, :, -1].unsqueeze(-1)
        decay = decay.unsqueeze(-1)
    since = decay.cumsum(2).exp()  # from before the chunk to each token
    write = write.unsqueeze(-1)
    system = (pairs * write).tril(-1)
    written = solve_triangular(system, v * write, upper=False, unitriangular=True)
    known = solve_triangular(system, k * write * since, upper=False, unitriangular=True)
    queries, keys, kept = q * since, (k * rest).mT, since[:, :, -1:].mT

    def step(state: Tensor, written: Tensor, known: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        queries, scores, keys, kept = rest
        new = written - known @ state
        return queries @ state + scores @ new, state * kept + keys @ new

    zero = q.new_zeros(1, q.shape[1], q.shape[-1], v.shape[-1])
    out, states = _along(chunks, piece.states, zero, step, written, known, queries, scores, keys, kept)
    return out.to(query.dtype), states


def mamba2(
    piece: Piece,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Return the outputs of Mamba 2's scan, and the states that later pieces continue.

    ``hidden_states``, x: (1, tokens, heads, width); ``dt``: (1, tokens, heads); ``A``, negative, and ``D``: (heads,); ``B`` and
    ``C``: (1, tokens, groups, state width). A state S is (heads, state width, width); each token changes it to exp(A dt) S +
    B (dt x), and its output is C S + D x (Dao and Gu, arXiv 2405.21060, section 6).
    """
    precise = torch.promote_types(hidden_states.dtype, torch.float32)
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = (softplus(dt) if dt_softplus else dt).clamp(*dt_limit)[0].to(precise)
    x, groups = hidden_states[0].to(precise), [tensor[0].to(precise) for tensor in (B, C)]
    chunks = piece.chunks(CHUNK)
    inputs, decay, b, c = (_chunked(tensor, chunks) for tensor in (x * dt.unsqueeze(-1), A.to(precise) * dt, *groups))
    heads = inputs.shape[1] // b.shape[1]
    within = _within(decay)
    outputs = ((c @ b.mT).repeat_interleave(heads, 1) * within) @ inputs
    b, c = (tensor.repeat_interleave(heads, 1) for tensor in (b, c))
    since = decay.cumsum(2).exp().unsqueeze(-1)
    added, reads, kept = (b * within[:, :, -1].unsqueeze(-1)).mT @ inputs, c * since, since[:, :, -1:]

    def step(state: Tensor, outputs: Tensor, reads: Tensor, added: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        return outputs + reads @ state, state * kept + added

    zero = inputs.new_zeros(1, inputs.shape[1], b.shape[-1], inputs.shape[-1])
    out, states = _along(chunks, piece.states, zero, step, outputs, reads, added, kept)
    return out if D is None else out + D.unsqueeze(-1) * x, states


def mamba1(
    piece: Piece,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Return the outputs of Mamba's selective scan, and the states that later pieces continue.

    ``hidden_states``, x, ``dt``, and the gate ``z``: (1, channels, tokens); ``A``, negative: (channels, state width); ``B`` and
    ``C``: (1, state width, tokens); ``D`` and ``delta_bias``: (channels,). A state h is (channels, state width); each token
    changes it to exp(A dt) h + dt B x, and its output is (C h + D x) silu(z) (Gu and Dao, arXiv 2312.00752, section 3). Every
    number of a state has a decay of its own, so no matrix product computes a chunk: its tokens are computed one after the other.
    """
    precise = torch.promote_types(hidden_states.dtype, torch.float32)
    dt = dt if delta_bias is None else dt + delta_bias.to(dt.dtype).unsqueeze(-1)
    dt = (softplus(dt) if delta_softplus else dt)[0].mT.to(precise)
    x, b, c = (tensor[0].mT.to(precise) for tensor in (hidden_states, B, C))
    chunks = piece.chunks(CHUNK)
    # One head, because that is the order of dimensions that chunks have.
    steps, inputs, writes, reads = (_chunked(tensor.unsqueeze(1), chunks) for tensor in (dt, dt * x, b, c))
    decay, added = (A.to(precise) * steps.unsqueeze(-1)).exp(), inputs.unsqueeze(-1) * writes.unsqueeze(-2)
    own = [added[:, :, 0]]
    for token in range(1, CHUNK):
        own.append(decay[:, :, token] * own[-1] + added[:, :, token])
    since = (A.to(precise) * steps.cumsum(2).unsqueeze(-1)).exp()  # from before the chunk to each token

    def step(state: Tensor, own: Tensor, since: Tensor, reads: Tensor) -> tuple[Tensor, Tensor]:
        states = own + since * state.unsqueeze(2)
        return (states @ reads.unsqueeze(-1)).squeeze(-1), states[:, :, -1]

    zero = x.new_zeros(1, 1, *A.shape)
    out, states = _along(chunks, piece.states, zero, step, torch.stack(own, 2), since, reads)
    out = out.squeeze(2) if D is None else out.squeeze(2) + D * x
    out = out.mT if z is None else out.mT * silu(z)
    return out, states


def _chunked(tensor: Tensor, chunks: Chunks) -> Tensor:
    """(tokens, heads, ...) -> (chunks, heads, size, ...), with zeros as padding, which leave a state as it is."""
    padded = pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, 1))
    return padded.index_select(0, chunks.tokens.flatten()).unflatten(0, chunks.tokens.shape).movedim(2, 1)


def _within(decay: Tensor) -> Tensor:
    """(..., size) -> (..., size, size): the decay from each token of a chunk, the column, to each that sees it, the row.

    Sums over the tokens between the two, because differences of sums from the chunk's start would round more.
    """
    size = decay.shape[-1]
    sums = decay.unsqueeze(-1).expand(*decay.shape, size).tril(-1).cumsum(-2)
    return sums.exp().tril()


def _products_by_channel(query: Tensor, key: Tensor, decay: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the decayed products of queries with keys and of keys with keys, (..., size, size), and the decay to the end.

    ``decay``: (..., size, channels).
    """
    within = _within(decay.mT).movedim(-3, -1)  # (..., size, size, channels)
    keys = key.unsqueeze(-3) * within
    return (query.unsqueeze(-2) * keys).sum(-1), (key.unsqueeze(-2) * keys).sum(-1), within[..., -1, :, :]


def _along(chunks: Chunks, earlier: Tensor | None, zero: Tensor, step: Step, *within: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs in the order of tokens, (1, tokens, heads, width), and the states that later pieces continue.

    ``zero``, ``earlier``: (states, heads, ...), at the beginning of a path and of earlier pieces; ``within``: (chunks, ...).
    """
    before = zero if earlier is None else torch.cat([zero, earlier])
    outputs, states = [], [before]
    sizes = [len(parents) for parents in chunks.parents]
    # Split at once: the gradient of a slice for each level would be as large as the whole.
    for parents, *own in zip(chunks.parents, *(tensor.split(sizes) for tensor in within), strict=True):
        output, before = step(before.index_select(0, parents), *own)
        outputs.append(output)
        states.append(before)
    out = torch.cat(outputs).movedim(1, 2).flatten(0, 1)
    passed_on = torch.cat(states).index_select(0, chunks.passed_on) if len(chunks.passed_on) else zero[:0]
    return out.index_select(0, chunks.places).unsqueeze(0), passed_on
