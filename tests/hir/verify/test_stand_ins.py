"""Ranks and numbers that others stand for: when they do, and what is seen all the same."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from helpers.microbatches import added_up

import mdfuse as mf
from mdfuse import hir
from mdfuse.hir.verify import check, verify


def asked(program: hir.HostProgram, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the verifier does what costs much."""
    found: Counter[str] = Counter()
    for name in ("folded", "check_types"):
        function = getattr(check, name)

        def counted(*given: Any, name: str = name, function: Any = function) -> Any:
            found[name] += 1
            return function(*given)

        monkeypatch.setattr(check, name, counted)
    verify(program)
    monkeypatch.undo()
    return found


def test_even_parts_are_verified_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(added_up(48, 8), monkeypatch) == {"folded": 1, "check_types": 1}


def test_uneven_parts_are_verified_on_the_first_and_the_last_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert asked(added_up(47, 8), monkeypatch) == {"folded": 2, "check_types": 2}


#: Rank 0 posts rows 0 and 1, rank 1 rows 2 and 3; the loop writes two rows.
OVERWRITES = """
host @overwrites on mesh(tp=2) {
  input %x: f32[4] (tp=R)
  %y: f32[4] (tp=R) = exp(%x)
  %part: f32[2] of [4] (tp=S0) = narrow(%y)
  %z: f32[4] (tp=R) = alloc
  %c = post allgather(%part) -> %z f32[4] (tp=S0) => (tp=R) axis=tp dim=0
  for %i in FIRST..LAST {
    %y.i: f32[2] of [4] (tp=R, chunk(0,2,%i)) = chunk(%y)
    %x.i: f32[2] of [4] (tp=R, chunk(0,2,%i)) = chunk(%x)
    %y.i = neg(%x.i)
  }
  wait %c
  return %z
}"""


@pytest.mark.parametrize("first", [0, 1])
def test_what_only_one_rank_does_wrong_is_refused(first: int) -> None:
    text = OVERWRITES.replace("FIRST", str(first)).replace("LAST", str(first + 1))
    with pytest.raises(mf.MdfuseError, match="still using"):
        verify(hir.parse(text))


def test_without_the_write_it_is_right() -> None:
    text = OVERWRITES.replace("FIRST", "1").replace("LAST", "2")
    verify(hir.parse(text.replace("    %y.i = neg(%x.i)\n", "")))


#: Chunks 0 to 3 of five rows have two, two, one and no rows.
@pytest.mark.parametrize(("rows", "is_right"), [(8, True), (5, False)])
def test_a_letter_stands_for_chunks_of_one_size(rows: int, is_right: bool) -> None:
    text = f"""
host @pairs on mesh(tp=1) {{
  input %x: f32[{rows}] (tp=R)
  %y: f32[{rows}] (tp=R) = alloc
  for %i in 0..4 {{
    %x.i: f32[2] of [{rows}] (tp=R, chunk(0,4,%i)) = chunk(%x)
    %y.i: f32[2] of [{rows}] (tp=R, chunk(0,4,%i)) = chunk(%y)
    %y.i = neg(%x.i)
  }}
  return %y
}}"""
    program = hir.parse(text)
    verify(program)
    local = [check.holds_for_numbers(program.project(0))]
    assert local == [is_right]


@pytest.mark.parametrize("index", ["(%i + 1) mod 4", "0"])
def test_numbers_of_two_chunks_are_compared(index: str) -> None:
    with pytest.raises(mf.MdfuseError, match="chunk"):
        verify(
            hir.parse(f"""
host @apart on mesh(tp=1) {{
  input %x: f32[8] (tp=R)
  %y: f32[8] (tp=R) = alloc
  for %i in 0..4 {{
    %x.i: f32[2] of [8] (tp=R, chunk(0,4,{index})) = chunk(%x)
    %y.i: f32[2] of [8] (tp=R, chunk(0,4,%i)) = chunk(%y)
    %y.i = neg(%x.i)
  }}
  return %y
}}""")
        )
