"""Groups, and transfers outside of them, go on one after the other: a cycle of them is refused."""

from __future__ import annotations

import pytest
import torch

import mdfuse as mf
from mdfuse import hir
from mdfuse.hir.verify.check import verify

RING = """
host @ring on mesh(tp={n}) {{
  input %x: f32[2] of [{rows}] (tp=S0)
  %y: f32[2] of [{rows}] (tp=S0) = alloc
{body}
  return %y
}}"""
SEND = "  %s = send(%x, to=(coord(tp) + 1) mod {n}, axis=tp)\n"
RECV = "  %r = recv(%y, from=(coord(tp) - 1) mod {n}, axis=tp)\n"
WAITS = "  wait %r\n  wait %s"


def ring(n: int, body: str) -> hir.HostProgram:
    return hir.parse(RING.format(n=n, rows=2 * n, body=body.format(n=n)))


@pytest.mark.parametrize("in_full", [False, True])
@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("pair", [SEND + RECV, RECV + SEND])
def test_a_ring_needs_a_group(n: int, pair: str, in_full: bool) -> None:
    verify(ring(n, "  group_start\n" + pair + "  group_end\n" + WAITS), in_full)
    with pytest.raises(mf.CommunicationError, match="wait for each other") as error:
        verify(ring(n, pair + WAITS), in_full)
    hint = "put those that need each other between one group_start and its group_end"
    assert error.value.hint == hint
    with pytest.raises(mf.CommunicationError, match="wait for each other"):
        verify(ring(n, "  group_start\n" + SEND + "  group_end\n" + RECV + WAITS), in_full)
    lines = pair.splitlines(keepends=True)
    groups = "".join(f"  group_start\n{line}  group_end\n" for line in lines)
    with pytest.raises(mf.CommunicationError, match="wait for each other"):
        verify(ring(n, groups + WAITS), in_full)


def test_one_rank_of_the_ring_begins_with_its_receive() -> None:
    """Then it goes round, one rank after the other."""
    start = "  if coord(tp) == 0 {{\n" + RECV + SEND + WAITS + "\n  }} else {{\n"
    program = ring(4, start + SEND + RECV + WAITS + "\n  }}")
    given = [{"x": torch.tensor([rank, rank + 0.5])} for rank in range(4)]
    found = mf.simulate(program, per_rank=given).per_rank
    assert [y[0].item() for (y,) in found] == [3.0, 0.0, 1.0, 2.0]


@pytest.mark.parametrize("in_full", [False, True])
def test_to_itself_no_group_is_needed(in_full: bool) -> None:
    pair = (SEND + RECV).replace("+ 1", "+ 0").replace("- 1", "- 0")
    verify(ring(3, pair + WAITS), in_full)


def test_two_ranks_one_of_which_sends_first() -> None:
    text = """
host @swap on mesh(tp=2) {
  input %x: f32[2] (tp=varies)
  %y: f32[2] (tp=varies) = alloc
  if rank == 0 {
    %s = send(%x, to=1)
    %r = recv(%y, from=1)
    wait %s
    wait %r
  } else {
    %r1 = recv(%y, from=0)
    %s1 = send(%x, to=0)
    wait %s1
    wait %r1
  }
  return %y
}"""
    given = [{"x": torch.tensor([1.0, 2.0])}, {"x": torch.tensor([3.0, 4.0])}]
    found = mf.simulate(hir.parse(text), per_rank=given).per_rank
    assert [y.tolist() for (y,) in found] == [[3.0, 4.0], [1.0, 2.0]]
    first, second = "%r1 = recv(%y, from=0)", "%s1 = send(%x, to=0)"
    swapped = text.replace(first, "FIRST").replace(second, first).replace("FIRST", second)
    with pytest.raises(mf.CommunicationError, match="wait for each other"):
        verify(hir.parse(swapped))
