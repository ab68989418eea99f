import gc
from collections.abc import Iterator

import pytest

from bench.skyrl_server import SkyrlServer


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SkyrlServer]:
    """SkyRL's server, which takes half a minute to start, at the address that the SDK takes from the environment."""
    running = SkyrlServer(tmp_path_factory.mktemp("skyrl"))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TINKER_BASE_URL", running.url)
        environment.setenv("TINKER_API_KEY", "tml-of-no-account")
        yield running
    running.stop()


@pytest.fixture(autouse=True)
def _collected(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let the SDK's connections, which it leaves to the garbage collector, go with the test that made them."""
    yield
    if "server" in request.fixturenames:
        gc.collect()
