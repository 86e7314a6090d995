"""One rank stands for all where each takes the chunks in an order shifted by its place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.mutants import check_verdicts

import mdfuse as mf
from mdfuse import DeviceMesh, Options, Shard, Stream, hir
from mdfuse.hir import HostProgram
from mdfuse.hir.verify import check, verify
from mdfuse.hir.verify.shifted import even

RANKS = 5


def ring(rows: int) -> HostProgram:
    """Two products whose rows go round, rank by rank."""
    mesh = DeviceMesh.arange(tp=RANKS)
    turn, split = Stream(0, RANKS, rotate="tp"), {"tp": Shard(0)}
    with mf.FusionDefinition("ring") as fd:
        x = fd.define_tensor([rows, 6], torch.float32, mesh, split)
        w1 = fd.define_tensor([6, 2 * RANKS], torch.float32, mesh, {"tp": Shard(1)})
        w2 = fd.define_tensor([2 * RANKS, 6], torch.float32, mesh, {"tp": Shard(0)})
        whole = fd.ops.set(x).on(mesh, stream=turn)
        h = fd.ops.matmul(whole, w1).on(mesh, {"tp": Shard(1)}, stream=turn)
        y = fd.ops.matmul(fd.ops.relu(h), w2).on(mesh, split, stream=turn)
        fd.add_output(y)
    return mf.compile(fd, Options(verify=False)).host


#: Parts and chunks of equal sizes; of other sizes; parts without rows; the last has none.
ROWS = (2 * RANKS, 2 * RANKS - 1, 2, RANKS - 1)


@pytest.mark.parametrize("rows", ROWS)
def test_one_rank_is_verified(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    program, found = ring(rows), Counter[str]()
    for name in ("folded", "check_types"):
        function: Callable[..., Any] = getattr(check, name)

        def counted(*given: Any, name: str = name, function: Any = function) -> Any:
            found[name] += 1
            return function(*given)

        monkeypatch.setattr(check, name, counted)
    verify(program)
    assert found == {"folded": 1, "check_types": 1}
    verify(program, in_full=True)


@pytest.mark.parametrize("rows", ROWS)
def test_faults(rows: int) -> None:
    """The verdict is the one on all ranks, with all iterations written out."""
    program = ring(rows)
    code = program.instructions
    places = [*range(len(code)), *(n for n, i in enumerate(code) if len(i.body) > 4)]
    check_verdicts(program, places, rows, 40)


CHUNKS = """
host @chunks on mesh(tp=3) {
  input %x: f32[5] (tp=R)
  %y: f32[5] (tp=R) = alloc
  for %i in 0..3 {
    %x.i: f32[2] of [5] (tp=R, chunk(0,3,(%i + coord(tp)) mod 3)) = chunk(%x)
    %y.i: f32[2] of [5] (tp=R, chunk(0,3,(%i + coord(tp)) mod 3)) = chunk(%y)
    %y.i = neg(%x.i)
  }
  return %y
}"""

#: What one rank does not stand for: a part of the text, and what stands there instead.
APART = {
    "a chunk that is one for all ranks": (
        "%x.i: f32[2] of [5] (tp=R, chunk(0,3,(%i + coord(tp)) mod 3))",
        "%x.i: f32[2] of [5] (tp=R, chunk(0,3,%i))",
    ),
    "chunks in the opposite order": (
        "%y.i: f32[2] of [5] (tp=R, chunk(0,3,(%i + coord(tp)) mod 3))",
        "%y.i: f32[2] of [5] (tp=R, chunk(0,3,(%i - coord(tp)) mod 3))",
    ),
    "an index of the rank alone": ("(%i + coord(tp)) mod 3", "coord(tp) mod 3"),
    "a part that is cut otherwise": (
        "  return %y",
        "  %z: f32[2] of [5] (tp=S0) = narrow(%y)\n  return %y",
    ),
    "an op that has other attributes on each rank": (
        "  return %y",
        "  %z: f32[3] (tp=R) = slice(%y, starts=[0], ends=[3], steps=[1])\n  return %y",
    ),
    "an alias": ("  %y: f32[5] (tp=R) = alloc", "  alias %y: f32[5] (tp=R) = %x"),
}


def test_chunks_without_transfers() -> None:
    program = hir.parse(CHUNKS)
    verify(program)
    assert even(program) is not None


@pytest.mark.parametrize("what", APART)
def test_programs_in_which_ranks_differ(what: str) -> None:
    old, new = APART[what]
    assert old in CHUNKS
    assert even(hir.parse(CHUNKS.replace(old, new))) is None


def test_two_loops_of_one_index() -> None:
    """What the first loop leaves is another chunk, written alike."""
    loop = CHUNKS[CHUNKS.index("  for") : CHUNKS.index("  return")]
    again = loop.replace("for %i in 0..3", "for %i in 1..3")
    assert even(hir.parse(CHUNKS.replace(loop, loop + again))) is None


@pytest.mark.parametrize("line", ["%y.i = neg(%x.i)", "%x.i: ", "%y.i: "])
def test_a_missing_line_is_seen(line: str) -> None:
    text = "\n".join(x for x in CHUNKS.splitlines() if not x.strip().startswith(line))
    with pytest.raises(mf.MdfuseError):
        verify(hir.parse(text))
