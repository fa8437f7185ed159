"""The site: every page is in it, every public name has its entry, no link is broken, and nothing is fetched."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import ckptstore

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))


class _Page(HTMLParser):
    """What a page points at, what it loads, and which anchors it has."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors.add(values.get("id") or "")
        if tag == "a" and values.get("href"):
            self.links.append(values["href"] or "")
        elif tag in ("script", "img", "iframe", "source") and values.get("src"):
            self.loads.append(values["src"] or "")
        elif tag == "link" and values.get("rel") in ("stylesheet", "preload", "icon", "preconnect"):
            self.loads.append(values.get("href") or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, _Page]:
    if importlib.util.find_spec("zensical") is None or importlib.util.find_spec("mkdocstrings_handlers") is None:
        pytest.skip("pip install 'ckptstore[docs]'")
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "docs", folder / "docs")
    shutil.copy(ROOT / "mkdocs.yml", folder)
    (folder / "ckptstore").symlink_to(ROOT / "ckptstore")
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "griffe:" not in done.stdout + done.stderr  # a docstring of a parameter that is not there
    found = {}
    for path in sorted((folder / "site").rglob("*.html")):
        found[path] = _Page()
        found[path].feed(path.read_text("utf-8"))
    return found


def test_each_page_is_built(site: dict[Path, _Page]) -> None:
    """A document that is written is a page."""
    root = next(path for path in site if path.name == "404.html").parent
    built = {path.relative_to(root).with_suffix("").as_posix() for path in site}
    assert {page.relative_to(ROOT / "docs").with_suffix("").as_posix() for page in PAGES} <= built


def test_each_page_is_in_the_navigation() -> None:
    """And whoever looks for it finds it."""
    listed = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text("utf-8"))
    assert sorted(listed) == [page.relative_to(ROOT / "docs").as_posix() for page in PAGES]


def test_links_and_anchors_exist(site: dict[Path, _Page]) -> None:
    """Each link inside the site leads to a page, and to a heading that is there."""
    broken = []
    for path, page in site.items():
        if path.name == "404.html":  # it is shown for any address, so its links are absolute
            continue
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists() or (parts.fragment and unquote(parts.fragment) not in _anchors(site, target)):
                broken.append((path.name, link))
    assert broken == []


def _anchors(site: dict[Path, _Page], target: Path) -> set[str]:
    return site[target].anchors if target in site else set()


def test_nothing_is_fetched_from_elsewhere(site: dict[Path, _Page]) -> None:
    """Scripts, styles, fonts and pictures come with the site."""
    loads = {load for page in site.values() for load in page.loads}
    assert loads
    assert {load for load in loads if urlsplit(load).netloc} == set()


def test_each_public_name_is_in_the_reference(site: dict[Path, _Page]) -> None:
    """``ckptstore.__all__``, from the docstrings."""
    anchors = {anchor for path, page in site.items() if path.parent.name == "reference" for anchor in page.anchors}
    assert [name for name in ckptstore.__all__ if f"ckptstore.{name}" not in anchors] == []
