"""Where does a model call go: to the rollout that it is made in, or where its caller sends it? Knows nothing about clients."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from art_core.attribution.live import current_rollout, exempted, live
from art_core.attribution.names import agent_name
from art_core.errors import CaptureError
from art_core.types import RolloutAddress, within


def destination(model: str | None, base_url: str | None = None) -> RolloutAddress | None:
    """Return where a call to ``model`` goes: the current rollout's address, or None for where the caller sends it.

    ``base_url`` is where the caller would send it: where that is a live rollout's own address, it names the rollout. None
    where no rollout runs, where the rollout passes ``model`` or the calling node through, inside ``exempt()``, and on the
    main thread and the thread that runs the loop outside a rollout. Raises CaptureError on any other thread that carries no
    rollout while some are live, because the call may belong to any of them, and where a call that passes through has no
    address but the rollout's.
    """
    if exempted.get():
        return None
    named = live.addresses.get(base_url.rstrip("/")) if base_url else None
    address = named or current_rollout.get()
    if address is not None:
        elsewhere = model in address.passthrough or (address.nodes and not within(agent_name(), address.nodes))
        if not elsewhere:
            return address
        if named is None:
            return None
        raise CaptureError(
            f"a call to {model!r} passes through, but its client has no address but the rollout's: in a child process it may "
            "be from OPENAI_BASE_URL. Give that client the base_url of its own provider"
        )
    thread = threading.current_thread()
    if not live.count or thread is threading.main_thread() or thread.ident in live.loop_threads:
        return None
    raise CaptureError(
        f"a call to {model!r} on thread {thread.name!r} cannot be attributed to a rollout: {live.count} are running, and "
        "this thread was started before them or by code that keeps no context. Give the client the rollout's own address "
        "(base_url=rollout.base_url), name the model in passthrough= if the policy is not meant, or start the thread inside "
        "the agent's run"
    )


@contextmanager
def exempt() -> Iterator[None]:
    """Leave the calls of this block alone, wherever they are made: a judge's or a tracker's, not the agent's."""
    token = exempted.set(True)
    try:
        yield
    finally:
        exempted.reset(token)
