"""The page in headless Chromium: it asks for nothing, fits a phone, is good to read in the dark, has its charts."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore.report import collect, page
from tests import report_pages
from tests.browser import Browser, NoBrowserError, Page, find

WIDTHS = (390, 1280)
SECTIONS = ["timeline", "prune", "health", "space", "metrics", "records", "arrays", "pins", "epochs"]

# Contrast as in WCAG 2: of every piece of text, against the first background behind it.
CONTRAST = """(() => {
  const rgb = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = colour => colour.slice(0, 3).map(c => c / 255)
    .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = element => {
    for (let e = element; e; e = e.parentElement) {
      const colour = rgb(getComputedStyle(e).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || element.closest("svg")) continue;
    const [a, b] = [light(rgb(getComputedStyle(element).color)), light(behind(element))].sort((x, y) => y - x);
    found.push([(a + 0.05) / (b + 0.05), walker.currentNode.data.trim().slice(0, 40), element.className]);
  }
  return found.sort((x, y) => x[0] - y[0]);
})()"""

# Draws a screenshot on a canvas and counts pixels of each colour, and how many colours there are.
PIXELS = """(async (source, colours) => {
  const image = new Image();
  image.src = source;
  await image.decode();
  const canvas = new OffscreenCanvas(image.width, image.height);
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0);
  const data = new Uint32Array(context.getImageData(0, 0, image.width, image.height).data.buffer);
  const counts = new Map();
  for (const pixel of data) counts.set(pixel, (counts.get(pixel) || 0) + 1);
  const key = c => (255 << 24 | c[2] << 16 | c[1] << 8 | c[0]) >>> 0;
  return {kinds: counts.size, total: data.length, of: colours.map(c => counts.get(key(c)) || 0)};
})"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A running browser."""
    try:
        program = find()
    except NoBrowserError as error:
        pytest.skip(str(error))
    with Browser(program) as running:
        yield running


def written(folder: Path, place: Path, **how: Any) -> str:
    """The URL of the page on a repository."""
    with ckptstore.open(place, create=False) as repo:
        target = folder / "report.html"
        target.write_text(page(collect(repo, **how)), "utf-8")
    return target.as_uri()


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Pages on a run, on one that has seen trouble, and on one that has nothing yet."""
    found: dict[str, str] = {}
    makers: dict[str, Callable[[Path], object]] = {
        "run": lambda place: None,
        "trouble": report_pages.damage,
        "many": lambda place: report_pages.multiply(place, 1500),
    }
    for name, maker in makers.items():
        folder = tmp_path_factory.mktemp(name)
        report_pages.a_run(folder / "llama", 12)
        report_pages.spread(folder / "llama")
        maker(folder / "llama")
        found[name] = written(folder, folder / "llama", check=0.0)
    folder = tmp_path_factory.mktemp("empty")
    ckptstore.open(folder / "llama").close()
    found["empty"] = written(folder, folder / "llama")
    return found


def colour_of(shown: Page, selector: str, what: str) -> list[int]:
    """The computed colour of an element: red, green, blue."""
    text = shown.run(f"getComputedStyle(document.querySelector({json.dumps(selector)})).{what}")
    return [int(float(part)) for part in text[text.index("(") + 1 : -1].split(",")[:3]]


def pixels(browser: Browser, picture: bytes, colours: list[list[int]]) -> Any:
    """How many pixels of a PNG have each colour, and how many colours it has."""
    canvas = browser.open("about:blank#", 400)
    source = "data:image/png;base64," + base64.b64encode(picture).decode()
    try:
        return canvas.run(f"{PIXELS}({json.dumps(source)}, {json.dumps(colours)})")
    finally:
        canvas.close()


@pytest.mark.parametrize("name", ["run", "trouble", "many", "empty"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_nothing_is_asked_for_and_everything_fits(
    browser: Browser, urls: dict[str, str], name: str, dark: bool
) -> None:
    """No request, no message on the console, no sideways scrolling, every section seen, all text in good contrast."""
    for width in WIDTHS:
        shown = browser.open(urls[name], width, dark=dark)
        try:
            shown.run("document.querySelectorAll('details').forEach(d => d.open = true)")
            asked = [event["request"]["url"] for event in shown.told("Network.requestWillBeSent")]
            assert [url for url in asked if url != urls[name] and not url.startswith("data:")] == []
            assert shown.told("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown") == []
            assert shown.run("document.documentElement.scrollWidth") == width
            wide = shown.run(
                "[...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll, svg, caption')"
                " && e.getBoundingClientRect().right > innerWidth + 0.5).map(e => e.outerHTML.slice(0, 90))"
            )
            assert wide == []
            there = shown.run("[...document.querySelectorAll('section')].map(s => s.id)")
            assert there == (["prune", "health", "space", "pins"] if name == "empty" else SECTIONS)
            heights = shown.run("[...document.querySelectorAll('section')].map(s => s.getBoundingClientRect().height)")
            assert min(heights) > 60
            worst = shown.run(CONTRAST)
            assert len(worst) > 20
            assert worst[0][0] >= 4.5, worst[:3]
        finally:
            shown.close()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_charts_are_painted(browser: Browser, urls: dict[str, str], width: int, dark: bool) -> None:
    """The screenshot has the colours of the curves, of the bars and of damage, on a ground as dark as it should be."""
    shown = browser.open(urls["trouble"], width, dark=dark)
    try:
        colours = [
            colour_of(shown, ".curve", "stroke"),
            colour_of(shown, "#space path.fill-shared", "fill"),
            colour_of(shown, "#space path.fill-goes", "fill"),
            colour_of(shown, "path.tick-bad", "stroke"),
            colour_of(shown, "body", "backgroundColor"),
        ]
        ground = sum(colours[-1]) / 3
        assert ground < 60 if dark else ground > 200
        picture = shown.screenshot()
        found = pixels(browser, picture, colours)
        assert found["kinds"] > 50  # letters have soft edges
        curve, shared, goes, bad, page_ground = found["of"]
        assert curve > 500
        assert shared > 3000
        assert goes > 1000
        assert bad > 100
        assert page_ground > 0.02 * found["total"]
        # The bars stand in their chart, and reach its top.
        box = "document.querySelector('#space figure svg').getBoundingClientRect()"
        bars = "document.querySelector('#space figure path.fill-shared').getBoundingClientRect()"
        assert shown.run(f"{bars}.width / {box}.width") > 0.8
        assert shown.run(f"{box}.height") >= 100
    finally:
        shown.close()


def test_ten_thousand_epochs_are_quick(browser: Browser, urls: dict[str, str]) -> None:
    """What many epochs become is small: few elements, laid out in a moment, with a curve over the whole width."""
    shown = browser.open(urls["many"], 1280)
    try:
        assert shown.run("document.querySelectorAll('*').length") < 12_000
        share = (
            "(() => { const all = [...document.querySelectorAll('figure')]"
            ".filter(f => f.innerText.includes('metric-0'));"
            "const box = all[0].querySelector('svg').getBoundingClientRect();"
            "return all[0].querySelector('.curve').getBoundingClientRect().width / box.width; })()"
        )
        assert shown.run(share) > 0.95
    finally:
        shown.close()


def test_printed_it_shows_all(browser: Browser, urls: dict[str, str]) -> None:
    """On paper what is folded away is there, on white, whatever the screen prefers."""
    shown = browser.open(urls["run"], 800, dark=True)
    try:
        pdf = base64.b64decode(shown.call("Page.printToPDF", printBackground=True)["data"])
        assert pdf.startswith(b"%PDF-")
        assert len(pdf) > 20_000
        features = [{"name": "prefers-color-scheme", "value": "dark"}]
        shown.call("Emulation.setEmulatedMedia", media="print", features=features)
        assert colour_of(shown, "body", "backgroundColor") == [255, 255, 255]
        rows = shown.run(
            "[...document.querySelectorAll('#epochs tbody tr')].filter(r => r.checkVisibility("
            "{contentVisibilityAuto: true}) && r.getBoundingClientRect().height > 0).length"
        )
        assert rows == 12
    finally:
        shown.close()


def test_who_cannot_see_it_is_told(browser: Browser, urls: dict[str, str]) -> None:
    """To a screen reader every chart has a name and a description, every table a caption and heads."""
    shown = browser.open(urls["trouble"], 1280)
    try:
        shown.call("Accessibility.enable")
        nodes = shown.call("Accessibility.getFullAXTree")["nodes"]
        images = [
            n
            for n in nodes
            if not n["ignored"] and n["role"]["value"] in ("image", "img", "figure", "graphics-document")
        ]
        named = [n["name"]["value"] for n in images if n["role"]["value"] != "figure"]
        assert len(named) >= 10
        assert all(named)
        assert any("2 damaged" in name for name in named)
        assert shown.run(
            "[...document.querySelectorAll('table')].every(t => t.caption && t.tHead && t.caption.textContent)"
        )
        assert shown.run("document.documentElement.lang") == "en"
        levels = shown.run("[...document.querySelectorAll('h1,h2,h3')].map(h => +h.tagName[1])")
        assert levels[0] == 1
        assert levels.count(1) == 1
    finally:
        shown.close()


HOSTILE = (
    "</title></style></desc><script>window.hit=1</script><img src=x onerror='window.hit=1'>\"><svg onload=window.hit=1>"
)


def test_hostile_names_stay_text(browser: Browser, tmp_path: Path) -> None:
    """Markup in names, metadata, paths and reasons is shown as it is, and neither runs nor loads anything."""
    place = tmp_path / HOSTILE.replace("/", "")[:90]
    make_hostile(place)
    url = written(tmp_path, place)
    shown = browser.open(url, 390)
    try:
        assert shown.run("window.hit") is None
        assert shown.run("document.querySelectorAll('script, img, iframe, object, [onerror], [onload]').length") == 0
        text = shown.run("document.body.innerText")
        assert text.count("<img src=x onerror=") >= 3
        assert shown.run("document.documentElement.scrollWidth") == 390
        asked = [event["request"]["url"] for event in shown.told("Network.requestWillBeSent")]
        assert [one for one in asked if one != url and not one.startswith("data:")] == []
        assert shown.told("Log.entryAdded") == []
    finally:
        shown.close()


def make_hostile(place: Path) -> None:
    """A repository of whose texts each tries to be markup."""
    import numpy as np

    state = {HOSTILE: np.ones((20, 20)), "fine": {HOSTILE: np.zeros(3)}}
    with ckptstore.open(place) as repo:
        for epoch in range(3):
            repo.save(epoch, {"model": state}, {HOSTILE: 1.0 / (epoch + 1), "a": {HOSTILE: float("nan")}, "t": HOSTILE})
        repo.pin(1, HOSTILE)


def test_a_blank_picture_would_be_noticed(browser: Browser) -> None:
    """The count of pixels tells a page without charts from one with them."""
    rows = b"".join(b"\0" + b"\xff\xff\xff" * 30 for _ in range(30))
    head = b"IHDR" + (30).to_bytes(4, "big") * 2 + b"\x08\x02\0\0\0"
    body = b"IDAT" + zlib.compress(rows)
    parts = [head, body, b"IEND"]
    white = b"\x89PNG\r\n\x1a\n" + b"".join(
        (len(part) - 4).to_bytes(4, "big") + part + zlib.crc32(part).to_bytes(4, "big") for part in parts
    )
    found = pixels(browser, white, [[255, 255, 255], [37, 99, 201]])
    assert found == {"kinds": 1, "total": 900, "of": [900, 0]}
