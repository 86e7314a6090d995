"""Pictures of schedules over time."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
from expecttest import assert_expected_inline

from mdfuse.pipelines.schedules import Schedule

SVG = "{http://www.w3.org/2000/svg}"


def test_a_lane_for_each_rank_group() -> None:
    assert_expected_inline(
        str(Schedule.named("1f1b", stages=3, microbatches=4).timed()),
        """\
1f1b: 18 in all
rank group 0  F0 F1 F2             B0─── F3 B1───    B2───    B3───   idle 6, live 3
rank group 1     F0 F1       B0─── F2 B1─── F3 B2───    B3───         idle 6, live 2
rank group 2        F0 B0─── F1 B1─── F2 B2─── F3 B3───               idle 6, live 1""",
    )


def test_several_stages_of_a_rank_group_are_told_apart() -> None:
    assert_expected_inline(
        str(Schedule.named("zbv", stages=2, microbatches=2, groups=1).timed()),
        """\
zbv: 12 in all
rank group 0  0F0 1F0 1I0 1W0 0F1 0I0 0W0 1F1 1I1 1W1 0I1 0W1   idle 0, live 2""",
    )


def test_a_wide_picture_shows_phases_alone() -> None:
    assert_expected_inline(
        str(Schedule.named("interleaved", stages=4, microbatches=6, groups=2).timed()),
        """\
interleaved: 39 in all
rank group 0  FFFFF B─FB─FB─FB─FB─FB─FB─FB─ B─ B─B─B─  idle 3, live 5
rank group 1   FFFB─FB─FB─FB─FB─FB─FB─FB─FB─FB─B─B─    idle 3, live 3""",
    )


def test_long_actions_are_as_wide_as_they_take() -> None:
    found = Schedule.from_rows([["0F0", "0B0"]]).timed(lambda a: 10 if a.phase == "F" else 25.0)
    assert_expected_inline(
        str(found),
        """\
table: 35 in all
rank group 0  F0 B0────   idle 0, live 1""",
    )


def rects(svg: str) -> list[dict[str, float]]:
    """The boxes of a picture's lanes; those of the legend have no title."""
    found = [r for r in ET.fromstring(svg).iter(f"{SVG}rect") if r.find(f"{SVG}title") is not None]
    return [{k: float(r.attrib[k]) for k in ("x", "y", "width")} for r in found]


@pytest.mark.parametrize("name", ["gpipe", "zb1p"])
def test_boxes_are_as_wide_as_actions_take(name: str) -> None:
    timed = Schedule.named(name, stages=2, microbatches=3).timed()
    svg = timed._repr_svg_()
    boxes, slots = rects(svg), [s for lane in timed.lanes for s in lane]
    scale = 1000 / timed.makespan
    for box, slot in zip(boxes, slots, strict=True):
        assert box["x"] - boxes[0]["x"] == pytest.approx(slot.start * scale, abs=0.2)
        assert box["width"] == pytest.approx((slot.stop - slot.start) * scale, abs=0.2)
    assert len({box["y"] for box in boxes}) == 2
    assert "prefers-color-scheme:dark" in svg
    assert ("backward, weights" in svg) == (name == "zb1p")


def test_a_picture_of_nothing() -> None:
    timed = Schedule.from_rows([[]]).timed()
    assert str(timed) == "table: 0 in all\nrank group 0    idle 0, live 0"
    assert not rects(timed.svg())
