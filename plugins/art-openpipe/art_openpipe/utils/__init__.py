"""``art.utils``: helpers for a script's training loop."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import os
import random
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

import tenacity

from art_core.store.run_folder import checkpoint_step, last_checkpoint
from art_openpipe.refused import record_provenance as record_provenance
from art_openpipe.types import Message, folder_of

log = logging.getLogger("art_openpipe")
T = TypeVar("T")
Function = Callable[..., Any]


@dataclass
class DatasetBatch(Generic[T]):
    """The items of one step."""

    items: list[T]
    step: int  # index over all epochs
    epoch: int
    epoch_step: int


def iterate_dataset(
    dataset: Sequence[T], groups_per_step: int = 1, num_epochs: int = 1, initial_step: int = 0, use_tqdm: bool = True
) -> Iterator[DatasetBatch[T]]:
    """Yield the dataset in batches, shuffled differently but reproducibly in every epoch, starting at ``initial_step``."""
    per_epoch = math.ceil(len(dataset) / groups_per_step)
    steps: Iterable[int] = range(initial_step, per_epoch * num_epochs)
    if use_tqdm:
        from tqdm.auto import tqdm

        steps = tqdm(steps, initial=initial_step, total=per_epoch * num_epochs, desc="iterating dataset")
    for step in steps:
        epoch, epoch_step = divmod(step, per_epoch)
        order = list(range(len(dataset)))
        random.Random(epoch).shuffle(order)
        indices = order[epoch_step * groups_per_step : (epoch_step + 1) * groups_per_step]
        yield DatasetBatch([dataset[index] for index in indices], step, epoch, epoch_step)


def retry(
    max_attempts: int = 3,
    delay: float = 0.25,
    backoff_factor: float = 2.0,
    exceptions: type[Exception] | tuple[type[Exception], ...] = (Exception,),
    on_retry: Callable[[Exception, int], None] | None = None,
) -> Callable[[Function], Function]:
    """Return a decorator for functions and coroutine functions that retries on ``exceptions``, after growing pauses."""
    return tenacity.retry(
        stop=tenacity.stop_after_attempt(max_attempts),
        wait=tenacity.wait_exponential(multiplier=delay, exp_base=backoff_factor),
        retry=tenacity.retry_if_exception_type(exceptions),
        before_sleep=lambda state: on_retry and on_retry(state.outcome.exception(), state.attempt_number),
        reraise=True,
    )


def limit_concurrency(n: int, derive_key: Callable[..., Any] | None = None) -> Callable[[Function], Function]:
    """Return a decorator for coroutine functions that limits concurrency to ``n``, or to ``n`` per ``derive_key(*args)``."""

    def decorator(function: Function) -> Function:
        # A semaphore lives as long as a call waits for it or holds it.
        gates: WeakValueDictionary[Any, asyncio.Semaphore] = WeakValueDictionary()

        @functools.wraps(function)
        async def limited(*args: Any, **kwargs: Any) -> Any:
            key = derive_key(*args, **kwargs) if derive_key else None
            async with gates.setdefault((asyncio.get_running_loop(), key), asyncio.Semaphore(n)):
                return await function(*args, **kwargs)

        return limited

    return decorator


def log_http_errors(function: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
    """Decorate a coroutine function so that HTTP error responses are logged; the errors are raised as before."""

    @functools.wraps(function)
    async def logged(*args: Any, **kwargs: Any) -> T:
        try:
            return await function(*args, **kwargs)
        except Exception as error:
            if (response := getattr(error, "response", None)) is not None:
                log.error("%s: %s", response.status_code, response.text)
            raise

    return logged


def format_message(message: Message) -> str:
    """Return a message as readable text."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    parts = [message.get("content"), *(f"{called['name']}({called['arguments']})" for called in functions)]
    return f"{message.get('role', '')}:\n" + "\n".join(str(part) for part in parts if part)


def get_model_step(model: Any, art_path: str | None = None) -> int:
    """Return the step of the newest checkpoint in the model's folder; 0 if there is none."""
    base = art_path or os.environ.get("ART_PATH") or model.base_path
    newest = last_checkpoint(folder_of(base, model.project, model._storage_name()))
    return 0 if newest is None else checkpoint_step(newest)


def strip_logprobs(value: Any) -> Any:
    """Return a copy of nested data without the items, and with None for the fields, that are named ``logprobs``."""
    if hasattr(value, "model_copy"):
        fields = {name: None if name == "logprobs" else strip_logprobs(each) for name, each in vars(value).items()}
        return value.model_copy(update=fields)
    if isinstance(value, dict):
        return {name: strip_logprobs(each) for name, each in value.items() if name != "logprobs"}
    return [strip_logprobs(each) for each in value] if isinstance(value, list | tuple) else value


_MODULES = "format_message get_model_step iterate_dataset limit_concurrency log_http_errors retry strip_logprobs"
for _name in _MODULES.split():
    sys.modules[f"{__name__}.{_name}"] = sys.modules[__name__]  # each is a module of its own in OpenPipe ART
