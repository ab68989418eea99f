"""Writes SERVE.md and the command lines that serve an export with vLLM."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from art_vllm.command_line import RANKS, arguments, parsers
from art_vllm.export_source import Source

TEMPLATE = "chat_template.jinja"
"""In an export whose chat template isn't that of the start weights."""
SERVER = ("python", "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1")


def how_to_serve(written: Path, folder: Path, source: Source, dtype: str) -> dict[str, str]:
    """Return the command line for each export (``merged``, ``adapter``), and write SERVE.md.

    The files are in ``written`` and will be moved to ``folder``. The commands in SERVE.md are to be run inside the folder.
    """
    kinds = [kind for kind in ("merged", "adapter") if (written / kind).is_dir()]
    model = source.start if source.adapter else str(source.checkpoint)
    settings = (source.config.get(name) for name in ("tool_parser", "tool_format", "reasoning_parser"))
    formats = arguments(parsers(model, *settings))

    def command(kind: str, root: Path) -> str:
        if kind == "merged":
            arguments = ["--model", str(root / "merged"), "--served-model-name", source.name, "--dtype", dtype]
        else:
            arguments = ["--model", source.start, "--dtype", dtype, "--enable-lora"]
            arguments += ["--max-lora-rank", _max_rank(written)]
            arguments += ["--lora-modules", _module(source.name, root / "adapter")]
            if (written / "adapter" / TEMPLATE).is_file():
                arguments += ["--chat-template", str(root / "adapter" / TEMPLATE)]
        return shlex.join([*SERVER, *arguments, *formats])

    commands = {kind: command(kind, folder.resolve()) for kind in kinds}
    (written / "SERVE.md").write_text(_page(written, source, {kind: command(kind, Path()) for kind in kinds}))
    return commands


def _module(name: str, adapter: Path) -> str:
    """Return the value of ``--lora-modules``: NAME=PATH, or JSON if that is ambiguous.

    vLLM splits at the first "=" and parses values with a comma as JSON.
    """
    if "=" in name or "," in f"{name}{adapter}":
        return json.dumps({"name": name, "path": str(adapter)})
    return f"{name}={adapter}"


def _adapter(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "adapter" / "adapter_config.json").read_text())


def _max_rank(folder: Path) -> str:
    """Return the smallest of RANKS that fits the adapter."""
    config = _adapter(folder)
    rank = max([config["r"], *(config.get("rank_pattern") or {}).values()])
    return str(next((allowed for allowed in RANKS if allowed >= rank), rank))


def _page(folder: Path, source: Source, commands: dict[str, str]) -> str:
    intros = {
        "merged": "The merged model, in this folder:",
        "adapter": "The adapter on top of its start weights; several adapters can share them (`--lora-modules a=... b=...`):",
    }
    if source.adapter and _adapter(folder).get("target_parameters"):
        intros["adapter"] += (
            "\nIt adapts experts, which vLLM supports for some models only; the merged model always works."
        )
    blocks = "\n\n".join(f"{intros[kind]}\n\n    {command}" for kind, command in commands.items())
    return (
        f"# {source.name}, step {source.step}\n\n{blocks}\n\n"
        "`python` must be a Python with vLLM; `art doctor` shows the path of the one that art installed. Without `--host`, vLLM "
        "accepts connections from all networks.\n\n"
        f"Then use any OpenAI client with base URL http://127.0.0.1:8000/v1 and model `{source.name}`.\n"
    )
