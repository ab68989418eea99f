"""What docs/howto/one-gpu.md says of a 24 GB card is what art plan counts."""

import json
import re

import pytest
from doc_blocks import ROOT
from typer.testing import CliRunner

from art_cli.main import command

PAGE = (ROOT / "docs" / "howto" / "one-gpu.md").read_text()
ROWS = re.findall(r"^\| `(\S+/\S+)` \| (\d+) bit \| (\d+) bit, (.+?) \| (.+?) \|$", PAGE, flags=re.M)


def planned(*options):
    return json.loads(CliRunner().invoke(command(), ["plan", "--context", "4096", "--json", *options]).stdout)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} in {row[2]} bit")
def test_a_row_is_what_art_plan_counts(row):
    model, trained, served, how, sequences = row
    eight = ["--serve-in-8bit"] if served == "8" else []
    found = planned("--model", model, "--gpu", "RTX 4090", *eight)
    assert found["in_4bit"] == (trained == "4") and found["turns"] == (how == "by turns")
    assert sequences == (str(found["sequences"]) if found["fits"] else "does not fit")


def test_the_settings_to_copy_are_those_that_it_prints():
    found = planned("--model", "Qwen/Qwen2.5-7B-Instruct", "--gpu", "24GB", "--serve-in-8bit")
    assert len(ROWS) == 5 and f"max_tokens_per_pass={found['max_tokens_per_pass']}," in PAGE
    for name, value in found["engine_args"].items():
        assert f'"{name}": {json.dumps(value) if isinstance(value, str) else value}' in PAGE
