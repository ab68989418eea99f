"""A plugin's README, checked in the environment that ``test_frameworks_apart.py`` runs the plugin's own tests in."""

import os
from pathlib import Path

import pytest
from doc_blocks import blocks_of
from doc_python import Names


@pytest.mark.filterwarnings("ignore")
def test_the_imports_and_calls_of_the_readme_exist():
    names = Names()
    code = [it.code for it in blocks_of(Path(os.environ["PLUGIN"]) / "README.md") if it.language == "python"]
    assert code and not [wrong for it in code for wrong in names.check(it)]
