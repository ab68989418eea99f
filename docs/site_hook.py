"""Builds the site with every page at its place in the repository, so that a link means the same here as on the code host.

A hook of mkdocs. It knows which files exist and which pages link to them, nothing of what they say.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import unquote

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

READMES = {
    "Plugins": "plugins/*/README.md",
    "Integrations": "integrations/*/README.md",
    "Examples": "examples/*/README.md",
}
SEARCH_FROM_DISK = Path(__file__).with_name("search_from_disk.js")
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")


def on_config(config: MkDocsConfig) -> None:
    """Put the READMEs of what is in this repository into the navigation, before the reference."""
    root = Path(config.config_file_path).resolve().parent.parent
    for title, pattern in READMES.items():
        pages = [path.relative_to(root).as_posix() for path in sorted(root.glob(pattern))]
        config.nav.insert(-1, {title: pages})


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Name the pages from the repository's root, and take in whatever they link to, READMEs and code alike."""
    root = Path(config.config_file_path).resolve().parent.parent
    own = [file for file in files if file.src_dir == config.docs_dir]
    for file in own:
        files.remove(file)
    found = set()
    waiting = {f"docs/{file.src_uri}" for file in own if not file.src_uri.endswith((".py", ".yml", ".js"))}
    waiting |= {path.relative_to(root).as_posix() for pattern in READMES.values() for path in root.glob(pattern)}
    while waiting:
        found.add(uri := waiting.pop())
        files.append(_file(uri, root, config))
        if uri.endswith(".md"):
            waiting |= _links(root / uri, root) - found
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead a link to a folder to its README, which is what the code host shows there, or to the nearest one above."""
    if page.file.src_uri == "docs/howto/index.md":
        page.meta["search"] = {"boost": 4}  # it has the words that people look for
    folder = Path(page.file.abs_src_path).parent

    def lead(link: re.Match[str]) -> str:
        target = folder / unquote(link[0])
        return os.path.relpath(_readme(target), folder) if target.is_dir() else link[0]

    return LINK.sub(lead, markdown)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Let pages that are opened from the disk search, too."""
    return output.replace("</head>", f"<script>{SEARCH_FROM_DISK.read_text(encoding='utf-8')}</script></head>", 1)


def on_post_build(config: MkDocsConfig) -> None:
    """Write the search index as a script too: a page that is opened from the disk may not read it as JSON."""
    index = Path(config.site_dir, "search", "search_index.json").read_text(encoding="utf-8")
    Path(config.site_dir, "search", "search_index.js").write_text(f"var __index = {index}", encoding="utf-8")


def _readme(folder: Path) -> Path:
    file = folder.resolve() / "README.md"
    return file if file.is_file() else _readme(folder.resolve().parent)


def _file(uri: str, root: Path, config: MkDocsConfig) -> File:
    file = File(uri, src_dir=str(root), dest_dir=config.site_dir, use_directory_urls=config.use_directory_urls)
    # docs/index.md is the front page; README.md is what a visitor of the code host sees first.
    file.dest_uri = "readme.html" if uri == "README.md" else file.dest_uri.removeprefix("docs/")
    return file


def _links(page: Path, root: Path) -> set[str]:
    """The files of the repository that a page links to."""
    targets = {(page.parent / unquote(link)).resolve() for link in LINK.findall(page.read_text(encoding="utf-8"))}
    files = {_readme(it) if it.is_dir() else it for it in targets}
    return {it.relative_to(root).as_posix() for it in files if it.is_file() and it.is_relative_to(root)}
