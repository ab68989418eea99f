"""SkyRL's server on this machine, in its own environment and processes; it speaks Tinker's API and computes on the CPU."""

import json
import os
import signal
import sqlite3
import subprocess
import time
from pathlib import Path

import httpx

from art_embedded import TINY
from art_vllm.process import free_port

ROOT = Path(__file__).parents[1]
ENVIRONMENT = ROOT / ".tinker"
BACKEND = {"max_lora_adapters": 8, "max_lora_rank": 16, "sample_max_num_sequences": 8, "train_micro_batch_size": 8}


class SkyrlServer:
    """Serves the model tiny at ``url``, until ``stop``. ``folder`` gets its log, database and checkpoints."""

    def __init__(self, folder: Path) -> None:
        assert (ENVIRONMENT / ".ready").exists(), "make .tinker/.ready"
        port = free_port()
        self.folder, self.url = folder, f"http://127.0.0.1:{port}"
        options = {
            "base-model": TINY, "backend": "jax", "backend-config": json.dumps(BACKEND), "host": "127.0.0.1", "port": port,
            "checkpoints-base": folder / "checkpoints", "database-url": f"sqlite:///{self.database}",
        }  # fmt: skip
        arguments = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
        environment = {
            **os.environ,
            "PATH": f"{ENVIRONMENT / 'bin'}:{ROOT / '.uv' / 'bin'}:{os.environ['PATH']}",
            "VIRTUAL_ENV": str(ENVIRONMENT), "JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(ENVIRONMENT / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5", "HF_HUB_OFFLINE": "1", "PYTHONPATH": "",
        }  # fmt: skip
        with (folder / "log").open("wb") as log:
            # It starts its engine the way it was started itself, so uv must be its parent.
            self._process = subprocess.Popen(
                ["uv", "run", "--no-project", "-m", "skyrl.tinker.api", *arguments],
                cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self._wait()

    @property
    def database(self) -> Path:
        return self.folder / "tinker.db"

    def _wait(self) -> None:
        until = time.monotonic() + 180
        while time.monotonic() < until and self._process.poll() is None:
            try:
                if httpx.get(f"{self.url}/api/v1/healthz").is_success:
                    return
            except httpx.HTTPError:
                time.sleep(0.2)
        self.stop()
        raise AssertionError((self.folder / "log").read_text()[-4000:])

    def counts(self) -> dict[str, int]:
        """Return the tokens that the server has worked on: those of all requests that it has stored as completed."""
        sampled = self._requests("sample")
        trained = self._requests("forward_backward")
        return {
            "prompt tokens": sum(_input_tokens(request["prompt"]) for request, _ in sampled),
            "sampled tokens": sum(len(each["tokens"]) for _, answer in sampled for each in answer["sequences"]),
            "trained tokens": sum(
                _input_tokens(datum["model_input"]) for request, _ in trained for datum in request["data"]
            ),
        }

    def _requests(self, kind: str) -> list[tuple[dict, dict]]:
        query = "select request_data, result_data from futures where lower(request_type) = ? and status = 'COMPLETED'"
        with sqlite3.connect(self.database) as database:
            rows = database.execute(query, (kind,)).fetchall()
        return [(json.loads(request), json.loads(answer)) for request, answer in rows]

    def stop(self) -> None:
        """Kill the server and its engine."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _input_tokens(model_input: dict) -> int:
    return sum(len(chunk["tokens"]) for chunk in model_input["chunks"])
