"""Which Chromium the dashboard is tested in: prints its path, and with --install gets one where there is none.

    python browser.py [--install]

Taken is $ART_CHROMIUM, one on PATH, or Playwright's own.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
MAC = Path("/Applications/Google Chrome.app/Contents/MacOS/Google Chrome")


def found() -> str | None:
    """Return the path of a browser."""
    if given := os.environ.get("ART_CHROMIUM"):
        if path := shutil.which(given):
            return path
        raise SystemExit(f"ART_CHROMIUM={given} cannot be run; give the path of a Chromium, or unset it")
    if path := next(filter(None, map(shutil.which, NAMES)), None):
        return path
    return str(MAC) if MAC.is_file() else playwrights_own()


def playwrights_own() -> str | None:
    """Return the path of the browser that ``playwright install`` put there."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = playwright.chromium.executable_path
    return path if os.access(path, os.X_OK) else None


def install() -> None:
    """Get a browser: the distribution's where that can be, else Playwright's."""
    root = hasattr(os, "geteuid") and os.geteuid() == 0
    if root and shutil.which("apt-get"):
        quietly = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["apt-get", "update"], ["apt-get", "install", "-y", "--no-install-recommends", "chromium"]):
            if subprocess.run(command, env=quietly, stdout=subprocess.DEVNULL, check=False).returncode:
                break
        else:
            return
    subprocess.run([sys.executable, "-m", "playwright", "install", "chromium"], check=False)


def main() -> None:
    path = found()
    if path is None and "--install" in sys.argv[1:]:
        install()
        path = found()
    if path is None:
        raise SystemExit(
            "there is no Chromium to test the dashboard in: run `make browser`, or set ART_CHROMIUM to the path of one"
        )
    print(path)


if __name__ == "__main__":
    main()
