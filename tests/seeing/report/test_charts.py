"""Charts are in proportion to what they show."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from mdfuse import hir
from mdfuse.hir.rank.pipelines import project
from mdfuse.seeing import Event
from mdfuse.seeing.memory_use import memory_of
from mdfuse.seeing.report.charts import lanes_chart, memory_chart


def bars(svg: str) -> dict[str, tuple[str, float, float, float]]:
    """Title -> class, left edge, width, and top of each bar."""
    root = ET.fromstring(svg)
    found = {}
    for rect in root.iter("rect"):
        title = rect.find("title")
        assert title is not None and title.text is not None
        x, width, y = (float(rect.attrib[k]) for k in ("x", "width", "y"))
        found[title.text] = rect.attrib["class"], x, width, y
    return found


def test_bars_are_as_long_as_events_take() -> None:
    events = [
        Event(0, "host", "%a = <b>", 1000, 2000, source="x.py:1"),
        Event(0, "tp", "Allreduce[sum]", 2000, 5000, part="transfer", flow=0, nbytes=2048),
        Event(1, "wait", "wait", 1000, 5000, part="wait", flow=0),
        Event(1, "host", "post", 1000, 1000, part="post", flow=0),
    ]
    svg = lanes_chart(events, {0: "rank 0 (and 3 alike)"})
    found = bars(svg)
    assert {*found} == {"%a = <b>, 1 µs, x.py:1", "Allreduce[sum], 3 µs, 2 KiB", "wait, 4 µs"}
    work, transfer, wait = (
        found[k] for k in sorted(found, key=lambda t: "aAw".index(t.strip("%")[0]))
    )
    assert (work[0], transfer[0], wait[0]) == ("mf-work", "mf-transfer", "mf-wait")
    assert wait[2] == pytest.approx(4 * work[2]) and transfer[2] == pytest.approx(3 * work[2])
    assert work[1] == wait[1] and transfer[1] == pytest.approx(work[1] + work[2])
    texts = [t.text for t in ET.fromstring(svg).iter("text")]
    assert texts.index("rank 0 (and 3 alike)") < texts.index("tp") < texts.index("rank 1")
    assert texts[:5] == ["0 s", "1 µs", "2 µs", "3 µs", "4 µs"]


def test_narrow_events_that_follow_each_other_are_one_bar() -> None:
    events = [Event(0, "host", f"e{n}", n * 10, n * 10 + 10) for n in range(100_000)]
    counts = [int(n) for n in re.findall(r"<title>(\d+) events, ", lanes_chart(events, {}))]
    assert len(counts) <= 2500 and sum(counts) > 90_000


def test_no_events_are_an_empty_chart() -> None:
    assert bars(lanes_chart([], {})) == {}


PROGRAM = """
host @lives on mesh(x=1) {
  input %x: f32[4] (x=R)
  %a: f32[4] (x=R) = exp(%x)
  %b: f32[8] (x=R) = cat(%a, %x, dim=0)
  free %a
  %y: f32[] (x=R) = sum(%b, dims=[0])
  free %b
  return %y
}"""


def test_the_areas_of_memory_add_up_to_what_is_held() -> None:
    memory = memory_of(project(hir.parse(PROGRAM), 0))
    svg = memory_chart(memory)
    areas: dict[str, dict[str, list[float]]] = {}
    for polygon in ET.fromstring(svg).iter("polygon"):
        title = polygon.find("title")
        assert title is not None and title.text is not None
        by_x: dict[str, list[float]] = {}
        for pair in polygon.attrib["points"].split():
            x, y = pair.split(",")
            by_x.setdefault(x, []).append(float(y))
        areas[title.text] = by_x
    assert [*areas] == [
        "inputs, at most 16 B",
        "%a, at most 16 B",
        "%b, at most 32 B",
        "%y, at most 4 B",
    ]
    ys = [y for by_x in areas.values() for row in by_x.values() for y in row]
    bottom, top = max(ys), min(ys)
    unit = (bottom - top) / memory.peak
    left = re.findall(r"points=\"([\d.]+),([\d.]+)", svg)[0]
    assert bottom - float(left[1]) == pytest.approx(16 * unit, abs=0.2), "the input, from the start"
    assert memory.peak == 64


def test_long_programs_have_a_curve_of_some_hundred_points() -> None:
    body = "".join(f"  %a{n + 1}: f32[4] (x=R) = exp(%a{n})\n  free %a{n}\n" for n in range(900))
    head = "host @long on mesh(x=1) {\n  input %x: f32[4] (x=R)\n  %a0: f32[4] (x=R) = exp(%x)\n"
    text = f"{head}{body}  return %a900\n}}"
    svg = memory_chart(memory_of(project(hir.parse(text), 0)))
    assert len(svg) < 200_000
    assert "instruction 1802" in svg
