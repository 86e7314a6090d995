"""The page fits a narrow window, a light and a dark one; its script finds what it asks for.

Style, structure and script are read as they stand; `test_page_browser.py` opens them.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from helpers.example_files import SMALL

import mdfuse as mf
from mdfuse import DeviceMesh
from mdfuse.seeing import UNIT
from mdfuse.seeing.report.page import Subject, html, values_of

#: The least contrast of text (Web Content Accessibility Guidelines 2.2, 1.4.3).
CONTRAST = 4.5

#: What may be wider than the window.
WIDE = {"table", "pre", "svg"}


class Tree(HTMLParser):
    """Every element with its classes, and those around it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.path: list[tuple[str, dict[str, str | None]]] = []
        self.found: list[list[tuple[str, dict[str, str | None]]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        here = [*self.path, (tag, dict(attrs))]
        self.found.append(here)
        if tag != "meta":
            self.path = here

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append([*self.path, (tag, dict(attrs))])

    def handle_endtag(self, tag: str) -> None:
        self.path = self.path[:-1]


@pytest.fixture(scope="module")
def page() -> str:
    fd, _ = SMALL["tp_mlp"][0](DeviceMesh.arange(tp=4))
    program = mf.compile(fd)
    return html(
        Subject(
            host=program.host,
            definition=str(fd),
            segments=[str(s) for s in program.segments],
            explained=program.explain(),
            values=values_of(program.fusion),
            costs=UNIT,
        )
    )


def colours(page: str) -> list[dict[str, str]]:
    """The colours of a light window, and of a dark one."""
    style = page[page.index("<style>") : page.index("</style>")]
    blocks = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    return [dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", block)) for block in blocks]


def luminance(colour: str) -> float:
    parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_a_dark_window_has_colours_of_its_own(page: str) -> None:
    light, dark = colours(page)
    assert light.keys() == dark.keys() and light["page"] != dark["page"]
    assert '<meta name="color-scheme" content="light dark">' in page
    assert page.index("prefers-color-scheme: dark") > page.index(":root {")
    used = set(re.findall(r"var\(--(\w+)\)", page))
    assert used <= light.keys(), "every colour that is used is there"


@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("text", ["ink", "dim", "link", "post", "wait"])
def test_texts_can_be_read(page: str, mode: int, text: str) -> None:
    found = colours(page)[mode]
    for ground in ("page", "box"):
        assert contrast(found[text], found[ground]) >= CONTRAST, (text, ground)


def test_what_is_wide_scrolls_by_itself(page: str) -> None:
    """So a narrow window shows all of the rest without scrolling sidewards."""
    style = page[page.index("<style>") : page.index("</style>")]
    scrolls = {
        name
        for names, rules in re.findall(r"([^{}]+)\{([^{}]*)\}", style)
        if "overflow-x: auto" in rules or "overflow: auto" in rules
        for name in (part.strip() for part in names.split(","))
    }
    assert {".wide", ".chart", "figure", "details pre"} <= scrolls
    for path in Tree(page).found:
        tag, _ = path[-1]
        if tag in WIDE:
            around = {f".{c}" for _, a in path[:-1] for c in (a.get("class") or "").split()}
            around |= {name for name, _ in path[:-1]}
            around |= {f"details {tag}"} if "details" in around else set()
            assert around & scrolls, path
    assert 'content="width=device-width, initial-scale=1"' in page
    wide = [rule for rule in re.findall(r"[^{}]+\{[^{}]*\}", style) if "min-width: 860px" in rule]
    assert [rule.split("{")[0].strip() for rule in wide] == [".chart svg"]


def test_the_script_finds_what_it_asks_for(page: str) -> None:
    script = page[page.index("<script>") : page.index("</script>")]
    elements = [path[-1][1] for path in Tree(page).found]
    ids = {found.get("id") for found in elements}
    classes = {c for found in elements for c in (found.get("class") or "").split()}
    assert (asked := re.findall(r'getElementById\("(\w+)"\)', script))
    assert {*asked} <= ids
    selectors = " ".join(re.findall(r'querySelectorAll\("([^"]+)"\)', script))
    assert {*re.findall(r"\.([\w-]+)", selectors)} <= classes
    assert {*re.findall(r"#([\w-]+)", selectors)} <= ids
    data = {key for found in elements for key in found if key.startswith("data-")}
    own = {"tip", "height", "width"}  # which the script itself writes
    assert {*re.findall(r"dataset\.(\w+)", script)} <= {key[5:] for key in data} | own
