"""Iterations that are written out as one: parts that are added up, communications, views."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers.microbatches import added_up
from helpers.mutants import check_verdicts, is_right, loops

import mdfuse as mf
from mdfuse import DeviceMesh, Options, Shard, Stream
from mdfuse.hir import HostProgram
from mdfuse.hir.verify.folded import folded

MESH = DeviceMesh.arange(dp=2, tp=2)


def microbatches(count: int) -> HostProgram:
    return added_up(6 * count, count)


def chunks(count: int) -> HostProgram:
    """Uneven chunks, each all-reduced."""
    stream = Stream(0, count)
    with mf.FusionDefinition("chunks") as fd:
        x = fd.define_tensor([2 * count - 1, 4], torch.float32, MESH, {"tp": Shard(1)})
        w = fd.define_tensor([4, 4], torch.float32, MESH, {"tp": Shard(0)})
        fd.add_output(fd.ops.relu(fd.ops.set(x @ w).on(MESH, stream=stream)))
    return mf.compile(fd, Options(verify=False)).host


@pytest.mark.parametrize("make", [microbatches, chunks])
def test_what_is_written_out_does_not_grow(make: Callable[[int], HostProgram]) -> None:
    lengths = set()
    for count in (8, 32):
        found = folded(make(count).project(0))
        assert found is not None
        lengths.add(len(found))
    assert len(lengths) == 1


@pytest.mark.parametrize("make", [microbatches, chunks])
def test_faults_in_iterations(make: Callable[[int], HostProgram]) -> None:
    """The verdict is the one on all iterations written out."""
    program = make(5)
    assert is_right(program, False) and is_right(program, True)
    check_verdicts(program, loops(program), 0, 50)


FORK = "for %s in 0..2 {\n    set_stream %s\n    sync %caller\n  }"
JOIN = "set_stream %caller\n  for %s in 0..2 {\n    sync %s\n  }"
TWICE = """
host @twice on mesh(dp=2) {{
  input %x: f32[8,8] (dp=R)
  %caller = get_stream
  {}
  set_stream 1
  %a: f32[8,8] (dp=R) = neg(%x)
  {}
  %b: f32[8,8] (dp=R) = neg(%a)
  {}
  set_stream 0
  %c: f32[8,8] (dp=R) = neg(%b)
  {}
  %y: f32[8,8] (dp=R) = neg(%c)
  return %y
}}"""


@pytest.mark.parametrize("missing", [None, 0, 1, 2, 3])
def test_loops_that_only_switch_streams(missing: int | None) -> None:
    """They are written down once, and each of them orders what was queued before it."""
    loops = [FORK, JOIN, FORK, JOIN]
    if missing is not None:
        loops[missing] = "set_stream %caller"
    program = mf.hir.parse(TWICE.format(*loops))
    assert is_right(program, False) == is_right(program, True) == (missing is None)


LETTERS = """
host @letters on mesh(dp=2) {{
  input %x: f32[8,8] (dp=R)
  input %w: f32[8,8] (dp=R)
  %h: f32[8,8] (dp=R) = alloc
  %y: f32[8,8] (dp=R) = alloc
  for %i in 0..4 {{
    %x.i: f32[2,8] of [8,8] (dp=R, chunk(0,4,(%i + coord(dp)) mod 4)) = chunk(%x)
    %h.i: f32[2,8] of [8,8] (dp=R, chunk(0,4,(%i + coord(dp)) mod 4)) = chunk(%h)
    %h.i = add(%x.i, %x.i)
  }}
  for %j in 0..4 {{
    %h.j: f32[2,8] of [8,8] (dp=R, chunk(0,4,{read})) = chunk(%h)
    %y.j: f32[2,8] of [8,8] (dp=R, chunk(0,4,{made})) = chunk(%y)
    %y.j = add(%h.j, %h.j)
  }}
  return %y
}}"""


@pytest.mark.parametrize(
    ("read", "made", "expected"),
    [
        ("(%j + coord(dp)) mod 4", "(%j + coord(dp)) mod 4", True),
        ("(%j + coord(dp)) mod 4", "((%j + coord(dp)) + 1) mod 4", False),
        ("(coord(dp) - %j) mod 4", "(%j + coord(dp)) mod 4", False),
    ],
)
def test_rows_in_loops_over_other_indices(read: str, made: str, expected: bool) -> None:
    """A row is asked about once, whatever the index is called by which its chunks are numbered."""
    program = mf.hir.parse(LETTERS.format(read=read, made=made))
    assert is_right(program, False) == is_right(program, True) == expected
