"""Gathering: failures are data up to a budget, and a cancellation never is."""

import asyncio

import pytest

import art_openpipe as art


async def ok(reward=1.0):
    return art.Trajectory(reward=reward)


async def bad():
    raise ValueError("broken")


def groups_of(*rollouts):
    return (art.TrajectoryGroup([it() for it in several]) for several in rollouts)


async def test_groups_come_in_order_with_what_after_each_makes_of_them():
    async def after(group):
        return {1.0: group, 2.0: None, 3.0: [group, group]}[group.trajectories[0].reward]

    makers = [[lambda r=r: ok(r)] for r in (1.0, 2.0, 3.0)]
    groups = await art.gather_trajectory_groups(groups_of(*makers), after_each=after, pbar_desc=None)
    assert [group.trajectories[0].reward for group in groups] == [1.0, 3.0, 3.0]


async def test_one_failure_too_many_is_raised_and_ends_the_others():
    ended = asyncio.Event()

    async def long():
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(ValueError, match="broken"):
        await art.gather_trajectory_groups(groups_of([long, bad]), pbar_desc=None)
    assert ended.is_set()


@pytest.mark.parametrize(
    ("allowed", "failures", "fine"), [(1, 1, True), (1, 2, False), (0.5, 2, True), (0.5, 3, False)]
)
async def test_failures_within_the_budget_are_exceptions_of_their_group(allowed, failures, fine):
    rollouts = [bad] * failures + [ok] * (4 - failures)
    gathering = art.gather_trajectory_groups(groups_of(rollouts), max_exceptions=allowed, pbar_desc=None)
    if not fine:
        with pytest.raises(ValueError, match="broken"):
            await gathering
        return
    [group] = await gathering
    assert len(group) == 4 - failures and len(group.exceptions) == failures
    assert all("broken" in it.traceback for it in group.exceptions)


async def test_a_cancellation_is_never_counted_as_a_failure():
    async def cancelled():
        raise asyncio.CancelledError

    for gathering in (
        art.gather_trajectory_groups(groups_of([cancelled, ok]), max_exceptions=10, pbar_desc=None),
        art.gather_trajectories([cancelled(), ok()], max_exceptions=10, pbar_desc=None),
    ):
        with pytest.raises(asyncio.CancelledError):
            await gathering


async def test_gathered_trajectories_come_with_the_exceptions_in_their_places():
    async def several():
        return [art.Trajectory(), art.Trajectory()]

    found = await art.gather_trajectories([ok(), bad(), several()], max_exceptions=1, pbar_desc=None)
    assert found[0].reward == 1.0 and isinstance(found[1], ValueError) and len(found[2]) == 2


async def test_a_group_that_is_made_by_a_coroutine_is_gathered_too():
    async def group():
        return art.TrajectoryGroup([await ok()])

    async def none():
        raise KeyError("gone")

    [found] = await art.gather_trajectory_groups([group(), none()], max_exceptions=1, pbar_desc="two")
    assert len(found) == 1


async def test_batches_come_in_order_and_some_are_skipped():
    batches = art.trajectory_group_batches(
        (art.TrajectoryGroup([ok(r)]) for r in range(7)), batch_size=2, skip_batches=1, pbar_desc=None
    )
    assert [[g.trajectories[0].reward for g in batch] async for batch in batches] == [[2, 3], [4, 5], [6]]


async def test_no_number_of_failures_is_tolerated_once_the_model_cannot_be_reached():
    async def gone():
        raise art.LocalServingUnavailableError("gone")

    with pytest.raises(art.LocalServingUnavailableError):
        await art.gather_trajectory_groups(groups_of([gone, ok]), max_exceptions=99, pbar_desc=None)


async def test_a_group_fails_with_its_first_failure_unless_it_is_to_keep_them():
    with pytest.raises(ValueError, match="broken"):
        await art.trajectory_group([ok(), bad()])
    first, error = art.Trajectory(reward=5.0), KeyError("own")
    group = await art.trajectory_group([first, bad(), error, ok()], return_exceptions=True, metadata={"id": 1})
    assert [it.reward for it in group] == [5.0, 1.0] and group.metadata == {"id": 1}
    assert sorted(it.type for it in group.exceptions) == ["KeyError", "ValueError"]
