"""Garbage collection while large libraries are imported."""

import gc

import pytest

from art_core.runtime.memory import no_garbage_collection


@pytest.fixture
def nothing_frozen():
    """As in a program: the tests freeze what they have imported."""
    gc.unfreeze()
    yield
    gc.freeze()


def test_nothing_is_collected_inside_and_new_objects_count_as_old(nothing_frozen):
    with no_garbage_collection():
        assert not gc.isenabled()
        objects = [[] for _ in range(1000)]
    assert gc.isenabled()
    young = {id(it) for generation in (0, 1) for it in gc.get_objects(generation)}
    assert not young & {id(it) for it in objects}
    assert not gc.get_freeze_count()


def test_collection_is_on_again_after_an_import_that_fails():
    with pytest.raises(ImportError), no_garbage_collection():
        raise ImportError
    assert gc.isenabled()


def test_a_program_that_turned_it_off_keeps_it_off():
    gc.disable()
    try:
        with no_garbage_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
