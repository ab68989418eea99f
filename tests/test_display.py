"""What is shown while a run works."""

import io

from rich.console import Console

from art_core.loop.display import ENGINE_LOG, Display


def test_one_of_several_open_displays_shows_the_engines_messages_in_whatever_order_they_close():
    output = io.StringIO()
    first, second = (Display(console=Console(file=output, width=200)) for _ in range(2))
    with second:
        with first:
            ENGINE_LOG.info("both are open")
        ENGINE_LOG.info("one is open")
    ENGINE_LOG.info("none is open")
    assert output.getvalue().splitlines() == ["both are open", "one is open"]
    output.truncate(output.seek(0))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    ENGINE_LOG.info("the first is closed")
    second.__exit__(None, None, None)
    assert output.getvalue().splitlines() == ["the first is closed"]


def test_without_a_terminal_long_phases_say_how_far_they_are(monkeypatch):
    written = io.StringIO()
    screen = Display(console=Console(file=written))
    screen.phase("evaluating, before: temperature 0.6", 3)
    screen.advance()
    monkeypatch.setattr("art_core.loop.display.LINE_SECONDS", 0.0)
    screen.advance()
    assert written.getvalue() == "evaluating, before: temperature 0.6\nevaluating, before: temperature 0.6: 2 of 3\n"
