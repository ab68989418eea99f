"""docs/environment.md names every variable that the code reads."""

import ast
import re

import pytest
from doc_blocks import ROOT

from art_cli.variables import CHECKED

PAGE = (ROOT / "docs" / "environment.md").read_text()
CODE = [
    path.read_text()
    for side in ("art_core", "plugins", "integrations", "examples")
    for path in (ROOT / side).rglob("*.py")
    if not {"tests", "node_modules"} & set(path.parts)
]
READS = {"get", "getenv", "pop", "setdefault"}


def read_by(tree):
    """The names that a module reads from the environment."""
    constants = {
        target.id: node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        asked = None
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in READS
            and node.args
        ):
            owner = ast.unparse(node.func.value)
            asked = node.args[0] if owner.endswith(("environ", "env")) or node.func.attr == "getenv" else None
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("environ"):
            asked = node.slice
        elif isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]).endswith("environ"):
            asked = node.left
        elif isinstance(node, ast.keyword) and node.arg == "envvar":
            asked = node.value
        name = constants.get(asked.id) if isinstance(asked, ast.Name) else getattr(asked, "value", None)
        if isinstance(name, str):
            yield name


@pytest.mark.system
def test_every_variable_that_the_code_reads_stands_on_its_page():
    found = {name for text in CODE for name in read_by(ast.parse(text))}
    assert {"ART_JUDGE", "ART_GATEWAY_API_KEY", "RAY_ADDRESS", "UNSLOTH_ALLOW_CPU"} <= found
    assert {name for name in found if f"`{name.upper()}`" not in PAGE} == set()


def test_the_settings_of_a_server_and_the_classic_variables_stand_there_too():
    from art_server.settings import Settings

    prefix = Settings.model_config["env_prefix"]
    names = {variable.name for variable in CHECKED} | {f"{prefix}{name.upper()}" for name in Settings.model_fields}
    assert {name for name in names if f"`{name}`" not in PAGE} == set()


def test_no_variable_of_ours_is_named_that_nobody_reads():
    code = "".join(CODE).upper()
    named = set(re.findall(r"`(ART_[A-Z0-9_]+)`", PAGE))
    assert {name for name in named if name not in code and name.removeprefix("ART_") not in code} == set()
