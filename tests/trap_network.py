"""A network without a way out: all names of other machines lead here, where a provider answers over TLS.

With it an agent is made and run as its user would: with the provider's own address, and with keys that look real. As a plugin
of pytest it is loaded before any HTTP client, because some read the authorities as they are imported.
"""

import atexit
import contextlib
import ipaddress
import os
import socket
import ssl
import tempfile
from pathlib import Path

import pytest
import trustme

from art_core import destination
from art_core.attribution.providers import at_provider
from art_core.testing import provider

HOST = "api.openai.com"
"""Whom the agents ask. Which provider it is makes no difference to what is redirected."""
KEYS = {
    "OPENAI_API_KEY": "sk-proj-" + "Ab3" * 40,
    "ANTHROPIC_API_KEY": "sk-ant-api03-" + "Cd5" * 30,
    "GEMINI_API_KEY": "AIza" + "Ef7" * 12,
    "GROQ_API_KEY": "gsk_" + "Gh9" * 17,
    # With a key of its own a request is not signed, whose signatures differ from second to second.
    "AWS_BEARER_TOKEN_BEDROCK": "bedrock-api-key-" + "Ij2" * 30,
}
# The developer's own proxies, accounts and addresses would change where requests go, and which headers they have.
for _name in [name for name in os.environ if name.lower().endswith("_proxy") or name.startswith("OPENAI_")]:
    del os.environ[_name]
os.environ["NO_PROXY"] = "127.0.0.1,localhost"  # also against a proxy of the system's settings
_authority = trustme.CA(key_type=trustme.KeyType.ECDSA)
_folder = tempfile.TemporaryDirectory()
atexit.register(_folder.cleanup)
AUTHORITY = Path(_folder.name) / "authority.pem"
_authority.cert_pem.write_to_path(AUTHORITY)
# Every HTTP client reads all authorities when it is made: 25 ms, though most talk to 127.0.0.1 without TLS. One takes less
# than 1 ms. Child processes inherit the variables.
os.environ |= dict.fromkeys(("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "AWS_CA_BUNDLE"), str(AUTHORITY))


@contextlib.contextmanager
def trapped():
    """No rollout may so much as look up a provider in this block, and nobody another one than ``HOST``."""
    resolve, asked = socket.getaddrinfo, []

    def resolve_here(host, *args, **kwargs):
        name = host.decode() if isinstance(host, bytes) else host
        if at_provider(name):
            asked.append((name, destination("any") is not None))
        return resolve("127.0.0.1" if name and not _is_local(name) else host, *args, **kwargs)

    socket.getaddrinfo = resolve_here
    try:
        yield
    finally:
        socket.getaddrinfo = resolve
    assert [name for name, in_rollout in asked if in_rollout] == [], "nothing leaves during rollouts"
    assert {name for name, _ in asked} <= {HOST}, "an agent asks nobody but its provider"


@pytest.fixture
def trap_network(monkeypatch):
    """Let ``check_adapter`` give agents the address of a provider in this network."""
    for name, key in KEYS.items():
        monkeypatch.setenv(name, key)
    http_server = provider.http_server

    def server_with_tls(app):
        server = http_server(app)
        server.config.ssl_context_factory = lambda config, default: _tls()
        return server

    monkeypatch.setattr(provider, "http_server", server_with_tls)
    monkeypatch.setattr(provider, "address_of", lambda host, port: f"https://{HOST}:{port}")
    with trapped():
        yield


def _is_local(name):
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _tls():
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    _authority.issue_cert(HOST).configure_cert(context)
    return context
