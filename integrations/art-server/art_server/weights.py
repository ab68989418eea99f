"""Copies the newest checkpoint of a server's run to this machine."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp

from art_core.errors import StoreError
from art_core.store.run_folder import CHECKPOINT

BLOCK = 1 << 20


async def fetch_checkpoint(http: aiohttp.ClientSession, base_url: str, url: str, folder: Path) -> Path:
    """Copy the newest checkpoint that ``url`` lists to ``folder/NAME``, completely or not at all; return that path.

    Raises StoreError if there is no checkpoint, or if a file differs from the list.
    """
    async with http.get(f"{base_url}{url}?limit=1") as answer:
        answer.raise_for_status()
        checkpoints = (await answer.json())["items"]
    if not checkpoints:
        raise StoreError(f"{base_url}{url} lists no checkpoint; the first is written after the first step")
    checkpoint = checkpoints[0]
    name = str(checkpoint["name"])
    if not CHECKPOINT.fullmatch(name):
        raise StoreError(f"{base_url}{url} lists an invalid checkpoint name: {name!r:.100}")
    complete, partial = folder / name, folder / f".{name}.part"
    if complete.is_dir():
        return complete
    await asyncio.to_thread(shutil.rmtree, partial, ignore_errors=True)
    for file in checkpoint["files"]:
        await _fetch(http, f"{base_url}{url}/{quote(name, safe='')}/files/{quote(file['name'])}", partial, file)
    partial.rename(complete)
    return complete


async def _fetch(http: aiohttp.ClientSession, url: str, folder: Path, file: dict[str, Any]) -> None:
    path = folder / file["name"]
    if not path.resolve().is_relative_to(folder.resolve()):
        raise StoreError(f"{url} names a file outside its checkpoint: {file['name']!r:.100}")
    path.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    async with http.get(url, timeout=aiohttp.ClientTimeout(total=None, sock_read=60)) as answer:
        answer.raise_for_status()
        with path.open("wb") as out:
            async for block in answer.content.iter_chunked(BLOCK):
                digest.update(block)
                out.write(block)
    if file.get("sha256") not in (None, digest.hexdigest()):
        raise StoreError(f"{url} doesn't match the SHA-256 in the checkpoint's list; fetch it again")
