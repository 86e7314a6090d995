"""What the text of a host program shows alone."""

from __future__ import annotations

import pytest

from mdfuse import ProgramError, hir
from mdfuse.hir.verify.check import verify

LOOP = """host @by_turns on mesh(x=1) {
  input %x: f32[4] (x=R)
  %z: f32[] (x=R) = alloc
  for %i in 0..2 {
    %x.i: f32[2] of [4] (x=R, chunk(0,2,FIRST)) = chunk(%x)
    %z.i: f32[] (x=R, chunk(P(sum),2,SECOND)) = sum(%x.i, dims=[0])
    %z = accumulate(%z.i)
  }
  return %z
}"""

STRAIGHT = """host @straight on mesh(x=1) {
  input %x: f32[4] (x=R)
  %x.i: f32[2] of [4] (x=R, chunk(0,2,FIRST)) = chunk(%x)
  %z: f32[] (x=R) = alloc
  %z.i: f32[] (x=R, chunk(P(sum),2,SECOND)) = sum(%x.i, dims=[0])
  %z = accumulate(%z.i)
  return %z
}"""


def text(program: str, first: str, second: str) -> str:
    return program.replace("FIRST", first).replace("SECOND", second)


def test_a_chunk_is_named_by_the_index_of_its_loop() -> None:
    verify(hir.parse(text(LOOP, "%i", "%i")))


@pytest.mark.parametrize("program", [LOOP, STRAIGHT])
@pytest.mark.parametrize(
    ("first", "second", "name"),
    [("0", "%z.i", "z.i"), ("0", "%x", "x"), ("%nobody", "0", "nobody"), ("%x.i", "0", "x.i")],
)
def test_what_counts_nothing_is_no_index(program: str, first: str, second: str, name: str) -> None:
    with pytest.raises(ProgramError) as found:
        verify(hir.parse(text(program, first, second)))
    assert f": %{name} is no index\n" in str(found.value)
