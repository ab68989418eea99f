"""The files under deploy/, as far as they can be checked without a container engine: what they name is there."""

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DEPLOY = Path(__file__).parents[1] / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()


def instructions():
    """Yield (instruction, arguments) with continued lines joined."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE).replace("\\\n", " ")
    for line in filter(str.strip, text.splitlines()):
        name, _, rest = line.partition(" ")
        yield name, rest.strip()


def copied():
    """Return what is copied from the checkout."""
    return [
        source
        for name, rest in instructions()
        if name == "COPY" and "--from" not in rest
        for source in shlex.split(rest)[:-1]
    ]


def test_everything_that_is_copied_is_there_and_not_ignored():
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert copied() and "integrations/art-server" in copied()
    for source in copied():
        assert (ROOT / source).exists(), source
        assert f"!{source}" in ignored, source


def test_what_the_build_of_a_package_needs_is_copied_before_it_is_installed():
    projects = re.findall(r"\./(integrations/\S+|plugins/\S+)", DOCKERFILE)
    assert projects and set(projects) <= set(copied())
    example = re.search(r'^EXAMPLE = "(\w+)/', (ROOT / "integrations" / "art-cli" / "hatch_build.py").read_text(), re.M)
    assert example[1] in copied()


def test_the_server_runs_as_a_user_of_no_rights_and_needs_a_token():
    by_name = dict(instructions())
    assert by_name["USER"] == "10001" and "ART_SERVER_TOKEN" not in by_name["ENV"]
    assert "HEALTHCHECK" in by_name and by_name["VOLUME"] == "/data" and "ART_SERVER_HOST=0.0.0.0" in by_name["ENV"]
    check = re.search(r'"-c",\s*"(.+)"\]', by_name["HEALTHCHECK"])[1]
    compile(check, "healthcheck", "exec")


def test_the_compose_file_names_what_is_there():
    yaml = pytest.importorskip("yaml")
    told = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for service in told["services"].values():
        assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        assert set(service["secrets"]) <= set(told["secrets"])
    assert told["services"]["worker"]["volumes"][0].startswith("${AGENT:?")  # no folder here has its app.py
    assert "art worker ws://server:8000" in " ".join(told["services"]["worker"]["entrypoint"])
