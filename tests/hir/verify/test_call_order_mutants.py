"""Every swap, drop and repetition of a call of small pipelines is refused, or changes nothing."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from helpers.pipelines import Net, batch_of, meshes, sines

import mdfuse as mf
from mdfuse import hir
from mdfuse.hir.program import Instruction
from mdfuse.hir.rank.pipelines import project
from mdfuse.hir.verify.check import verify

Calls = tuple[Instruction, ...]
POISON = mf.Options(poison=True)

#: Name of a schedule -> the mesh of each stage; all that it can have of few.
PLACES = {
    "gpipe": ([0, 1], [0, 1, 0]),
    "1f1b": ([0], [0, 1], [0, 1, 2]),
    "interleaved": ([0, 1], [0, 1, 0, 1]),
    "zb1p": ([0], [0, 1]),
    "zbv": ([0, 0], [0, 1, 1, 0]),
    "dualpipev": ([0, 0],),
}
CASES = [
    (name, places, count)
    for name, every in PLACES.items()
    for places in every
    for count in (1, 2)
    if name != "dualpipev" or count >= len(places)
]


def mutants(calls: Calls) -> Iterator[Calls]:
    """Each swap of two calls; each call left out; each call once more, at each place."""
    places = range(len(calls))
    for a, b in itertools.combinations(places, 2):
        other = {a: calls[b], b: calls[a]}
        yield tuple(other.get(n, i) for n, i in enumerate(calls))
    for a in places:
        yield calls[:a] + calls[a + 1 :]
        for b in range(len(calls) + 1):
            yield (*calls[:b], calls[a], *calls[b:])


def with_calls(program: hir.HostProgram, calls: Calls) -> hir.HostProgram:
    """The program with other calls, where its calls stand."""
    code = program.instructions
    at = next(n for n, i in enumerate(code) if i.op == "call")
    kept = [i for i in code if i.op != "call"]
    return replace(program, instructions=(*kept[:at], *calls, *kept[at:]))


def refusal(program: hir.HostProgram) -> str | None:
    try:
        verify(program)
    except mf.MdfuseError as error:
        return str(error)
    return None


def check(program: hir.HostProgram, net: Net) -> None:
    """Run a program on all ranks and compare with torch."""
    given = dict(zip(program.inputs, net.inputs, strict=True))
    ranks = [
        {name: x.clone() for name, x in given.items() if program.has(name, rank)}
        for rank in range(program.last_rank + 1)
    ]
    found = mf.simulate(program, per_rank=ranks, options=POISON).per_rank
    for n, want in enumerate(net.wanted):
        (got,) = (outputs[n] for outputs in found if outputs[n] is not None)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("name", "places", "count"), CASES)
def test_every_other_list_of_calls(name: str, places: list[int], count: int) -> None:
    every = meshes(1 + max(places))
    net = sines([every[n] for n in places], batch=2 * count)
    program = mf.pipeline(
        net.definition, microbatches=count, batch=batch_of(net), schedule=name
    ).host
    calls = tuple(i for i in program if i.op == "call")
    ranks = [{i.fn for i in project(program, r) if i.op == "call"} for r in range(len(every))]
    seen = set()
    for mutant in mutants(calls):
        rows = tuple(tuple((i.fn, i.attrs) for i in mutant if i.fn in mine) for mine in ranks)
        if rows in seen:
            continue  # every rank does what it does in one that was tried
        seen.add(rows)
        broken = with_calls(program, mutant)
        told = refusal(broken)
        if told is None:
            assert sorted(map(str, mutant)) == sorted(map(str, calls))
            check(broken, net)
        else:
            assert re.search(r"call [FBIWT]\d+\(\d\)", told), told
