"""The dashboard's pages in a real browser; whatever a page complains about fails the test."""

import subprocess
import sys
import threading
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import uvicorn

from art_server.folders import RunFolders
from art_server.view import view_app

BROWSER = Path(__file__).parent.parent / "integrations" / "art-server" / "tests" / "browser.py"
"""Finds it."""
OPTIONS = [
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    found = subprocess.run([sys.executable, str(BROWSER)], capture_output=True, text=True, check=False)
    assert not found.returncode, found.stderr
    with sync_playwright() as playwright:
        # The sandbox asks for rights that containers lack; the pages are our own.
        started = playwright.chromium.launch(
            executable_path=found.stdout.strip(), args=[*OPTIONS, "--no-sandbox"], headless=True
        )
        yield started
        started.close()


class Desk:
    """Serves dashboards and opens them; ``wrong`` is what any page complained about."""

    def __init__(self, browser):
        self.browser = browser
        self.wrong, self.contexts, self.servers = [], [], ExitStack()

    def view(self, folder):
        return self.serve(view_app(RunFolders(folder)))

    def serve(self, app):
        return self.servers.enter_context(served(app))

    def open(self, address, **settings):
        context = self.browser.new_context(**{"viewport": {"width": 1280, "height": 860}, **settings})
        self.contexts.append(context)
        context.set_default_timeout(20_000)
        page = context.new_page()
        page.on("console", lambda it: self.wrong.append(it.text) if it.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.wrong.append(str(error)))
        own = address.partition("#")[0]
        page.on("request", lambda it: None if it.url.startswith(own) else self.wrong.append(f"asked {it.url}"))
        page.goto(address)
        return page


@pytest.fixture
def desk(browser):
    desk = Desk(browser)
    yield desk
    for context in desk.contexts:  # before the servers end, so that no page asks one that is gone
        context.close()
    desk.servers.close()
    assert desk.wrong == [], desk.wrong


@contextmanager
def served(app):
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off"))
    listening = server.config.bind_socket()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join()
        listening.close()
