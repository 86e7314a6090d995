"""Host programs in which ranks send each other terms of sums, each with the whole that it is of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import mdfuse as mf
from helpers import promised
from helpers.programs import program_texts
from mdfuse import hir
from mdfuse.hir import HostProgram


@dataclass(frozen=True)
class Ring:
    """A program whose only input is Partial, and whose outputs hold its whole value."""

    text: str
    op: str = "sum"

    @property
    def program(self) -> HostProgram:
        return hir.parse(self.text)


#: Templates: of terms that are kept side by side and added up behind the loop; of a term that is
#: sent on as a term and reduced by a post; of sums along one axis, then along the other one; …
TERMS = program_texts("terms")
CHUNK = "f32[{part},3] of [{rows},3] (tp=P(sum), chunk(0,{n},(coord(tp) - {k}) mod {n}))"


def texts(n: int, rows: int) -> Iterator[tuple[str, str, str]]:
    """Yield (name, text, reduce op) of each ring over n ranks."""
    names = {"n": n, "rows": rows, "part": -(-rows // n)}
    scatter = TERMS["scatter"]
    plain = scatter.format(**names, mesh=f"tp={n}", dp="")
    yield "scatter", plain, "sum"
    yield "in a grid", scatter.format(**names, mesh=f"dp=2, tp={n}", dp="dp=R, "), "sum"
    yield "scaled", plain.replace("= set(%r.i)", "= mul(%r.i, 1.0)"), "sum"
    for op, join in (("max", "maximum"), ("min", "minimum"), ("prod", "mul")):
        yield op, plain.replace("P(sum)", f"P({op})").replace("add(", f"{join}("), op
    for name in ("by_turns", "side_by_side", "sent_on"):
        yield name.replace("_", " "), TERMS[name].format(**names), "sum"
    yield "neighbour", neighbour(**names), "sum"
    yield "in place", in_place(**names), "sum"
    yield "two axes", TERMS["two_axes"].format(**names), "sum"


def in_place(n: int, rows: int, part: int) -> str:
    """Sums go round that lie in one buffer."""
    text = neighbour(n, rows, part, "in_place_step")
    head, tail = text.split("  %a1:")
    copied = f"  %h: f32[{rows},3] (tp=P(sum)) = mul(%x, 1.0)\n"
    tail = tail.replace("= chunk(%x)", "= chunk(%h)").replace("  return", "  free %h\n  return")
    return f"{head}{copied}  %a1:{tail}"


def neighbour(n: int, rows: int, part: int, step: str = "neighbour_step") -> str:
    """Sums go round, to which each rank adds its own term."""

    def chunk(k: int) -> str:
        return CHUNK.format(n=n, rows=rows, part=part, k=k)

    steps = [TERMS[step].format(k=k, before=k - 1, n=n, chunk=chunk(k)) for k in range(2, n)]
    own = {"n": n, "rows": rows, "part": part, "first": chunk(1), "last": max(n - 1, 1)}
    return TERMS["neighbour"].format(**own, steps="".join(steps))


def rings(n: int, rows: int) -> dict[str, Ring]:
    return {name: Ring(text, op) for name, text, op in texts(n, rows)}


#: reduce op -> the whole of all terms, which stand along the first dim.
WHOLE = {
    "sum": lambda x: x.sum(0),
    "prod": lambda x: x.prod(0),
    "max": lambda x: x.amax(0),
    "min": lambda x: x.amin(0),
    "avg": lambda x: x.mean(0),
}


def wrong(program: HostProgram, op: str = "sum", schedule: int | None = None) -> str | None:
    """What is wrong with what the ranks hold in the end, by whole tensors; None: nothing."""
    (name,) = program.inputs
    kind = program.types[name]
    assert kind.layout is not None
    mesh = kind.layout.mesh
    generator = torch.Generator().manual_seed(3)
    shape = (*mesh.shape, *kind.shape)
    terms = torch.randint(1, 9, shape, generator=generator).to(kind.dtype)
    partial = [mesh.axis_index(a) for a in kind.layout.partial_axes]
    for at in {*range(mesh.ndim)} - {*partial}:  # the same on all ranks
        terms = terms.select(at, 0).unsqueeze(at).expand(shape)
    whole = terms
    for at in range(mesh.ndim):
        whole = WHOLE[op](whole.movedim(at, 0)).unsqueeze(at) if at in partial else whole
    whole = whole[(0,) * mesh.ndim]
    given: list[dict[str, Tensor]] = [{} for _ in mesh.ranks]
    for rank in mesh.ranks:
        coordinate = mesh.coordinate(rank)
        assert coordinate is not None
        given[rank][name] = terms[coordinate].clone()
    options = mf.Options(poison=True, verify=False)
    found = mf.simulate(program, per_rank=given, options=options, schedule=schedule).per_rank
    for at, output in enumerate(program.outputs):
        held = [row[at] for row in found]
        problem = promised.difference(program.types[output], whole, held)
        if problem is not None:
            return problem
    return None
