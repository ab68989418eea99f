"""An exported folder -> the command lines that serve it with vLLM, and SERVE.md. Knows nothing about weights."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from art_vllm.command_line import RANKS, arguments, parsers
from art_vllm.export_source import Source

SERVER = ("python", "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1")


def how_to_serve(written: Path, folder: Path, source: Source, dtype: str) -> dict[str, str]:
    """Return what is served (``merged``, ``adapter``) -> its command line, for what lies in ``written`` and will be
    ``folder``; write SERVE.md, whose commands are for whoever stands in the folder."""
    ways = [way for way in ("merged", "adapter") if (written / way).is_dir()]
    model = source.start if source.adapter else str(source.checkpoint)
    formats = arguments(parsers(model, source.config.get("tool_parser"), source.config.get("reasoning_parser")))

    def command(way: str, place: Path) -> str:
        if way == "merged":
            arguments = ["--model", str(place / "merged"), "--served-model-name", source.name, "--dtype", dtype]
        else:
            arguments = ["--model", source.start, "--dtype", dtype, "--enable-lora", "--max-lora-rank", _room(written)]
            arguments += ["--lora-modules", _module(source.name, place / "adapter")]
        return shlex.join([*SERVER, *arguments, *formats])

    commands = {way: command(way, folder.resolve()) for way in ways}
    (written / "SERVE.md").write_text(_page(written, source, {way: command(way, Path()) for way in ways}))
    return commands


def _module(name: str, adapter: Path) -> str:
    """Return what ``--lora-modules`` takes: NAME=PATH, which is cut at the first "=" and is read as JSON where it has a comma."""
    if "=" in name or "," in f"{name}{adapter}":
        return json.dumps({"name": name, "path": str(adapter)})
    return f"{name}={adapter}"


def _adapter(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "adapter" / "adapter_config.json").read_text())


def _room(folder: Path) -> str:
    """Return the smallest of RANKS that holds the adapter's."""
    config = _adapter(folder)
    rank = max([config["r"], *(config.get("rank_pattern") or {}).values()])
    return str(next((it for it in RANKS if it >= rank), rank))


def _page(folder: Path, source: Source, commands: dict[str, str]) -> str:
    said = {
        "merged": "The merged model, in this folder:",
        "adapter": "The adapter on its start weights; several adapters share them (`--lora-modules a=... b=...`):",
    }
    if source.adapter and _adapter(folder).get("target_parameters"):
        said["adapter"] += (
            "\nIt adapts experts, which vLLM takes for some models only; the merged model is always served."
        )
    blocks = "\n\n".join(f"{said[way]}\n\n    {command}" for way, command in commands.items())
    return (
        f"# {source.name}, step {source.step}\n\n{blocks}\n\n"
        "`python` is one that has vLLM; for art's own, `art doctor` says where it is. Without `--host` vLLM listens to all "
        "networks.\n\n"
        f"Then any OpenAI client at http://127.0.0.1:8000/v1 with model `{source.name}`.\n"
    )
