"""ART's (openpipe-art) capture, tensors, attention mask, logprobs and loss, on a plain transformers model.

Its stored logprobs, token weights and scale of advantages are replaced, so that all sides have the same objective. The mask of
packed rows comes from the tree that ART's Megatron backend reads out of the same tensors; its own masks need megatron-core.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import httpx
import torch
from transformers import PreTrainedTokenizerBase, masking_utils

from art_core.types import JsonDict
from bench.peers.batch import Batch
from bench.synthetic import TOOLS, ChatCall, TokenCall

URL = "http://127.0.0.1/v1/chat/completions"
"""No request leaves the process."""

Group = tuple[Sequence[Sequence[ChatCall]], Sequence[Sequence[TokenCall]], Sequence[float]]
"""One task's rollouts as chats and as tokens, and their rewards."""


def _import_art() -> None:
    # Importing art replaces this for transformers 5.2; with newer versions every forward pass then fails.
    original = masking_utils._preprocess_mask_arguments
    import art  # noqa: F401

    masking_utils._preprocess_mask_arguments = original


def capture(groups: Sequence[Group], *, sdk: bool = False) -> list[Any]:
    """Return ART's trajectory groups, recorded by its patch of httpx from answers as vLLM gives them.

    ``sdk``: assistant messages come back as the OpenAI client's own objects, null fields included.
    """
    _import_art()
    import art

    captured = []
    for chats, runs, rewards in groups:
        trajectories = []
        for chat, run, reward in zip(chats, runs, rewards, strict=True):
            with art.Trajectory() as trajectory:
                for call, tokens in zip(chat, run, strict=True):
                    post(request_of(call, sdk=sdk), answer_of(call, tokens))
            trajectory.reward = reward
            trajectories.append(trajectory)
        captured.append(art.TrajectoryGroup(trajectories))
    return captured


def post(request: JsonDict, answer: JsonDict) -> None:
    """Send ``request`` with httpx to a server in this process, which returns ``answer``."""
    server = httpx.MockTransport(lambda _: httpx.Response(200, json=answer))
    with httpx.Client(transport=server) as client:
        client.post(URL, json=request).raise_for_status()


def request_of(call: ChatCall, *, sdk: bool) -> JsonDict:
    messages = [dict(message) for message in call.messages]
    for message in messages:
        if sdk and message["role"] == "assistant":
            message.update(refusal=None, reasoning_content=None)
    return {"model": "policy", "messages": messages, "tools": TOOLS}


def answer_of(call: ChatCall, tokens: TokenCall) -> JsonDict:
    """Return vLLM's answer to a request with ``return_token_ids`` and ``logprobs``."""
    content = [{"token": f"token_id:{id}", "logprob": -0.5, "bytes": [], "top_logprobs": []} for id in tokens.sampled]
    reason = "tool_calls" if call.reply.get("tool_calls") else "stop"
    choice = {
        "index": 0, "finish_reason": reason, "message": call.reply, "logprobs": {"content": content},
        "token_ids": list(tokens.sampled),
    }  # fmt: skip
    return {
        "id": "answer", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice],
        "prompt_token_ids": list(tokens.prompt),
    }  # fmt: skip


def tokenize(tokenizer: PreTrainedTokenizerBase, groups: Sequence[Any]) -> list[Any]:
    """Return ART's tokenized histories."""
    from art.preprocessing.tokenize import tokenize_trajectory_groups

    return list(
        tokenize_trajectory_groups(tokenizer, list(groups), allow_training_without_logprobs=False, scale_rewards=True)
    )


def pack(tokenizer: PreTrainedTokenizerBase, histories: Sequence[Any], length: int, *, share: bool = True) -> dict:
    """Return ART's tensors with rows of ``length``; without ``share``, one history per row, as in its LocalBackend."""
    from art.preprocessing.pack import packed_tensors_from_tokenized_results

    return packed_tensors_from_tokenized_results(
        list(histories), length, pad_token_id=tokenizer.pad_token_id, truncate_long_results=False, pack_results=share
    )


def art_side(
    tokenizer: PreTrainedTokenizerBase, batch: Batch, *, share: bool
) -> tuple[Callable[[torch.nn.Module], None], int, int]:
    """Return the pass over the batch, its tokens without padding, and with padding. Raises ImportError without ART."""
    groups = capture([(batch.chats, batch.runs, batch.rewards)])
    from art.loss import LossInputs, loss_fn, shift_tensor
    from art.unsloth.train import _calculate_logprobs

    histories = tokenize(tokenizer, groups)
    tensors = _least_padded(tokenizer, histories, share=share)
    tensors["logprobs"].fill_(float("nan"))  # for ART this means that the ratio is 1
    tensors["weights"] = tensors["assistant_mask"].float()
    # ART scales all advantages by one constant; this undoes it.
    tensors["advantages"] *= max(abs(it.advantage) for it in histories) / float(tensors["advantages"].abs().max())
    trained = int(tensors["assistant_mask"].sum())
    if trained != batch.trained:
        print(f"note: ART trains {trained} of {batch.trained} sampled tokens")
    rows, length = tensors["tokens"].shape

    def step(model: torch.nn.Module) -> None:
        head = model.get_output_embeddings().weight.t()
        for number in range(rows):
            row = {name: it[number : number + 1] for name, it in tensors.items() if isinstance(it, torch.Tensor)}
            mask = attention_bias(row["group_ids"], row["parent_ids"], model.dtype, share=share)
            hidden = model.model(
                input_ids=row["tokens"], attention_mask=mask[:, None], position_ids=row["input_pos"], use_cache=False
            ).last_hidden_state
            new, entropies = _calculate_logprobs(head, hidden, shift_tensor(row["tokens"], 0), 1024)
            loss = loss_fn(LossInputs(inputs=row), new, None, entropies, {}, reduction="sum")
            (loss.policy_loss / trained).backward()

    return step, int((tensors["group_ids"] != -1).sum()), rows * length


def attention_bias(groups: torch.Tensor, parents: torch.Tensor, dtype: torch.dtype, *, share: bool) -> torch.Tensor:
    """Return (1, tokens, tokens) for a row: 0 for what a token sees, else -inf."""
    from art.megatron.prefix_tree import parse_prefix_tree
    from art.unsloth.train import calculate_attn_bias

    length = groups.shape[1]
    if not share:
        return calculate_attn_bias(1, length, "cpu", groups, parents, dtype)
    (row,) = parse_prefix_tree(group_ids=groups, parent_ids=parents)
    spans = {segment.group_id: slice(segment.start, segment.end) for segment in row.segments}
    seen = torch.eye(length, dtype=torch.bool)  # padding sees itself, so that no softmax is over nothing
    for segment in row.segments:
        own = spans[segment.group_id]
        seen[own, own] = torch.ones(own.stop - own.start, own.stop - own.start, dtype=torch.bool).tril()
        for ancestor in segment.ancestors:
            seen[own, spans[ancestor]] = True
    return torch.zeros(length, length, dtype=dtype).masked_fill_(~seen, float("-inf"))[None]


def _least_padded(tokenizer: PreTrainedTokenizerBase, histories: Sequence[Any], *, share: bool) -> dict:
    longest = max(len(history.token_ids) for history in histories)
    if not share:
        return pack(tokenizer, histories, -(-longest // 2048) * 2048, share=False)
    lengths = [length for length in range(1024, longest + 8192, 1024) if longest <= length <= max(longest, 8192)]
    packed = [pack(tokenizer, histories, length) for length in lengths or [longest]]
    return min(packed, key=lambda tensors: tensors["tokens"].numel())
