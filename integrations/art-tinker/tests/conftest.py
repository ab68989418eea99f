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
