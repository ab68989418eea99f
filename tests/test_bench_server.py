"""The load benchmark of the server at a toy size, so that it cannot rot. No timing is looked at."""

import sys

import pytest

from bench import server

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(sys.platform != "linux", reason="CPU and memory are read from /proc"),
]


@pytest.mark.parametrize("calls", [0, 2])
def test_every_episode_of_every_worker_is_stored_once_and_the_tables_are_printed(capsys, calls):
    server.main(server.parse(["--workers", "6", "--episodes", "40", "--processes", "2", "--calls", str(calls)]))
    said = capsys.readouterr().out
    assert "episodes, each stored once" in said and ("a model call, one agent alone" in said) == bool(calls)
