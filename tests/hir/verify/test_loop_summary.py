"""Faults between iterations are found with iterations folded as with all written out."""

from __future__ import annotations

import pytest
from helpers.microbatches import added_up
from helpers.mutants import check_verdicts, loops
from helpers.programs import program_text

import mdfuse as mf
from mdfuse import hir
from mdfuse.hir.verify.check import verify

APART = program_text("loop_summary/apart")

ROWS = "f32[2,8] of [32,8] (dp=S0, chunk(0,8,{}))"

#: A loop in two parts, with a branch.
PARTS = program_text("loop_summary/parts")

#: Buffers that edits of the loop name, made before it and freed behind it.
BUFFERS = {
    "%s": "  %s: f32[8,8] (dp=R) = neg(%w)\n",
    "%m": "  %m: f32[8,8] (dp=R) = full(1, shape=[8,8], dtype=f32)\n",
    "%n": "  %n: f32[16,8] of [32,8] (dp=S0) = neg(%x)\n",
}

#: Makes %a a view of %s, though a branch that is not taken says %m, and %b one of %a.
VIEWS = """  for %k in 0..1 {
    if %k == 1 {
      %a: f32[8,8] (dp=R) = set(%m)
    } else {
      %a: f32[8,8] (dp=R) = set(%s)
    }
  }
  %b: f32[8,8] (dp=R) = set(%a)
"""


def edited(old: str, new: str) -> hir.HostProgram:
    """The program with a part of its text replaced."""
    assert old in APART
    text = APART.replace(old, new)
    has_views = "(%a" in text or "%b)" in text
    for name in (name for name in BUFFERS if name in text or (has_views and name != "%n")):
        text = text.replace("  set_stream 1\n  sync", f"{BUFFERS[name]}  set_stream 1\n  sync", 1)
        text = text.replace("  return", f"  free {name}\n  return")
    if has_views:
        text = text.replace("  set_stream 1\n  sync", f"{VIEWS}  set_stream 1\n  sync", 1)
        text = text.replace("  return", "  free %a, %b\n  return")
    return hir.parse(text)


#: What parts and branches must not do: what is replaced, by what, and what is said of it.
WRONG_PARTS = {
    "one branch alone orders streams": (
        {"    sync 1\n    %y.i": "    if %i == 0 {\n      sync 1\n    }\n    %y.i"},
        "%t.i@3",
    ),
    "a later iteration's branch writes what is read": (
        {
            "    set_stream 1\n    %x.i": "    set_stream 0\n    if %i >= 4 {\n"
            "      %last = neg(%w)\n    }\n    set_stream 1\n    %x.i",
            "    if %i == 0 {": "    if %i == 8 {",
        },
        "%last",
    ),
    "a part writes on one stream what the next iteration writes on another": (
        {"    free %x.i\n": "    %last = neg(%w)\n    free %x.i\n"},
        "%last",
    ),
    "a value is made in a branch": (
        {"    } else {\n": "      %v.i: f32[8,8] (dp=R) = neg(%w)\n    } else {\n"},
        "%v.i",
    ),
    "chunks come a second time before they are read": (
        {
            "0..8": "0..16",
            "%i)) =": "%i mod 8)) =",
            "= matmul": "= chunk(%t)\n    %t.i = matmul",
            "  %last: ": "  %t: f32[16,8] of [32,8] (dp=S0) = alloc\n  %last: ",
            "  return": "  free %t\n  return",
        },
        "%t.i@9",
    ),
}


@pytest.mark.parametrize("what", WRONG_PARTS)
def test_faults_between_parts(what: str) -> None:
    edits, said = WRONG_PARTS[what]
    text = PARTS
    for old, new in edits.items():
        assert old in text
        text = text.replace(old, new)
    program = hir.parse(text)
    for in_full in (False, True):
        with pytest.raises(mf.MdfuseError) as found:
            verify(program, in_full)
        assert said in str(found.value)


LAST = "    %last = neg(%w)\n"
#: Reads %s on stream 0, and is its iteration's own.
READ = "    %k.i: f32[2,8] of [32,8] (dp=S0, chunk(0,8,%i)) = matmul(%x.i, %s)\n    free %k.i\n"
ROW = "f32[1,8] of [8,8] (dp=R, chunk(0,8,%i))"
COLUMN = "f32[8,1] of [8,8] (dp=R, chunk(1,8,%i))"
#: Writes a row of %m, then a column.
BOTH = """    %b.i: {column} = chunk(%m)
    set_stream 1
    {sync}%a.i = neg(%a.i)
    set_stream 0
    sync 1
    %b.i = neg(%b.i)
    free %a.i, %b.i
"""

#: What is right, but takes more than one iteration to tell: an edit of the text.
RIGHT = {
    "another stream writes": (
        LAST,
        f"{READ}    set_stream 1\n    sync 0\n    %s = neg(%w)\n    set_stream 0\n"
        f"    sync 1\n{LAST}",
    ),
    "a branch": (LAST, f"    if %i == 0 {{\n  {LAST}    }}\n"),
    "a chunk beside the whole": (
        LAST,
        f"    %v.i: {ROW} = chunk(%s)\n    %k.i: {ROW} = neg(%v.i)\n    %s = neg(%w)\n"
        f"    free %v.i, %k.i\n{LAST}",
    ),
    "chunks of two dims": (
        LAST,
        f"    %a.i: {ROW} = chunk(%m)\n" + BOTH.format(column=COLUMN, sync="sync 0\n    ") + LAST,
    ),
}


@pytest.mark.parametrize("what", RIGHT)
def test_right_loops(what: str) -> None:
    program = edited(*RIGHT[what])
    verify(program)
    verify(program, in_full=True)


@pytest.mark.parametrize("text", [APART, PARTS])
def test_loops_that_the_faults_are_put_into(text: str) -> None:
    verify(hir.parse(text))
    verify(hir.parse(text), in_full=True)


#: What one iteration alone does not show: an edit of the text, and what is said of it.
WRONG = {
    "a sum is read before it is complete": (LAST,
        "    %h.i: f32[1,8] of [8,8] (dp=P(sum), chunk(0,8,%i)) = chunk(%g)\n"
        "    %k.i: f32[1,8] of [8,8] (dp=P(sum), chunk(0,8,%i)) = neg(%h.i)\n"
        f"    free %h.i, %k.i\n{LAST}", "the parts of 1 chunks"),
    "a chunk is read that a later iteration writes": (LAST,
        "    %h.i: f32[2,8] of [32,8] (dp=S0, chunk(0,8,(7 - %i) mod 8)) = chunk(%y)\n"
        "    %k.i: f32[2,8] of [32,8] (dp=S0, chunk(0,8,(7 - %i) mod 8)) = neg(%h.i)\n"
        f"    free %h.i, %k.i\n{LAST}", "nothing has written"),
    "a value is left by each iteration": ("%t.i, %u.i", "%u.i", "%t.i"),
    "a view is left by each iteration": ("%t.i, %u.i", "%t.i", "%u.i"),
    "only the last post is waited for": (
        "    wait %c0\n    free %x.i, %y.i, %p.i, %t.i, %u.i, %g.i, %z.i\n  }\n",
        "    free %x.i, %y.i, %p.i, %t.i, %u.i, %g.i\n  }\n  wait %c0\n  free %z.i\n",
        "wait",
    ),
    "a post is said to be of other chunks than its buffers": (
        "f32[32,8] (dp=P(sum), chunk(0,8,%i)) => (dp=R, chunk(0,8,%i)) axis=dp",
        "f32[32,8] (dp=P(sum), chunk(0,8,(%i + 1) mod 8)) "
        "=> (dp=R, chunk(0,8,(%i + 1) mod 8)) axis=dp",
        "allreduce",
    ),
    "a buffer from before is freed in each": (LAST, f"{READ}    free %s\n{LAST}", "%s"),
    "the next iteration reads on one stream what this one writes on another": (LAST,
        f"{READ}    set_stream 1\n    sync 0\n    %s = neg(%w)\n    set_stream 0\n{LAST}", "%s"),
    "the next iteration reads a chunk of what this one writes on another stream": (LAST,
        f"    %v.i: {ROW} = chunk(%s)\n    %k.i: {ROW} = neg(%v.i)\n    set_stream 1\n"
        f"    sync 0\n    %s = neg(%w)\n    set_stream 0\n    free %v.i, %k.i\n{LAST}", "%v.i"),
    "rows and columns are written on two streams": (LAST,
        f"    %a.i: {ROW} = chunk(%m)\n" + BOTH.format(column=COLUMN, sync="") + LAST, "%a.i"),
    "a branch that is not taken says that a name is other memory": (LAST,
        READ.replace("%s", "%b") + "    set_stream 1\n    sync 0\n    %s = neg(%w)\n"
        f"    set_stream 0\n{LAST}", "%b"),
    "chunks of other numbers are added": (LAST,
        f"    %h.i: {ROWS.format('(7 - %i) mod 8')} = chunk(%n)\n"
        f"    %k.i: {ROWS.format('%i')} = add(%x.i, %h.i)\n    free %h.i, %k.i\n{LAST}",
        "another one chunk(0,8,7)"),
    "a name means other memory from its second binding on": (LAST,
        f"    %a.i: {ROW} = alloc\n    free %a.i\n    %r.i: {ROW} = chunk(%m)\n"
        "    %a.i = set(%r.i)\n" + BOTH.format(column=COLUMN, sync="").replace("free",
        "free %r.i,") + LAST, "%a.i"),
}  # fmt: skip


def test_a_chunk_of_a_name_that_is_other_memory() -> None:
    """Iterations 2 and 3, which are written as one, read what the other one writes."""
    other = ROW.replace("%i", "(5 - %i) mod 8")
    new = (
        f"    %c.i: {ROW} = chunk(%a)\n    %k.i: {ROW} = neg(%c.i)\n    free %c.i, %k.i\n"
        f"    %v.i: {other} = chunk(%s)\n    set_stream 1\n    sync 0\n    %v.i = neg(%v.i)\n"
        f"    set_stream 0\n    free %v.i\n{LAST}"
    )
    text = str(edited(LAST, new)).replace("0..8 {", "0..5 {").replace("= alloc", "= alloc(fill=0)")
    program = hir.parse(text.replace("    %g = accumulate(%g.i)\n", ""))
    for in_full in (False, True):
        with pytest.raises(mf.MdfuseError, match=r"%c\.i@4 on stream 0 while"):
            verify(program, in_full)


@pytest.mark.parametrize("what", WRONG)
def test_faults_between_iterations(what: str) -> None:
    old, new, said = WRONG[what]
    program = edited(old, new)
    for in_full in (False, True):
        with pytest.raises(mf.MdfuseError) as found:
            verify(program, in_full)
        assert said in str(found.value)


def test_broken_loops() -> None:
    """The verdict is the one on all iterations written out."""
    for seed, program in enumerate((hir.parse(APART), added_up(40, 8))):
        check_verdicts(program, loops(program), seed, 60)
