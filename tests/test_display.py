"""What a person is shown while runs go on."""

import io

from rich.console import Console

from art_core.loop.display import ENGINE, Display


def test_of_displays_that_are_shown_at_a_time_one_says_what_the_engine_logs_also_where_another_ends_first():
    told = io.StringIO()
    first, second = (Display(console=Console(file=told, width=200)) for _ in range(2))
    with second:
        with first:
            ENGINE.info("both are shown")
        ENGINE.info("one is left")
    ENGINE.info("nobody looks")
    assert told.getvalue().splitlines() == ["both are shown", "one is left"]
    told.truncate(told.seek(0))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    ENGINE.info("the first has ended")
    second.__exit__(None, None, None)
    assert told.getvalue().splitlines() == ["the first has ended"]
