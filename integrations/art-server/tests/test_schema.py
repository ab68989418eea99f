"""The routes against their own OpenAPI schema, by schemathesis: no 5xx, and every answer is what the schema says."""

import asyncio
import itertools
import threading
from contextlib import suppress

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import negative_data_rejection
from served import application, serving

from art_core.testing import ScriptedAgent
from art_server import TrainingClient, connect

pytestmark = pytest.mark.system

BOUNDED = settings(derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), database=None)
STORED = {"key": ["stored", "scored", "learnt"], "place": [0, 1], "client_id": ["client_1"]}
"""Names of what is there, by path parameter: drawn ones would hardly ever meet any."""


@pytest.fixture(scope="module")
def api(tmp_path_factory):
    """The schema of a server that has a worker, groups, scores and a step."""
    address, ready, over = [], threading.Event(), threading.Event()

    async def serve():
        async with serving(application(tmp_path_factory.mktemp("schema") / "run", group_size=2)) as host:
            worker = asyncio.create_task(TrainingClient("client_1", f"ws://{host}", agent=ScriptedAgent()).run())
            async with connect(f"http://{host}") as run:
                groups = await run.collect(None, ["a", "b"], key="stored")
                rewards = itertools.count()
                scored = await run.score(groups, lambda trajectory: float(next(rewards)))
                await run.learn(scored)
            address.append(f"http://{host}")
            ready.set()
            await asyncio.to_thread(over.wait)
            worker.cancel()
            await asyncio.gather(worker, return_exceptions=True)

    thread = threading.Thread(target=asyncio.run, args=[serve()])
    thread.start()
    try:
        assert ready.wait(60)
        schema = schemathesis.openapi.from_url(f"{address[0]}/openapi.json")
        schema.hook("map_path_parameters")(_known)
        schema.hook("map_query")(_impatient)
        yield schema
    finally:
        over.set()
        thread.join(30)


_turn = itertools.count()


def _known(context, path_parameters):
    """Name what is there in two of three requests."""
    turn = next(_turn)
    if not path_parameters or turn % 3 == 2:
        return path_parameters
    return {
        name: STORED[name][turn % len(STORED[name])] if name in STORED else value
        for name, value in path_parameters.items()
    }


def _impatient(context, query):
    """Wait for no job's end."""
    return {**query, "wait": 0} if isinstance((query or {}).get("wait"), int | float) else query


def check(api, examples):
    """Ask every operation ``examples`` times as its schema wants it, and as often as it does not."""
    operations = [found.ok() for found in api.get_all_operations()]
    assert len(operations) > 5
    for operation in operations:
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):

            @settings(BOUNDED, max_examples=examples)
            @given(case=operation.as_strategy(generation_mode=mode))
            def ask(case):
                # Names are put in by hand, and queries may have parameters that nobody reads: no reason to refuse.
                case.call_and_validate(excluded_checks=[negative_data_rejection])

            with suppress(Unsatisfiable):  # one without parameters and body cannot be asked wrongly
                ask()


def test_every_route_answers_as_its_schema_says(api):
    check(api, 5)


@pytest.mark.engines
def test_every_route_answers_as_its_schema_says_to_many_questions(api):
    check(api, 25)
