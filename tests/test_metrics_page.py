"""docs/metrics.md has every metric of a step."""

import json
import re
from pathlib import Path

from art_core.loop.metrics import STEP_METRICS, UPDATE_METRICS

ROOT = Path(__file__).parent.parent
NAMES = set(re.findall(r"`([a-z_]+)`", (ROOT / "docs" / "metrics.md").read_text()))


def test_every_metric_of_a_step_is_explained():
    assert STEP_METRICS | UPDATE_METRICS <= NAMES


def test_every_metric_of_the_golden_run_is_explained_but_those_of_its_reward():
    steps = json.loads((ROOT / "tests" / "golden" / "run.json").read_text())["metrics"]
    of_reward = {"found", "malformed", "read", "success"}
    assert {name.removeprefix("learner/") for step in steps for name in step} - of_reward <= NAMES


def test_every_name_that_the_dashboard_captions_is_explained():
    page = (ROOT / "integrations/art-server/art_server/static/js/pages/overview.js").read_text()
    captions = re.search(r"const CAPTIONS = \{(.*?)\n\};", page, re.S)[1]
    assert set(re.findall(r"^  (\w+):", captions, re.M)) <= NAMES
