"""The listening socket, its address, and the server's settings."""

import errno
import socket

import pytest

from art_core.capture import LimitedHeadProtocol, address_of, http_server, is_loopback, listen
from art_core.errors import ConfigError


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("::1", "http://[::1]:80"),
        ("node-3", "http://node-3:80"),
    ],
)
def test_the_address_is_one_that_this_machine_can_reach(host, address):
    assert address_of(host, 80) == address


def test_only_names_of_this_machine_are_loopback():
    assert all(is_loopback(host) for host in ("localhost", "127.0.0.1", "127.8.8.8", "::1"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "10.0.0.1", "::", "node-3", "", None))


def test_a_listener_accepts_connections_at_once_and_sends_without_delay():
    with listen("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP and listener.type == socket.SOCK_STREAM
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
        with socket.create_connection(listener.getsockname(), timeout=5):
            pass
        with pytest.raises(ConfigError, match="is in use"):
            listen("127.0.0.1", listener.getsockname()[1])


def test_a_host_with_colons_is_ipv6(monkeypatch):
    families = []

    class Taken(socket.socket):
        def __init__(self, family, *how):
            families.append(family)
            super().__init__(socket.AF_INET, *how)

        def bind(self, address):
            raise OSError(errno.EADDRINUSE, "in use")

    monkeypatch.setattr(socket, "socket", Taken)
    for host in ("::1", "127.0.0.1"):
        with pytest.raises(ConfigError, match=f"port 80 on {host} is in use"):
            listen(host, 80)
    assert families == [socket.AF_INET6, socket.AF_INET]


def test_a_host_of_another_machine_is_refused():
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1 port 0: "):
        listen("192.0.2.1", 0)


def test_the_server_trusts_no_proxy_logs_nothing_and_drains_briefly():
    config = http_server(lambda *_: None, drain=7).config
    assert (config.proxy_headers, config.access_log, config.lifespan, config.ws) == (False, False, "off", "none")
    assert (config.log_config, config.log_level, config.http) == (None, "critical", LimitedHeadProtocol)
    assert config.timeout_keep_alive > 5, "as long as clients keep an unused connection"
    assert config.timeout_graceful_shutdown == 7 and http_server(lambda *_: None).config.timeout_graceful_shutdown == 1
