"""The verifier sees every broken program: one thing is changed at a time.

An instruction of one rank: a mutant that it accepts must be no different. The simulator, with
poisoned buffers, in lockstep and in 20 random orders, reports nothing and gives the same outputs.

A type, a communication or an attribute, for all ranks alike: what the ranks hold is what the types
of the mutant promise, which `promised.py` computes on whole tensors.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from helpers import promised
from helpers.mutants import Mutant, mutants
from helpers.programs import program_texts
from helpers.stream_cases import CASES
from helpers.two_stage import CASES as TWO_STAGES
from helpers.type_mutants import OP, Change, type_mutants

import mdfuse as mf
from mdfuse import DeviceMesh, Shard, hir
from mdfuse.hir.rank.pipelines import project
from mdfuse.hir.verify.check import verify

SCHEDULES = (None, *range(20))
POISON = mf.Options(poison=True)
Programs = list[hir.HostProgram]
Given = list[dict[str, torch.Tensor]]
TYPED = program_texts("typed")

#: The values depend on the rank.
BY_RANK = program_texts("by_rank")


def by_hand(text: str) -> tuple[Programs, Given]:
    """The projections of a program, and random inputs of each rank."""
    program = hir.parse(text)
    ranks = range(program.last_rank + 1)
    generator = torch.Generator().manual_seed(0)
    given: Given = [{} for _ in ranks]
    for rank in ranks:
        for name in program.inputs:
            shape = program.types[name].local_shape(rank)
            given[rank][name] = torch.randn(shape, generator=generator)
    return [project(program, rank) for rank in ranks], given


def compiled(program: mf.Program, seed: int = 0) -> tuple[Programs, Given]:
    """The same of a compiled program; every rank along an axis that replicates has one value."""
    host = program.host
    ranks = range(host.last_rank + 1)
    generator = torch.Generator().manual_seed(seed)
    given: Given = [{} for _ in ranks]
    for name in host.inputs:
        kind = host.types[name]
        assert kind.layout is not None
        whole = torch.randn(kind.shape, generator=generator).to(kind.dtype)
        for rank in kind.layout.mesh.ranks:
            given[rank][name] = mf.shard_tensor(whole, kind.layout, rank=rank)
    return [project(host, rank) for rank in ranks], given


def programs() -> dict[str, tuple[Programs, Given]]:
    """What is broken: programs by hand, streamed ones, changes of layout between meshes."""
    found = {name: by_hand(text) for name, text in program_texts("check_mutants").items()}
    for name in (
        "one_op", "several_loops", "gather_another_dim", "gather_matmul",
        "gather_matmul_in_a_ring", "matmul_scatter", "matmul_scatter_in_a_ring",
        "matmul_scatter_columns", "matmul_reduce", "gather_by_exchanges", "ring_in_a_grid",
        "send_to_a_mesh", "reduce_to_a_mesh", "reused",
    ):  # fmt: skip
        found[name] = compiled(CASES[name].compile())
    with mf.FusionDefinition("step") as fd:
        x = fd.define_tensor(
            [8, 2], mesh=DeviceMesh.arange(dp=2), layout={"dp": Shard(0)}, name="x"
        )
        w = fd.define_tensor([2], mesh=DeviceMesh.arange(dp=2))
        fd.add_output(w - (x * w).square().mean(0), reuse=w)
    found["microbatches"] = compiled(mf.pipeline(fd, microbatches=2, batch={"x": 0}))
    for case in TWO_STAGES[::97]:
        found[str(case)] = compiled(case.program())
    return found


PROGRAMS = programs()


def outputs(ranks: Programs, given: Given, schedule: int | None) -> list[list[torch.Tensor | None]]:
    copies = [{name: x.clone() for name, x in row.items()} for row in given]
    done = mf.simulate(ranks, per_rank=copies, options=POISON, schedule=schedule)
    return [list(row) for row in done.per_rank]


def are_equal(
    a: Sequence[Sequence[torch.Tensor | None]], b: Sequence[Sequence[torch.Tensor | None]]
) -> bool:
    pairs = zip((x for row in a for x in row), (x for row in b for x in row), strict=True)
    return all(
        x is y is None or (x is not None and y is not None and torch.equal(x, y)) for x, y in pairs
    )


def is_caught(ranks: Programs) -> bool:
    try:
        verify(dict(enumerate(ranks)))
    except mf.MdfuseError:
        return True
    return False


def difference(
    ranks: Programs, given: Given, wanted: list[list[torch.Tensor | None]]
) -> str | None:
    """How a run of broken programs differs from that of the right ones, in some order."""
    for schedule in SCHEDULES:
        try:
            got = outputs(ranks, given, schedule)
        except Exception as error:
            return f"schedule {schedule}: {error}"
        if not are_equal(got, wanted):
            return f"schedule {schedule}: other outputs"
    return None


def mutated(ranks: Programs, mutant: Mutant) -> Programs:
    return [mutant.program if p.rank == mutant.program.rank else p for p in ranks]


#: What became of the mutants of all programs, for the last test.
counts: Counter[str] = Counter()


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_broken_program_is_caught(name: str) -> None:
    ranks, given = PROGRAMS[name]
    verify(dict(enumerate(ranks)))
    wanted = outputs(ranks, given, None)
    assert difference(ranks, given, wanted) is None
    missed = []
    for rank in (ranks[0], ranks[-1]):
        for mutant in mutants(rank):
            broken = mutated(ranks, mutant)
            if is_caught(broken):
                counts["caught"] += 1
                counts[f"caught: {mutant.what}"] += 1
                continue
            found = difference(broken, given, wanted)
            if found is None:
                counts["no different"] += 1
            else:
                missed.append((name, str(mutant)))
    assert missed == []


# -- types, communications, attributes -----------------------------------------------------------

SEED = 1
#: So many mutants, drawn with SEED, of each compiled program and of each rank's program.
SAMPLE = 120
ORDERS = (None, 0, 1, 2)


def drawn(changes: Sequence[Change], n: int = SAMPLE) -> Sequence[Change]:
    return changes if len(changes) <= n else random.Random(SEED).sample(changes, n)


def is_refused(program: hir.HostProgram | dict[int, hir.HostProgram]) -> bool:
    try:
        verify(program)
    except mf.MdfuseError:
        return True
    return False


def whole_inputs(program: hir.HostProgram) -> tuple[dict[str, torch.Tensor], Given]:
    """Small integers as global inputs, and the parts of each rank."""
    generator = torch.Generator().manual_seed(0)
    given: dict[str, torch.Tensor] = {}
    rows: Given = [{} for _ in range(program.last_rank + 1)]
    for name in program.inputs:
        kind = program.types[name]
        low = -3 if kind.dtype.is_floating_point else 0
        given[name] = torch.randint(low, 4, kind.shape, generator=generator).to(kind.dtype)
        for row, part in zip(rows, promised.parts(kind, given[name], len(rows)), strict=True):
            row[name] = part
    return given, rows


def held(program: hir.HostProgram, rows: Given, schedule: int | None) -> list[list[torch.Tensor]]:
    copies = [{n: x.clone() if x is not None else None for n, x in row.items()} for row in rows]
    options = mf.Options(poison=True, verify=False)
    return mf.simulate(program, per_rank=copies, options=options, schedule=schedule).per_rank


def broken_promise(program: hir.HostProgram) -> str | None:
    """Where what ranks hold is not what the types of the outputs promise, in some order."""
    given, rows = whole_inputs(program)
    wanted = promised.values(program, given)
    for schedule in ORDERS:
        ranks = held(program, rows, schedule)
        for at, name in enumerate(program.outputs):
            mine = [outputs[at] for outputs in ranks]
            found = promised.difference(program.types[name], wanted[at], mine)
            if found is not None:
                return f"schedule {schedule}: %{name}: {found}"
    return None


def changed_outputs(program: hir.HostProgram, mutant: hir.HostProgram) -> str | None:
    """Where the ranks hold anything else than before, in some order."""
    pairs = [(program.types[n], mutant.types[n]) for n in program.inputs]
    if any(a.local_shape() != b.local_shape() for a, b in pairs):
        return None  # it takes other inputs
    _, rows = whole_inputs(program)
    wanted = held(program, rows, None)
    for schedule in ORDERS:
        if not are_equal(held(mutant, rows, schedule), wanted):
            return f"schedule {schedule}: other outputs"
    return None


def wrong_value(program: hir.HostProgram, what: str, mutant: hir.HostProgram) -> str | None:
    """What is wrong with an accepted mutant.

    What varies promises nothing, and where it is given a layout it has it on the author's word: so
    it must be as before.
    """
    varying = any(k.layout is not None and k.layout.varying_axes for k in mutant.types.values())
    try:
        is_by_rank = varying or any(i.op in ("send", "recv") for i in mutant.walk())
        return changed_outputs(program, mutant) if is_by_rank else broken_promise(mutant)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@cache
def global_programs() -> dict[str, hir.HostProgram]:
    found = {name: hir.parse(text) for name, text in (TYPED | BY_RANK).items()}
    for name in (
        "several_loops", "gather_another_dim", "gather_matmul", "gather_matmul_in_a_ring",
        "matmul_scatter", "matmul_scatter_in_a_ring", "matmul_scatter_columns",
        "gather_by_exchanges", "send_to_a_mesh", "reduce_to_a_mesh",
    ):  # fmt: skip
        found[name] = CASES[name].compile().host
    return found | {str(case): case.program().host for case in TWO_STAGES[::97]}


@pytest.mark.parametrize("name", global_programs())
def test_every_wrong_type_is_caught(name: str) -> None:
    program = global_programs()[name]
    verify(program)
    is_by_rank = any(i.op in ("send", "recv") for i in program.walk())
    assert (changed_outputs(program, program) if is_by_rank else broken_promise(program)) is None
    changes = [*type_mutants(program)]
    if is_by_rank:  # another op computes something else, and only ranks know what
        changes = [c for c in changes if not c[0].startswith(OP)]
    missed = []
    for what, mutant in changes if name in TYPED else drawn(changes):
        if is_refused(mutant):
            counts["wrong types caught"] += 1
            continue
        found = wrong_value(program, what, mutant)
        counts["wrong types: still true"] += found is None
        if found is not None:
            missed.append(f"{what}: {found}")
    assert missed == []


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_wrong_type_of_one_rank_is_caught(name: str) -> None:
    ranks, given = PROGRAMS[name]
    wanted = outputs(ranks, given, None)
    missed = []
    for rank in (ranks[0], ranks[-1]):
        changes = [c for c in type_mutants(rank) if not c[0].startswith(OP)]
        for what, mutant in drawn(changes, SAMPLE // 2):
            broken = [mutant if p.rank == rank.rank else p for p in ranks]
            if is_refused(dict(enumerate(broken))):
                counts["caught"] += 1
            elif (found := difference(broken, given, wanted)) is not None:
                missed.append(f"{what} of rank {rank.rank}: {found}")
    assert missed == []


def test_enough_mutants() -> None:
    """At least 2,000 broken programs; it counts what the test before has found, in the same run."""
    print(dict(counts))
    assert counts["caught"] >= 2000
    assert counts["wrong types caught"] >= 2000
