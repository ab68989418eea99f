"""``art tasks from-mcp`` on three public MCP servers, and ten steps of training on what it writes, with a scripted provider.

    python -m bench.from_mcp                     time and sqlite (by uvx), filesystem (by npx)
    python -m bench.from_mcp time --steps 2

The provider stands in for a language model. As author it knows the server's data, and one task in nine can't be solved; as
solver it calls the right tool; as judge it looks for that tool and its result. So this shows that servers, tools, attempts and
training work together, and nothing of how well a model writes tasks.
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import subprocess
import sys
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from art_core.testing import FakeEngine
from art_core.testing.provider import PlainProvider
from bench.tables import table

CITIES = {
    "Tokyo": "Asia/Tokyo", "Rome": "Europe/Rome", "Lima": "America/Lima", "Cairo": "Africa/Cairo", "Sydney": "Australia/Sydney",
    "Paris": "Europe/Paris", "Delhi": "Asia/Kolkata", "Toronto": "America/Toronto", "Lagos": "Africa/Lagos",
    "Auckland": "Pacific/Auckland", "Oslo": "Europe/Oslo", "Seoul": "Asia/Seoul", "Athens": "Europe/Athens",
    "Nairobi": "Africa/Nairobi", "Madrid": "Europe/Madrid", "Denver": "America/Denver",
}  # fmt: skip
PASSED_ON = ("UV_", "PIP_", "NPM_CONFIG_", "npm_config_", "SSL_", "NODE_EXTRA_CA_CERTS")
"""Beginnings of variables that uvx and npx need to find a package index."""


@dataclass(frozen=True)
class Scripted:
    """A task, the call that solves it, and what the tool's result contains then; no call if nothing does."""

    text: str
    tool: str
    arguments: dict[str, Any]
    found: str


def time_tasks(folder: Path) -> list[Scripted]:
    """Current times, and conversions."""
    names = list(CITIES)
    now = [
        Scripted(f"What time is it in {it} now?", "get_current_time", {"timezone": zone}, zone)
        for it, zone in CITIES.items()
    ]
    pairs = zip(names, names[1:] + names[:1], strict=True)
    return now + [
        Scripted(
            f"A call is planned for {8 + number % 10}:30 in {a}. When is that in {b}?", "convert_time",
            {"source_timezone": CITIES[a], "time": f"{8 + number % 10:02}:30", "target_timezone": CITIES[b]}, CITIES[b],
        )
        for number, (a, b) in enumerate(pairs)
    ]  # fmt: skip


def sqlite_tasks(folder: Path) -> list[Scripted]:
    """Questions about a table of orders."""
    with closing(sqlite3.connect(folder / "shop.db")) as db, db:
        db.execute("CREATE TABLE orders (id INTEGER, customer TEXT, city TEXT, total INTEGER)")
        rows = [(number, f"customer {number}", city, 100 + 7 * number) for number, city in enumerate(CITIES)]
        db.executemany("INSERT INTO orders VALUES (?, ?, ?, ?)", rows)
    by_city = [
        Scripted(
            f"What is the total of the order from {city}?", "read_query",
            {"query": f"SELECT total FROM orders WHERE city = '{city}'"}, str(total),
        )
        for _, _, city, total in rows
    ]  # fmt: skip
    by_number = [
        Scripted(
            f"Who placed order {number}?",
            "read_query",
            {"query": f"SELECT customer FROM orders WHERE id = {number}"},
            name,
        )
        for number, name, _, _ in rows
    ]
    return by_city + by_number


def file_tasks(folder: Path) -> list[Scripted]:
    """Questions about small files."""
    tasks = []
    for number, city in enumerate(CITIES):
        (folder / f"{city.lower()}.txt").write_text(f"The office in {city} has {20 + number} desks.\n")
        path = str(folder / f"{city.lower()}.txt")
        tasks += [
            Scripted(
                f"How many desks has the office in {city}?", "read_text_file", {"path": path}, f"{20 + number} desks"
            ),
            Scripted(f"How large is the file of the office in {city}?", "get_file_info", {"path": path}, "size:"),
        ]
    return tasks


SERVERS = {
    "time": ("{uvx} mcp-server-time", time_tasks),
    "sqlite": ("{uvx} --with mcp<2 mcp-server-sqlite --db-path {folder}/shop.db", sqlite_tasks),
    "filesystem": ("{npx} -y @modelcontextprotocol/server-filesystem {folder}", file_tasks),
}


class Provider:
    """Answers as author, as solver and as judge."""

    def __init__(self, tasks: list[Scripted]) -> None:
        self.tasks = {it.text: it for it in tasks}
        self.left = [*self.tasks]
        self.asked: Counter[str] = Counter()

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the assistant's message."""
        role, last = body["messages"][0]["content"], body["messages"][-1]
        if body.get("tools"):
            self.asked["solver"] += 1
            return (
                {"content": f"The tool says: {last['content']}"}
                if last["role"] == "tool"
                else self._call(last["content"])
            )
        if role.startswith("You write tasks"):
            self.asked["author"] += 1
            return {"content": json.dumps(self._written())}
        self.asked["judge"] += 1
        score = {"trajectory_id": "run", "explanation": "scripted", "score": self._score(last["content"])}
        return {"content": json.dumps({"scores": [score]})}

    def _written(self) -> list[dict[str, str]]:
        """Return seven tasks that can be solved, one of them twice, and one that can't."""
        batch, self.left = self.left[:7], self.left[7:]
        texts = [*batch, *batch[:1], f"Book flight {self.asked['author']} for me."]
        return [
            {"input": text, "rubric": "The right tool must have been called and its result told."} for text in texts
        ]

    def _call(self, text: str) -> dict[str, Any]:
        if (task := self.tasks.get(text)) is None:
            return {"content": "I can't do that."}
        function = {"name": task.tool, "arguments": json.dumps(task.arguments)}
        return {"content": None, "tool_calls": [{"id": "c1", "type": "function", "function": function}]}

    def _score(self, shown: str) -> float:
        """Return half for the right result, a quarter for naming the right tool, and the rest for short answers."""
        task = next((it for it in self.tasks.values() if f"<task>\n{it.text}\n" in shown), None)
        transcript = shown.partition("<transcript>")[2]
        if task is None:
            return 0.0
        said = transcript.partition(task.text)[2]
        return 0.5 * (task.found in said) + 0.25 * (task.tool in said) + 0.25 / (1 + len(said) // 200)


def measure(name: str, options: argparse.Namespace) -> list[str]:
    """Write tasks for a server, train on them, and return a row."""
    folder = (options.out / name).resolve()
    (folder / "data").mkdir(parents=True)
    command, make = SERVERS[name]
    provider = Provider(make(folder / "data"))
    where = command.format(uvx=options.uvx, npx=options.npx, folder=folder / "data")
    passed = [f"--env={it}" for it in os.environ if it.startswith(PASSED_ON)]
    with PlainProvider(FakeEngine(provider.answer), {}).running() as served:
        url = served.base_url
        env = {**os.environ, "OPENAI_BASE_URL": url, "OPENAI_API_BASE": url, "OPENAI_API_KEY": "unused"}

        def art(*arguments: str) -> str:
            done = subprocess.run(
                [sys.executable, "-m", "art_cli", *arguments], cwd=folder, env=env, capture_output=True, text=True
            )
            if done.returncode:
                raise SystemExit(
                    f"art {' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
                )
            return done.stdout

        said = art("tasks", "from-mcp", where, "--author", "openai/scripted", "--tasks", str(options.tasks), *passed)
        solved = next(line for line in said.splitlines() if line.startswith("solved")).partition(": ")[2]
        dropped = next(line for line in said.splitlines() if line.startswith("dropped")).partition(": ")[2]
        art(
            "train", "mcp_agent.py:agent", "tasks.jsonl", "--reward", "mcp_agent.py:reward", "--model", "tiny",
            "--steps", str(options.steps), "--run-dir", "trained", "--set", "tasks_per_step=4", "--set", "group_size=4",
        )  # fmt: skip
        art("audit", "trained")
    kept = sum(len((folder / file).read_text().splitlines()) for file in ("tasks.jsonl", "held_out.jsonl"))
    steps = json.loads((folder / "trained" / "report.json").read_text())["steps"]
    return [
        name,
        str(kept),
        solved,
        dropped,
        str(steps),
        "clean",
        ", ".join(f"{n} {k}" for k, n in provider.asked.items()),
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="*", default=[*SERVERS], metavar="SERVER", help=f"of {', '.join(SERVERS)}")
    parser.add_argument("--tasks", type=int, default=32)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--uvx", default="uvx", help="how uvx is called")
    parser.add_argument("--npx", default="npx", help="how npx is called")
    parser.add_argument("--out", type=Path, default=Path("runs/from-mcp"))
    options = parser.parse_args()
    head = ["server", "tasks kept", "solved", "dropped", "steps", "audit", "requests"]
    print(table(head, [measure(name, options) for name in options.servers]))


if __name__ == "__main__":
    main()
