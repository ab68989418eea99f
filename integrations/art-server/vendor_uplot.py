"""Copies uPlot's built files and its licence into the package: `python vendor_uplot.py`. Needs npm and its registry.

The dashboard works offline, so the chart library is served from the package. To upgrade, change VERSION and INTEGRITY, run this,
and copy the printed sums to FILES.
"""

from __future__ import annotations

import base64
import hashlib
import io
import subprocess
import tarfile
import tempfile
from pathlib import Path

VERSION = "1.6.32"
INTEGRITY = "sha512-KIMVnG68zvu5XXUbC4LQEPnhwOxBuLyW1AHtpm6IKTXImkbLgkMy+jabjLgSLMasNuGGzQm/ep3tOkyTxpiQIw=="
"""The package's checksum in the registry."""
FILES = {
    "package/dist/uPlot.esm.js": ("uPlot.esm.js", "5dd9b3281aa64b461b42d9945f6adb2649d346502b12281a9ae0d46599a80eba"),
    "package/dist/uPlot.min.css": ("uPlot.min.css", "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04"),
    "package/LICENSE": ("uPlot.LICENSE", "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd"),
}
"""Path in the package -> file name here and SHA-256."""
VENDORED = Path(__file__).parent / "art_server" / "static" / "vendor"


def packed() -> bytes:
    """Return the package's archive after verifying its checksum."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["npm", "pack", "--silent", f"uplot@{VERSION}"], cwd=folder, check=True, stdout=subprocess.PIPE)
        [file] = Path(folder).glob("*.tgz")
        content = file.read_bytes()
    integrity = "sha512-" + base64.b64encode(hashlib.sha512(content).digest()).decode()
    if integrity != INTEGRITY:
        raise SystemExit(f"uplot {VERSION} doesn't match the pinned checksum: got {integrity}, expected {INTEGRITY}")
    return content


def main() -> None:
    VENDORED.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(packed())) as archive:
        for member, (name, digest) in FILES.items():
            content = archive.extractfile(member).read()
            (VENDORED / name).write_bytes(content)
            actual = hashlib.sha256(content).hexdigest()
            print(name, actual, "" if actual == digest else "(new: copy it to FILES)")  # noqa: T201 - a script


if __name__ == "__main__":
    main()
