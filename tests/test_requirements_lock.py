"""requirements-locked.txt and constraints.txt say the same, and every file that may be installed has its hash."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^([\w.-]+)==([^\s;\\]+)([^\n]*)\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.MULTILINE)


def name_of(text):
    return re.sub(r"[-_.]+", "-", text).lower()


def locked():
    text = (ROOT / "requirements-locked.txt").read_text()
    found = BLOCK.findall(text)
    assert "".join(f"{name}=={version}{more}\n{hashes}" for name, version, more, hashes in found) == text
    return {name_of(name): (version, hashes.count("sha256")) for name, version, _, hashes in found}


def test_everything_has_its_hash_and_the_version_that_was_tested():
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    tested = {name_of(name): version for name, version in pins.items()}
    found = locked()
    assert all(count for _, count in found.values())
    differ = {
        name: (version, tested[name]) for name, (version, _) in found.items() if tested.get(name, version) != version
    }
    assert differ == {}, "make lock"
    # What Linux needs for a GPU, other systems, and Pythons after 3.11.
    elsewhere = found.keys() - tested.keys()
    assert all(re.match("nvidia|cuda|triton|setuptools|appnope|pywin32|httpx2-jsfetch", name) for name in elsewhere), (
        "make lock"
    )


def test_it_has_all_that_is_asked_for_and_what_builds_it():
    dev = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["dev"]
    asked = {name_of(re.split(r"[\[=<>]", requirement)[0]) for requirement in dev}
    assert (asked | {"torch", "transformers", "hatchling", "editables", "aiohttp"}) - locked().keys() == set(), (
        "make lock"
    )


def test_there_are_files_for_every_machine_and_python_that_is_supported():
    found = locked()
    # Wheels for 3.11 to 3.13, Linux and macOS, two processors: at least twelve, and an archive of the source.
    assert all(found[name][1] >= 12 for name in ("torch", "numpy", "aiohttp", "orjson"))


@pytest.mark.system
def test_with_the_lock_not_even_pip_is_installed_without_a_hash():
    commands = ["make", "--always-make", "--dry-run", "setup"]
    plain, with_lock = (
        subprocess.run([*commands, *more], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for more in ([], ["LOCKED=1"])
    )
    assert "pip>=25.1" in plain and "--require-hashes" in with_lock and "pip>=25.1" not in with_lock
