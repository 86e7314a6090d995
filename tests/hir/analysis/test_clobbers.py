"""Names whose memory is written while they are in use, and parts that need no copy."""

from __future__ import annotations

import pytest
from helpers.programs import program_text

from mdfuse import hir
from mdfuse.hir.analysis.clobbers import uncopied, updated_names
from mdfuse.hir.rank.pipelines import project
from mdfuse.hir.rank.unroll import write

HEAD = "host @p on mesh(x=2) {\n  input %x: f32[4] (x=R)\n"


def updated(*lines: str) -> set[str]:
    """The names of a program with these lines on rank 0."""
    text = HEAD + "".join(f"  {line}\n" for line in lines) + "}\n"
    return {*updated_names(write(project(hir.parse(text), 0)))}


@pytest.mark.parametrize(
    ("lines", "wanted"),
    [
        (["%y: f32[4] (x=R) = add(%x, 1.0)", "%z: f32[4] (x=R) = neg(%y)", "return %z"], set()),
        # The first result in an empty buffer is no second value of it.
        (["%y: f32[4] (x=R) = alloc", "%y = add(%x, 1.0)", "return %y"], set()),
        (["%y: f32[4] (x=R) = alloc(fill=0)", "%y = add(%y, 1.0)", "return %y"], {"y"}),
        # A view is in use while its memory is written, and so is what it is a view of.
        (
            [
                "%y: f32[4] (x=R) = add(%x, 1.0)",
                "%v: f32[2] of [4] (x=R, chunk(0,2,0)) = chunk(%y)",
                "%y = neg(%y)",
                "%z: f32[2] of [4] (x=R, chunk(0,2,0)) = neg(%v)",
                "return %y",
            ],
            {"y", "v"},
        ),
        (
            [
                "%y: f32[4] (x=R) = add(%x, 1.0)",
                "%v: f32[2] of [4] (x=R, chunk(0,2,0)) = chunk(%y)",
                "%z: f32[2] of [4] (x=R, chunk(0,2,0)) = neg(%v)",
                "%y = neg(%y)",
                "return %y",
            ],
            {"y"},
        ),
    ],
)
def test_what_is_written_while_in_use(lines: list[str], wanted: set[str]) -> None:
    assert updated(*lines) == wanted


#: Rank 0 sends to itself, and rank 1, on a stream of its own.
SELF = program_text("clobbers/self")


@pytest.mark.parametrize(
    ("old", "new", "handles"),
    [
        ("", "", {"c0", "c1"}),
        # What was sent is written while the buffer that receives it is in use.
        ("  %z:", "  %a = neg(%a)\n  %z:", set()),
        # The buffer is written, which must not show in what was sent.
        ("  %z:", "  %b = neg(%b)\n  %z:", set()),
        ("  %z:", "  %v: f32[4] of [8] (x=S0) = set(%b)\n  %z:", set()),
        # The caller has the buffer.
        ("return %z", "return %b", set()),
        ("  set_stream 0\n  sync %c\n", "", set()),
    ],
)
def test_parts_for_oneself_that_need_no_copy(old: str, new: str, handles: set[str]) -> None:
    text = SELF.replace(old, new, 1) if old else SELF
    if "set_stream 0" not in text:
        text = text.replace("  %c = get_stream\n", "").replace("  set_stream %c\n  sync 0\n", "")
    assert uncopied(write(project(hir.parse(text), 0))) == handles
