"""The network of the adapters' tests notices what it is there for."""

import asyncio
import socket
import threading

import pytest
from trap_network import HOST, trapped

from art_core.plugin_api import inside_rollout
from art_core.types import RolloutAddress

ADDRESS = RolloutAddress("r", "http://127.0.0.1:9/rollouts/r/v1", "key", "policy")


def look_up(host):
    socket.getaddrinfo(host, 443)


def in_a_thread(host):
    thread = threading.Thread(target=look_up, args=[host])
    thread.start()
    thread.join()


def in_a_loop(host):
    async def resolve():
        await asyncio.get_running_loop().getaddrinfo(host, 443)

    asyncio.run(resolve())


@pytest.mark.parametrize("look", [look_up, in_a_thread, in_a_loop])
def test_a_rollout_that_looks_a_provider_up_is_noticed(look):
    with pytest.raises(AssertionError, match="nothing leaves during rollouts"), trapped(), inside_rollout(ADDRESS):
        look(HOST)


def test_a_call_to_another_provider_is_noticed():
    with pytest.raises(AssertionError, match="nobody but its provider"), trapped():
        look_up("api.anthropic.com")


def test_its_own_provider_is_asked_outside_rollouts():
    with trapped():
        look_up(HOST)
        assert socket.getaddrinfo(HOST, 443)[0][4] == ("127.0.0.1", 443)
