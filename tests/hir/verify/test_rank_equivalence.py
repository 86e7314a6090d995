"""Stages that do the same are checked once: what is wrong with one alone is seen all the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from helpers.ring_programs import verdict

import mdfuse as mf
from mdfuse import DeviceMesh, Replicate, Shard, hir
from mdfuse.hir.rank.execute import executed
from mdfuse.hir.verify import check
from mdfuse.hir.verify.check import verify
from mdfuse.hir.verify.rank_equivalence import key_of


def stages(*first_ranks: int, hosts: bool = False) -> hir.HostProgram:
    """Layers of an MLP, each on two ranks of its own; the next one gets its result."""
    with mf.FusionDefinition("stages") as fd:
        x = None
        for rank in first_ranks:
            mesh = DeviceMesh([rank, rank + 1], ["tp"], [0, 0] if hosts else None)
            x = fd.define_tensor([8, 5], torch.float32, mesh) if x is None else fd.ops.set(x)
            x = x.on(mesh) if rank != first_ranks[0] else x
            w1 = fd.define_tensor([4, 5], torch.float32, mesh, {"tp": Shard(0)})
            w2 = fd.define_tensor([5, 4], torch.float32, mesh, {"tp": Shard(1)})
            x = fd.ops.linear(fd.ops.linear(x, w1), w2).on(mesh)
        fd.add_output(x)
    return mf.compile(fd, mf.Options(verify=False)).host


PROGRAM = stages(0, 2, 4, 6)


def changed() -> Iterator[hir.HostProgram]:
    """The program without one of its instructions, or with one in another place."""
    code = PROGRAM.instructions
    for n in range(len(code)):
        rest = (*code[:n], *code[n + 1 :])
        yield replace(PROGRAM, instructions=rest)
        for to in (n - 1, n + 1, n + 2):
            if 0 <= to <= len(rest):
                yield replace(PROGRAM, instructions=(*rest[:to], code[n], *rest[to:]))


def test_the_verdict_is_that_of_all_stages() -> None:
    verify(PROGRAM)
    verdicts = set()
    for program in changed():
        verdicts.add(verdict(program, False))
        assert verdict(program, False) == verdict(program, True), program
    assert {"", "ProgramError"} <= verdicts


@pytest.mark.parametrize("change", ["dtype", "shape", "layout"])
def test_a_type_of_one_stage_is_seen(change: str) -> None:
    made = {n for i in PROGRAM.instructions if i.op not in ("alloc", "free") for n in i.outputs}
    for name in made & PROGRAM.types.keys():
        kind = PROGRAM.types[name]
        assert kind.layout is not None
        other = {
            "dtype": {"dtype": torch.float64},
            "shape": {"shape": (*kind.shape[:-1], kind.shape[-1] + 1)},
            "layout": {
                "layout": kind.layout.with_placement(
                    "tp", Shard(0) if kind.layout.is_replicated else Replicate()
                )
            },
        }[change]
        types = {**PROGRAM.types, name: replace(kind, **other)}
        assert verdict(replace(PROGRAM, types=types), False) == "ProgramError", name


def keys(program: hir.HostProgram) -> list[object]:
    ranks = sorted({r for mesh in program.meshes for r in mesh})
    ends = check._by_mesh(program, program.inputs), check._by_mesh(program, program.outputs)
    held = (check._held(executed(program, r), program, ends) for r in ranks)
    return [key_of(mine, program.written_inputs) for mine in held]


def test_which_ranks_are_alike() -> None:
    """The first stage receives nothing, the last one sends nothing."""
    found = keys(PROGRAM)
    assert found[2:4] == found[4:6] and len({*found}) == 6
    apart = keys(stages(0, 2, 4, 7))  # the third one sends farther
    assert apart[2] != apart[4]
    assert {*keys(stages(0, 2, hosts=True))} == {None}
