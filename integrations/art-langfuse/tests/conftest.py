"""A Langfuse project on this machine, named by the environment."""

import pytest
from langfuse_server import PUBLIC, SECRET, langfuse_server


@pytest.fixture
def server(monkeypatch):
    with langfuse_server() as server:
        monkeypatch.setenv("LANGFUSE_PUBLIC_KEY", PUBLIC)
        monkeypatch.setenv("LANGFUSE_SECRET_KEY", SECRET)
        monkeypatch.setenv("LANGFUSE_HOST", server.url)
        yield server
