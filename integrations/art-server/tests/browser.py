"""Prints the path of the Chromium for the dashboard's tests; with --install, installs one if necessary.

    python browser.py [--install]

Candidates: $ART_CHROMIUM, one on PATH, Playwright's own.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
MAC = Path("/Applications/Google Chrome.app/Contents/MacOS/Google Chrome")


def find() -> str | None:
    """Return the path of a browser; None if there is none."""
    if chromium := os.environ.get("ART_CHROMIUM"):
        if path := shutil.which(chromium):
            return path
        raise SystemExit(f"can't run ART_CHROMIUM={chromium}; set it to the path of a Chromium, or unset it")
    if path := next(filter(None, map(shutil.which, NAMES)), None):
        return path
    return str(MAC) if MAC.is_file() else find_playwright_chromium()


def find_playwright_chromium() -> str | None:
    """Return the path of the browser from ``playwright install``; None if it isn't installed."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = playwright.chromium.executable_path
    return path if os.access(path, os.X_OK) else None


def install() -> None:
    """Install a browser: the distribution's if possible, else Playwright's."""
    root = hasattr(os, "geteuid") and os.geteuid() == 0
    if root and shutil.which("apt-get"):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["apt-get", "update"], ["apt-get", "install", "-y", "--no-install-recommends", "chromium"]):
            if subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False).returncode:
                break
        else:
            return
    subprocess.run([sys.executable, "-m", "playwright", "install", "chromium"], check=False)


def main() -> None:
    path = find()
    if path is None and "--install" in sys.argv[1:]:
        install()
        path = find()
    if path is None:
        raise SystemExit("no Chromium to test the dashboard with: run `make browser`, or set ART_CHROMIUM to its path")
    print(path)


if __name__ == "__main__":
    main()
