import socket
from collections.abc import Iterator

import pytest
from skyrl_server import SkyrlServer


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SkyrlServer]:
    """SkyRL's server, which takes half a minute to start, at the address that the SDK takes from the environment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = SkyrlServer(tmp_path_factory.mktemp("skyrl"), port)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TINKER_BASE_URL", running.url)
        environment.setenv("TINKER_API_KEY", "tml-of-no-account")
        yield running
    running.stop()
