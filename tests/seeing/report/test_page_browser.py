"""Reports in a headless browser: nothing is cut, covered or too faint, and the script works."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.browser import Opened, opened
from helpers.example_files import SMALL

import mdfuse as mf
from mdfuse import DeviceMesh, Shard
from mdfuse.seeing import UNIT
from mdfuse.seeing.report.page import Subject, html, values_of
from seeing.test_action_times import step

pytestmark = pytest.mark.browser

#: Pixels: of windows, and by how much measures may be off.
WIDTHS = {"wide": 1400, "narrow": 400}
SLACK = 1.5
#: The least contrast of text (Web Content Accessibility Guidelines 2.2, 1.4.3).
CONTRAST = 4.5

#: What is measured of a page. `outside` and `covered` are texts of pictures, `faint` texts of all
#: kinds but those on coloured parts. A press on "+" makes charts twice as wide, and the page not.
MEASURE = """
function luminance(colour) {
  const [r, g, b] = colour.match(/[\\d.]+/g).map((x) => x / 255)
    .map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
function ground(node, view) {
  for (; node; node = node.parentElement) {
    const colour = view.getComputedStyle(node).backgroundColor;
    if (!/, 0\\)$/.test(colour) && !colour.includes("/")) return colour;
  }
  return "rgb(255, 255, 255)";
}
function contrast(node, view) {
  const style = view.getComputedStyle(node), isText = node.tagName === "text";
  const pair = [luminance(isText ? style.fill : style.color), luminance(ground(node, view))];
  return (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
}
function measure(page, view) {
  const found = { width: view.innerWidth, scroll: page.documentElement.scrollWidth };
  const texts = (svg) => [...svg.querySelectorAll("text")].filter((t) => t.textContent);
  for (const folded of page.querySelectorAll("details")) folded.open = true;
  const charts = [...page.querySelectorAll("svg")];
  found.charts = charts.length;
  found.outside = charts.flatMap((svg) => texts(svg).filter((t) => {
    const box = t.getBBox(), view = svg.viewBox.baseVal;
    return box.x < -SLACK || box.y < -SLACK || box.x + box.width > view.width + SLACK ||
      box.y + box.height > view.height + SLACK;
  }).map((t) => t.textContent));
  found.covered = charts.flatMap((svg) => {
    const boxes = texts(svg).map((t) => [t.getBBox(), t.textContent]);
    return boxes.flatMap(([a, one], i) => boxes.slice(i + 1).filter(([b]) =>
      Math.min(a.x + a.width, b.x + b.width) - Math.max(a.x, b.x) > SLACK &&
      Math.min(a.y + a.height, b.y + b.height) - Math.max(a.y, b.y) > 3 * SLACK
    ).map(([, other]) => [one, other]));
  });
  const plain = "p, a, h1, h2, td, th, b, span, pre, figcaption, summary, button, .mf-chart text";
  found.faint = [...page.querySelectorAll(plain)].filter((node) => node.textContent.trim())
    .map((node) => [node.textContent.slice(0, 40), contrast(node, view)])
    .filter(([, c]) => c < LEAST);
  found.small = Math.min(...charts.flatMap(texts).map((t) => t.getBoundingClientRect().height));
  const bar = page.querySelector("[data-tip]"), at = bar.getBoundingClientRect();
  const where = { bubbles: true, clientX: at.x, clientY: at.y };
  bar.dispatchEvent(new view.MouseEvent("mousemove", where));
  const tip = page.getElementById("tip"), box = tip.getBoundingClientRect();
  found.tip = { text: tip.textContent, left: box.left, right: box.right };
  const chart = page.querySelector("#timeline ~ figure .mf-chart");
  const before = chart.getBoundingClientRect().width;
  page.querySelectorAll(".zoom button")[1].click();
  found.zoomed = chart.getBoundingClientRect().width / before;
  found.zoomed_scroll = page.documentElement.scrollWidth;
  return found;
}
""".replace("SLACK", str(SLACK)).replace("LEAST", str(CONTRAST))


def page(fd: Any, program: mf.Program) -> str:
    return html(
        Subject(
            host=program.host,
            definition=str(fd),
            segments=[str(s.fusion) for s in program.segments],
            explained=program.explain(),
            values=values_of(program.fusion),
            costs=UNIT,
            measured=program.timeline(UNIT).events,
            schedule=program.schedule,
        )
    )


def large() -> mf.FusionDefinition:
    """Long extents, so long labels; many ranks, of which some hold nothing."""
    mesh = DeviceMesh.arange(dp=2, tp=8)
    with mf.FusionDefinition("large") as fd:
        x = fd.define_tensor([4, 120000, 131072], mesh=mesh, layout={"tp": Shard(1)})
        y = fd.define_tensor([9, 131072], mesh=mesh, layout={"tp": Shard(0), "dp": Shard(1)})
        fd.add_output(x.sum(1) @ y.sum(0))
    return fd


@pytest.fixture(scope="module")
def pages() -> dict[str, tuple[str, int]]:
    """Reports of a program, of a pipeline and of large tensors, in both widths."""
    mlp, _ = SMALL["tp_mlp"][0](DeviceMesh.arange(tp=4))
    pipeline = step(4, "1f1b")
    made = {
        "mlp": page(mlp, mf.compile(mlp)),
        "pipeline": page("", pipeline),
        "large": page((fd := large()), mf.compile(fd)),
    }
    return {
        f"{name} {width}": (text, WIDTHS[width]) for name, text in made.items() for width in WIDTHS
    }


@pytest.fixture(scope="module", params=["light", "dark"])
def seen(
    request: pytest.FixtureRequest,
    pages: dict[str, tuple[str, int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Opened:
    found = opened(tmp_path_factory.mktemp("browser"), pages, MEASURE, request.param == "dark")
    assert found.measures.keys() == pages.keys()
    return found


def test_the_console_is_empty(seen: Opened) -> None:
    assert seen.console == []


def test_only_what_is_wide_scrolls(seen: Opened, pages: dict[str, tuple[str, int]]) -> None:
    for name, (_, width) in pages.items():
        found = seen.measures[name]
        assert found["width"] == width and found["scroll"] <= width, name


def test_texts_of_pictures_are_whole_and_apart(seen: Opened) -> None:
    for name, found in seen.measures.items():
        assert found["charts"] >= 4, name
        assert found["outside"] == [] and found["covered"] == [], name
        assert found["small"] >= 8, f"{name}: {found['small']} pixels high"


def test_texts_can_be_read(seen: Opened) -> None:
    for name, found in seen.measures.items():
        assert found["faint"] == [], name


def test_the_script_shows_and_zooms(seen: Opened) -> None:
    for name, found in seen.measures.items():
        tip = found["tip"]
        assert tip["text"] and tip["left"] >= 0 and tip["right"] <= WIDTHS[name.split()[1]], name
        assert found["zoomed"] == pytest.approx(2, rel=0.01), name
        assert found["zoomed_scroll"] <= WIDTHS[name.split()[1]], name
