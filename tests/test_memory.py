"""What loading large libraries does to Python's search for garbage."""

import gc

import pytest

from art_core.runtime.memory import no_garbage_collection


def test_nothing_is_searched_inside_and_what_was_made_there_counts_as_old():
    with no_garbage_collection():
        assert not gc.isenabled()
        made = [[] for _ in range(1000)]
    assert gc.isenabled()
    young = {id(it) for generation in (0, 1) for it in gc.get_objects(generation)}
    assert not young & {id(it) for it in made}
    assert not gc.get_freeze_count()


def test_the_search_is_on_again_after_an_import_that_fails():
    with pytest.raises(ImportError), no_garbage_collection():
        raise ImportError
    assert gc.isenabled()


def test_a_program_that_has_it_off_keeps_it_off():
    gc.disable()
    try:
        with no_garbage_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
