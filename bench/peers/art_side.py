"""ART's (openpipe-art) capture, tensors, attention mask, logprobs and loss, on a plain transformers model.

Its stored logprobs, token weights and scale of advantages are replaced, so that all sides have the same objective.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, masking_utils

from bench.peers.batch import Batch
from bench.synthetic import TOOLS, ChatCall, TokenCall

TOOL_FORMAT = "vllm_openai"
"""How ART's Megatron backend passes tools to the template; with it, its contexts are closest to the sampled ones."""

Group = tuple[Sequence[Sequence[ChatCall]], Sequence[Sequence[TokenCall]], Sequence[float]]
"""One task's rollouts as chats and as tokens, and their rewards."""


def _import_art() -> None:
    # Importing art replaces this for transformers 5.2; with newer versions every forward pass then fails.
    original = masking_utils._preprocess_mask_arguments
    import art  # noqa: F401

    masking_utils._preprocess_mask_arguments = original


def capture(groups: Sequence[Group], *, sdk: bool = False) -> list[Any]:
    """Return ART's trajectory groups, with calls passed to its capture as by its patch of httpx.

    ``sdk``: assistant messages come back as the OpenAI client's own objects, null fields included.
    """
    _import_art()
    import art
    from art.auto_trajectory import AutoTrajectoryContext

    captured = []
    for chats, runs, rewards in groups:
        trajectories = []
        for chat, run, reward in zip(chats, runs, rewards, strict=True):
            context = AutoTrajectoryContext()
            for call, tokens in zip(chat, run, strict=True):
                context.handle_httpx_response(_response(call, tokens, sdk=sdk))
            context.trajectory.reward = reward
            trajectories.append(context.trajectory)
        captured.append(art.TrajectoryGroup(trajectories))
    return captured


def _response(call: ChatCall, tokens: TokenCall, *, sdk: bool) -> SimpleNamespace:
    sent = [dict(message) for message in call.messages]
    for message in sent:
        if sdk and message["role"] == "assistant":
            message.update(refusal=None, reasoning_content=None)
    content = [{"token": f"token_id:{id}", "logprob": -0.5, "bytes": [], "top_logprobs": []} for id in tokens.sampled]
    reason = "tool_calls" if call.reply.get("tool_calls") else "stop"
    choice = {"index": 0, "finish_reason": reason, "message": call.reply, "logprobs": {"content": content}}
    request = SimpleNamespace(_content=json.dumps({"messages": sent, "tools": TOOLS}).encode())
    return SimpleNamespace(_content_so_far=json.dumps({"choices": [choice]}).encode(), request=request)


def tokenize(tokenizer: PreTrainedTokenizerBase, groups: Sequence[Any], tool_format: str = TOOL_FORMAT) -> list[Any]:
    """Return ART's tokenized histories."""
    from art.preprocessing.tokenize import tokenize_trajectory_groups

    return list(
        tokenize_trajectory_groups(
            tokenizer, groups, allow_training_without_logprobs=False, scale_rewards=True,
            chat_template_tool_schema_format=tool_format,
        )
    )  # fmt: skip


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
    from art.loss import loss_fn
    from art.unsloth.train import _calculate_logprobs, calculate_attn_bias, shift_tensor

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
            mask = calculate_attn_bias(1, length, "cpu", row["group_ids"], row["parent_ids"], model.dtype)
            hidden = model.model(
                input_ids=row["tokens"], attention_mask=mask[:, None], position_ids=row["input_pos"], use_cache=False
            ).last_hidden_state
            new, entropies = _calculate_logprobs(head, hidden, shift_tensor(row["tokens"], 0), 1024)
            (loss_fn(row, new, None, entropies, {}, reduction="sum").policy_loss / trained).backward()

    return step, int((tensors["group_ids"] != -1).sum()), rows * length


def _least_padded(tokenizer: PreTrainedTokenizerBase, histories: Sequence[Any], *, share: bool) -> dict:
    longest = max(len(history.token_ids) for history in histories)
    if not share:
        return pack(tokenizer, histories, -(-longest // 2048) * 2048, share=False)
    lengths = [length for length in range(1024, longest + 8192, 1024) if longest <= length <= max(longest, 8192)]
    packed = [pack(tokenizer, histories, length) for length in lengths or [longest]]
    return min(packed, key=lambda tensors: tensors["tokens"].numel())
