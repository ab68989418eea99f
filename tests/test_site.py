"""The site is built without a warning, with every link and anchor followed, and asks nobody for anything when it is read."""

import os
import re
import subprocess
import sys

import pytest
import yaml
from desk import browser  # noqa: F401 - a fixture
from doc_blocks import PAGES, ROOT

LOADED = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=\"?(https?:)?//", flags=re.IGNORECASE)
NOT_PAGES = {"CHANGELOG.md", "integrations/art-embedded/tiny/README.md"}
"""And what stands deeper than a folder's README, such as the card of an example's model."""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    options = ["--config-file", "docs/mkdocs.yml", "--strict", "--quiet", "--site-dir", str(folder)]
    command = [sys.executable, "-m", "mkdocs", "build", *options]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.mark.engines
@pytest.mark.parametrize(
    ("words", "page_found"),
    [
        ("deploy", "howto/index.html"),
        ("serve the trained model", "howto/index.html"),
        ("cost", "art-ruler/index.html#what-it-costs"),
        ("credit one node", "multi_agent/index.html"),
    ],
)
def test_a_page_that_is_opened_from_the_disk_can_search(site, browser, words, page_found):  # noqa: F811
    page = browser.new_page()
    page.goto((site / "index.html").as_uri())
    page.focus("input.md-search__input")
    page.keyboard.type(words)
    found = page.locator(".md-search-result__item > a.md-search-result__link")
    found.first.wait_for(timeout=20_000)
    first = [link.get_attribute("href") for link in found.all()[:4]]
    page.close()
    assert any(link.endswith(page_found) for link in first), first


@pytest.mark.system
def test_every_page_is_in_it_and_in_its_navigation(site):
    front = (site / "index.html").read_text()
    pages = {str(page.relative_to(ROOT)) for page in PAGES} - NOT_PAGES
    for page in (page for page in pages if page.count("/") < 3):
        folder, _, name = page.removeprefix("docs/").removesuffix(".md").rpartition("/")
        name = "readme" if page == "README.md" else name.replace("README", "index")
        address = f"{folder}/{name}.html".lstrip("/")
        assert (site / address).is_file(), page
        assert f'href="{address}"' in front or page == "docs/index.md", (
            f"{page} is not in the navigation: see docs/mkdocs.yml"
        )


def test_nothing_is_fetched_from_elsewhere_when_it_is_read(site):
    for page in site.rglob("*.html"):
        assert not (found := LOADED.search(page.read_text())), f"{page.name}: {found}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import)\s*[\"']?https?:", sheet.read_text()), sheet.name


def test_the_reference_has_signatures_and_docstrings(site):
    text = re.sub(r"<[^>]+>", "", (site / "reference" / "api.html").read_text())
    assert "group_size" in text and "Train the model inside" in text
    assert "policy_version" in (site / "reference" / "types.html").read_text()


def test_links_to_code_lead_to_the_file(site):
    loop = "art_core/loop/training.py"
    assert (site / loop).read_text() == (ROOT / loop).read_text()


def test_the_site_is_set_up_by_what_is_pinned():
    wanted = yaml.safe_load((ROOT / "docs" / "mkdocs.yml").read_text())
    assert wanted["theme"]["font"] is False
    pins = (ROOT / "constraints.txt").read_text()
    assert all(
        f"\n{name}==" in pins for name in ("mkdocs", "mkdocs-material", "mkdocstrings-python", "nbclient", "ipykernel")
    )
