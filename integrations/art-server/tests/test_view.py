"""``art view``: who may ask, what is served, and what is never loaded."""

import asyncio
import hashlib
import os
import re
import runpy
import signal
import sys
from pathlib import Path

import httpx
import pytest
import typer
from fastapi import FastAPI
from recorded_runs import record
from typer.testing import CliRunner

import art_server
from art_server.folders import RunFolders
from art_server.pages import STATIC
from art_server.read_routes import read_routes
from art_server.view import view_app

CODE = "import typer; from art_server.view import view; typer.run(view)"
EVERYTHING = """
import asyncio, sys
import httpx
from art_server.folders import RunFolders
from art_server.view import view_app

async def main(folder):
    app = view_app(RunFolders(folder))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as http:
        one = "/api/runs/run/trajectories/s1-t2-1"
        for path in ("/", "/api/runs", "/api/runs/run", one, f"{one}/calls/0/tokens?prompt=8", "/api/runs/run/checkpoints"):
            response = await http.get(path)
            assert response.status_code == 200, (path, response.text)

asyncio.run(main(sys.argv[1]))
print(sorted({"torch", "transformers", "art_embedded.engine", "art_core.learner.torch_learner"} & set(sys.modules)))
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    return record(tmp_path_factory.mktemp("runs") / "run")


def client(folder, address="http://127.0.0.1:8200"):
    return httpx.AsyncClient(transport=httpx.ASGITransport(view_app(RunFolders(folder))), base_url=address)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8200", 200),
        ("localhost:99", 200),
        ("[::1]:8200", 200),
        ("evil.example", 400),
        ("127.0.0.1.evil.example", 400),
        ("", 400),
    ],
)
async def test_only_this_machines_own_names_are_answered(recorded, host, status):
    async with client(recorded) as http:
        for path in ("/", "/api/runs", "/api/runs/run/trajectories"):
            assert (await http.get(path, headers={"host": host})).status_code == status


async def test_nothing_but_reading_is_offered(recorded):
    async with client(recorded) as http:
        for method in ("POST", "PUT", "PATCH", "DELETE"):
            for path in ("/", "/api/runs", "/api/runs/run", "/api/runs/run/trajectories/s1-t2-1"):
                assert (await http.request(method, path)).status_code == 405
        schema = (await http.get("/openapi.json")).json()
    assert {method for path in schema["paths"].values() for method in path} == {"get"}
    for path, methods in schema["paths"].items():
        assert methods["get"]["responses"]["200"]["content"]["application/json"]["schema"], path


async def test_pages_may_run_their_own_scripts_only(recorded):
    async with client(recorded) as http:
        page = await http.get("/")
        policy = page.headers["content-security-policy"]
        assert "script-src 'self'" in policy and "unsafe" not in policy and "default-src 'none'" in policy
        assert page.headers["x-content-type-options"] == "nosniff"
        assert "<script>" not in page.text and not re.search(r"\son\w+=|\sstyle=", page.text)
        for name in ("../view.py", "%2e%2e/view.py", "..%2fview.py", "/etc/passwd", "css", "js/"):
            assert (await http.get(f"/{name}")).status_code == 404
        assert (await http.get("/js/app.js")).headers["content-type"].startswith("text/javascript")


def test_the_pages_load_nothing_from_elsewhere_and_insert_text_only():
    for path in STATIC.rglob("*.*"):
        if path.parent.name == "vendor":
            continue
        text = path.read_text()
        if path.suffix != ".svg":
            assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), path
        for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
            assert way not in text, f"{path.name} has {way}"
        assert len(text.splitlines()) <= 400, path


def test_the_chart_library_is_the_one_that_was_pinned():
    script = runpy.run_path(str(Path(art_server.__file__).parent.parent / "vendor_uplot.py"), run_name="pinned")
    for name, digest in script["FILES"].values():
        assert hashlib.sha256((STATIC / "vendor" / name).read_bytes()).hexdigest() == digest


@pytest.mark.system
async def test_looking_at_a_run_loads_neither_torch_nor_an_engine(recorded):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", EVERYTHING, str(recorded), stdout=asyncio.subprocess.PIPE
    )
    assert (await process.communicate())[0].decode().strip() == "[]"


@pytest.mark.smoke
@pytest.mark.system
async def test_the_command_says_its_address_and_ends_with_ctrl_c(recorded):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CODE, str(recorded), "--port", "0", "--no-browser", stderr=asyncio.subprocess.PIPE
    )
    line = (await process.stderr.readline()).decode()
    address = re.search(r"http://127\.0\.0\.1:\d+/", line)[0]
    assert str(recorded) in line
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        assert (await http.get(f"{address}api/runs")).json()["items"][0]["name"] == "run"
        assert "<title>art</title>" in (await http.get(address)).text
    process.send_signal(signal.SIGINT)
    said = (await process.communicate())[1].decode()
    assert process.returncode in (0, -signal.SIGINT, 130) and "Traceback" not in said, said


BROWSER = f"""#!{sys.executable}
import sys, urllib.request
opener = urllib.request.build_opener(urllib.request.ProxyHandler({{}}))
try:
    print("the browser got", opener.open(sys.argv[1], timeout=30).status, flush=True)
except OSError as error:
    print("the browser got", error, flush=True)
"""


async def view_with_a_browser(recorded, tmp_path, name, **env):
    """Start the command where this browser is the only one, and return the process and its address."""
    (tmp_path / name).write_text(BROWSER)
    (tmp_path / name).chmod(0o755)
    without = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
    env = {**{key: value for key, value in os.environ.items() if key not in without}, "TERM": "xterm", **env}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CODE, str(recorded), "--port", "0", env={**env, "PATH": str(tmp_path)},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    return process, re.search(r"http://127\.0\.0\.1:\d+/", (await process.stderr.readline()).decode())[0]


@pytest.mark.system
async def test_a_browser_whose_command_lasts_until_it_is_closed_gets_the_page(recorded, tmp_path):
    process, _ = await view_with_a_browser(recorded, tmp_path, "own-browser", BROWSER=str(tmp_path / "own-browser"))
    assert await process.stdout.readline() == b"the browser got 200\n"
    process.send_signal(signal.SIGINT)
    await process.communicate()


@pytest.mark.system
@pytest.mark.parametrize("named", [False, True])
async def test_a_browser_of_the_console_is_not_opened(recorded, tmp_path, named):
    own = {"BROWSER": str(tmp_path / "w3m")} if named else {}
    process, address = await view_with_a_browser(recorded, tmp_path, "w3m", **own)
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        assert (await http.get(f"{address}api/runs")).status_code == 200
    process.send_signal(signal.SIGINT)
    assert (await process.communicate())[0] == b""


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.com", "8.8.8.8"])
def test_an_address_that_others_can_reach_is_refused(recorded, host):
    found = CliRunner().invoke(app_with_view(), ["view", str(recorded), "--host", host, "--no-browser"])
    assert found.exit_code == 2 and "other machines" in " ".join(found.output.split())


def test_a_folder_without_runs_is_refused_in_words(tmp_path):
    found = CliRunner().invoke(app_with_view(), ["view", str(tmp_path), "--no-browser"])
    assert found.exit_code == 2 and "run.sqlite" in found.output


def test_the_help_has_an_example():
    said = CliRunner().invoke(app_with_view(), ["view", "--help"], env={"COLUMNS": "200"}).output
    assert "art view runs/my-run" in said and "--no-browser" in said


def app_with_view():
    app = typer.Typer(rich_markup_mode="markdown")

    @app.command()
    def other() -> None:
        """Makes the app one of several commands."""

    art_server.register_commands(app)
    return app


@pytest.mark.system
def test_whatever_is_asked_nothing_breaks(recorded):
    """What the schema allows, and what it does not, made up by schemathesis."""
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import response_schema_conformance

    app = FastAPI()
    app.include_router(read_routes(RunFolders(recorded)))
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    for operation in schema.get_all_operations():

        @given(case=operation.ok().as_strategy())
        @settings(max_examples=25, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
        def ask(case):
            if "run" in case.path_parameters and len(case.path_parameters["run"]) % 2:
                case.path_parameters["run"] = "run"
            case.call_and_validate(checks=[not_a_server_error, response_schema_conformance])

        ask()


async def test_rounds_are_listed_with_their_runs_and_the_link_to_one_of_them_is_no_run_of_its_own(tmp_path):
    record(tmp_path / "round-001")
    (tmp_path / "current").symlink_to("round-001")
    (tmp_path / "rounds.json").write_text(
        '[{"name": "round-001", "state": "accepted", "interval": [0.1], "new": NaN}, 3]'
    )
    async with client(tmp_path) as http:
        listed = (await http.get("/api/runs")).json()
        assert [run["name"] for run in listed["items"]] == ["round-001"]
        [round_] = listed["rounds"]
        assert (round_["name"], round_["state"], round_["new"], round_["low"]) == ("round-001", "accepted", 0, 0.1)
        for broken in ("{", "5", "\x00"):
            (tmp_path / "rounds.json").write_text(broken)
            assert (await http.get("/api/runs")).json()["rounds"] == []


async def test_a_list_of_runs_reads_their_folder_once(tmp_path):
    class Once(RunFolders):
        def __getitem__(self, name):
            raise AssertionError(f"{name} was looked up again")

    for name in ("first", "second"):
        record(tmp_path / name)
    app = FastAPI()
    app.include_router(read_routes(Once(tmp_path)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as http:
        listed = (await http.get("/api/runs?limit=1&offset=1")).json()
    assert (listed["total"], [run["name"] for run in listed["items"]]) == (2, ["first"])
