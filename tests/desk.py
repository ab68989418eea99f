"""The dashboard in a real browser; any error or warning that a page logs fails the test."""

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from http_server import serving_app

from art_server.folders import RunFolders
from art_server.view import view_app

BROWSER = Path(__file__).parent.parent / "integrations" / "art-server" / "tests" / "browser.py"
"""Prints the path of a Chromium."""
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

    result = subprocess.run([sys.executable, str(BROWSER)], capture_output=True, text=True, check=False)
    assert not result.returncode, result.stderr
    with sync_playwright() as playwright:
        # The sandbox needs privileges that containers lack; the pages are our own.
        chromium = playwright.chromium.launch(
            executable_path=result.stdout.strip(), args=[*OPTIONS, "--no-sandbox"], headless=True
        )
        yield chromium
        chromium.close()


class Desk:
    """Serves dashboards and opens them; ``problems`` are the errors and warnings of all pages."""

    def __init__(self, browser):
        self.browser = browser
        self.problems, self.contexts, self.servers = [], [], ExitStack()

    def view(self, folder):
        return self.serve(view_app(RunFolders(folder)))

    def serve(self, app):
        return self.servers.enter_context(serving_app(app)) + "/"

    def open(self, address, **settings):
        context = self.browser.new_context(**{"viewport": {"width": 1280, "height": 860}, **settings})
        self.contexts.append(context)
        context.set_default_timeout(20_000)
        page = context.new_page()
        page.on(
            "console",
            lambda message: self.problems.append(message.text) if message.type in ("error", "warning") else None,
        )
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        own = address.partition("#")[0]
        page.on(
            "request",
            lambda request: None if request.url.startswith(own) else self.problems.append(f"requested {request.url}"),
        )
        page.goto(address)
        return page


@pytest.fixture
def desk(browser):
    desk = Desk(browser)
    yield desk
    for context in desk.contexts:  # before the servers stop, so that no page polls a stopped server
        context.close()
    desk.servers.close()
    assert desk.problems == [], desk.problems
