"""Why groups have no calls to learn from, or not all that their agents made."""

from __future__ import annotations

import builtins
import re
from collections import Counter
from collections.abc import Sequence

from art_core.attribution import TO_DO, USE_ADDRESS
from art_core.errors import CaptureError, ConfigError
from art_core.loop.rollout import failure
from art_core.store import Store
from art_core.types import Group, Trajectory

OUTCOMES = {
    "failed": "{} were refused by it, the first with: {}",
    "refused": "{} were refused before they left ({})",
    "passed": "{} went where the agent sends them, as passthrough= or other_nodes= says ({})",
}
"""What happened to the calls in ``Trajectory.unrecorded``: their number, and the most frequent errors or addresses."""
NOT_REDIRECTED = f"calls did not go through a rollout's address, and no request to a model was seen; {USE_ADDRESS}"
CACHED = "earlier rollouts had calls, and these made no request; does the agent cache its answers? Turn its cache off"


def check_sampled(groups: Sequence[Group]) -> None:
    """Raise ConfigError if the policy did not sample all calls: a policy gradient needs its probabilities."""
    foreign = [t.rollout_id for t in _trajectories(groups) if any(call.policy_version < 0 for call in t.calls)]
    if foreign:
        raise ConfigError(
            f"{len(foreign)} trajectories, rollout {foreign[0] or '(no id)'} first, have calls that another model answered "
            "(policy_version -1), without the probabilities that a policy gradient needs; leave these trajectories out, or, "
            "if their calls have token ids, imitate them with learn_sft"
        )


def check_captured(groups: Sequence[Group], nodes: Sequence[str] = (), *, earlier: bool = False) -> None:
    """Raise CaptureError, with the reason, if no rollout has a recorded call (``earlier``: others had), or none by ``nodes``."""
    trajectories = _trajectories(groups)
    calls = [call for t in trajectories for call in t.calls]
    if trajectories and not calls:
        raise CaptureError(_why_no_call(groups, earlier))
    if calls and nodes and not any(call.made_by(*nodes) for call in calls):
        callers = ", ".join(sorted({repr(call.agent) for call in calls}))
        unnamed = " (None: no plugin named the node; 'art plugins' lists those that do)" if "None" in callers else ""
        raise CaptureError(
            f"train_nodes={tuple(nodes)} made none of {len(calls)} calls; the calls came from {callers}{unnamed}. Pass one of "
            "these names; if the agent stops before that node to wait for human input, answer it in the agent function"
        )


def note_elsewhere(store: Store, groups: Sequence[Group]) -> None:
    """Add the calls that did not reach the policy to the counts that the store has for the report."""
    unrecorded = _unrecorded(groups)
    if unrecorded["refused"] or unrecorded["passed"]:
        before = store.meta("calls_elsewhere", {})
        totals = {outcome: unrecorded[outcome] + Counter(before.get(outcome, {})) for outcome in ("refused", "passed")}
        store.set_meta("calls_elsewhere", totals)


def why_elsewhere(groups: Sequence[Group], outcome: str) -> str | None:
    """Return how many calls were ``refused`` before they left, or ``passed`` to where the agent sends them; None if none."""
    unrecorded = _unrecorded(groups)
    if not (counts := unrecorded[outcome]):
        return None
    recorded = sum(len(t.calls) for t in _trajectories(groups))
    calls = recorded + unrecorded["refused"].total() + unrecorded["passed"].total()
    return f"{counts.total()} of {calls} model calls did not reach the policy: {_describe(outcome, counts)}"


def _trajectories(groups: Sequence[Group]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group.trajectories]


def _unrecorded(groups: Sequence[Group]) -> dict[str, Counter[str]]:
    """Return the calls that were not recorded, counted by outcome and by error or address."""
    totals = {outcome: Counter[str]() for outcome in OUTCOMES}
    for trajectory in _trajectories(groups):
        for outcome, counts in trajectory.unrecorded.items():
            totals[outcome].update(counts)
    return totals


def _describe(outcome: str, counts: Counter[str]) -> str:
    most_frequent = counts.most_common(1 if outcome == "failed" else 3)
    return OUTCOMES[outcome].format(counts.total(), ", ".join(text for text, _ in most_frequent))


def _why_no_call(groups: Sequence[Group], earlier: bool) -> str:
    """Return what happened to the calls or, if no request to a model was seen, the agent's own error."""
    trajectories = _trajectories(groups)
    failed = [trajectory for trajectory in trajectories if trajectory.error]
    if unrecorded := {outcome: counts for outcome, counts in _unrecorded(groups).items() if counts}:
        calls = sum(counts.total() for counts in unrecorded.values())
        place = next((f" (at {t.error_at})" for t in failed if t.error_at), "")
        reasons = [_describe(*item) for item in unrecorded.items()] + [TO_DO] * ("refused" in unrecorded)
        return f"none of {calls} model calls was answered{place}: {'; '.join(reasons)}"
    if len(failed) < len(trajectories):
        some = f"; {len(failed)} rollouts failed, the first with {failure(failed[0])}" if failed else ""
        reason = CACHED if earlier else f"the agent's {NOT_REDIRECTED}"
        return f"no model call was recorded in {len(trajectories)} rollouts: {reason}{some}"
    first = str(failed[0].error)
    reason = (
        f"{failure(failed[0])}: all {len(failed)} rollouts failed before a model call was recorded; this is the first"
    )
    if key := re.search(r"\b[A-Z_]+_API_KEY\b", first):
        return f"{reason}. If it is the key of the model's client, any text works: set {key[0]}=unused"
    return f"{reason}. If a model call failed, the agent's {NOT_REDIRECTED}" if _may_be_a_clients(first) else reason


def _may_be_a_clients(error: str) -> bool:
    """Whether a client library may have raised this; Python's own errors, except for connections, come from the agent."""
    kind = getattr(builtins, error.partition(":")[0], None)
    return kind is None or issubclass(kind, ConnectionError | TimeoutError)
