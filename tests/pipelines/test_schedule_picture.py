"""Pictures of schedules over time."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
from helpers.golden import Golden

from mdfuse.pipelines.schedules import Schedule

SVG = "{http://www.w3.org/2000/svg}"


def test_a_lane_for_each_rank_group(golden: Golden) -> None:
    golden(str(Schedule.named("1f1b", stages=3, microbatches=4).timed()))


def test_several_stages_of_a_rank_group_are_told_apart(golden: Golden) -> None:
    golden(str(Schedule.named("zbv", stages=2, microbatches=2, groups=1).timed()))


def test_a_wide_picture_shows_phases_alone(golden: Golden) -> None:
    golden(str(Schedule.named("interleaved", stages=4, microbatches=6, groups=2).timed()))


def test_long_actions_are_as_wide_as_they_take(golden: Golden) -> None:
    found = Schedule.from_rows([["0F0", "0B0"]]).timed(lambda a: 10 if a.phase == "F" else 25.0)
    golden(str(found))


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
