"""What arrives is received where it would be copied to, if nothing else is there."""

from __future__ import annotations

import pytest
import torch
from helpers.oracle import POISON

import mdfuse as mf
from mdfuse import DeviceMesh, Shard, Stream, hir, simulate
from mdfuse.hir.rank import accumulate_in_place
from mdfuse.hir.rank.pipelines import project
from mdfuse.hir.rank.unroll import write

HEAD = """host @landing on mesh(x=2) {
  input %a: f32[4] of [8] (x=S0)
"""

#: What the other rank has, in %y.
SWAP = """  %got: f32[4] of [8] (x=S0) = alloc
  group_start
  %c0 = send(%a, to=(coord(x) + 1) mod 2, axis=x)
  %c1 = recv(%got, from=(coord(x) + 1) mod 2, axis=x)
  group_end
  wait %c0
  wait %c1
  %y = set(%got)
"""

#: name -> body, in which SWAP stands for that, and how many of its copies are left on rank 0.
CASES = {
    "a part of a sum": (
        """  %y: f32[4] of [8] (x=S0) = alloc
SWAP  free %got
  %z: f32[4] of [8] (x=S0) = add(%y, %a)
  free %y
  return %z
""",
        0,
    ),
    "something is there": (
        """  %y: f32[4] of [8] (x=S0) = mul(%a, 2.0)
  %z: f32[4] of [8] (x=S0) = neg(%y)
SWAP  free %got, %y
  return %z
""",
        1,
    ),
    "it is read once more": (
        """  %y: f32[4] of [8] (x=S0) = alloc
SWAP  %z: f32[4] of [8] (x=S0) = add(%y, %got)
  free %got, %y
  return %z
""",
        1,
    ),
    "an output": (
        """  %y: f32[4] of [8] (x=S0) = alloc
SWAP  free %got
  return %y
""",
        0,
    ),
}


def sets(program: hir.HostProgram) -> int:
    return sum(i.fn == "set" for i in program.instructions)


@pytest.mark.parametrize("name", CASES)
def test_what_is_received_in_its_place(name: str) -> None:
    body, left = CASES[name]
    program = hir.parse(HEAD + body.replace("SWAP", SWAP) + "}\n")
    plain = write(project(program, 0))
    assert sets(plain) == 1
    assert sets(accumulate_in_place.receive(plain)) == left
    whole = torch.arange(8.0)
    got = simulate(program, [whole], options=POISON).outputs[0]
    other = torch.cat([whole[4:], whole[:4]])
    want = {"a part of a sum": other + whole, "something is there": -2 * whole}
    assert torch.equal(got, want.get(name, 2 * other if "once more" in name else other))


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("rows", [12, 13])
def test_a_ring_copies_no_first_part(pieces: int, rows: int) -> None:
    """Products whose terms are added up in a ring, of shards that may be uneven."""
    mesh = DeviceMesh.arange(tp=2)
    with mf.FusionDefinition("ring") as fd:
        x = fd.define_tensor([rows, 8], mesh=mesh, layout={"tp": Shard(1)})
        w = fd.define_tensor([8, 4], mesh=mesh, layout={"tp": Shard(0)})
        around = Stream(0, 2 * pieces, rotate="tp")
        fd.add_output((x @ w).on(mesh, {"tp": Shard(0)}, stream=around))
    program = mf.compile(fd)
    for rank in (0, 1):
        plain = write(project(program.host, rank))
        found = accumulate_in_place.receive(plain)
        before, after = (
            [i for i in p.instructions if i.fn == "set" and "recv" in i.reads[0]]
            for p in (plain, found)
        )
        assert not after and len(before) == (0 if rows % pieces else pieces)
    draw = torch.Generator().manual_seed(rows)
    inputs = [torch.randint(-9, 9, s, generator=draw).float() for s in ((rows, 8), (8, 4))]
    got = mf.simulate(program, inputs, options=POISON).outputs[0]
    assert torch.equal(got, inputs[0] @ inputs[1])
