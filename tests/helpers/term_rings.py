"""Host programs in which ranks send each other terms of sums, each with the whole that it is of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import mdfuse as mf
from helpers import promised
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


SCATTER = """
host @scatter on mesh({mesh}) {{
  input %x: f32[{rows},3] ({dp}tp=P(sum))
  %y: f32[{part},3] of [{rows},3] ({dp}tp=S0) = alloc
  for %i in 0..{n} {{
    %p.i: f32[{part},3] of [{rows},3] ({dp}tp=P(sum), chunk(0,{n},(coord(tp) + %i) mod {n})) = chunk(%x)
    %r.i: f32[{part},3] of [{rows},3] ({dp}tp=S0) = alloc
    group_start
    %c0 = send(%p.i, to=(coord(tp) + %i) mod {n}, axis=tp)
    %c1 = recv(%r.i, from=(coord(tp) - %i) mod {n}, axis=tp)
    group_end
    wait %c1
    if %i == 0 {{
      %y = set(%r.i)
    }} else {{
      %y = add(%y, %r.i)
    }}
    free %r.i
    wait %c0
    free %p.i
  }}
  return %y
}}"""  # noqa: E501

#: The next chunk is on its way while what arrived is added, to zeros at first; on two streams.
BY_TURNS = """
host @by_turns on mesh(tp={n}) {{
  input %x: f32[{rows},3] (tp=P(sum))
  %caller = get_stream
  %y: f32[{part},3] of [{rows},3] (tp=S0) = alloc(fill=0)
  set_stream 1
  sync %caller
  for %i in 0..{n} {{
    set_stream 1
    %p.i: f32[{part},3] of [{rows},3] (tp=P(sum), chunk(0,{n},(coord(tp) - %i) mod {n})) = chunk(%x)
    %r.i: f32[{part},3] of [{rows},3] (tp=S0) = alloc
    group_start
    %c0 = send(%p.i, to=(coord(tp) - %i) mod {n}, axis=tp)
    %c1 = recv(%r.i, from=(coord(tp) + %i) mod {n}, axis=tp)
    group_end
    next
    set_stream 1
    wait %c1
    %y = add(%y, %r.i)
    wait %c0
    free %r.i, %p.i
  }}
  set_stream %caller
  sync 1
  return %y
}}"""

#: Terms are kept side by side, and added up behind the loop.
SIDE_BY_SIDE = """
host @side_by_side on mesh(tp={n}) {{
  input %x: f32[{rows},3] (tp=P(sum))
  %all: f32[{n},{part},3] of [{n},{rows},3] (tp=S1) = alloc
  for %i in 0..{n} {{
    %p.i: f32[{part},3] of [{rows},3] (tp=P(sum), chunk(0,{n},(coord(tp) + %i) mod {n})) = chunk(%x)
    %r.i: f32[{part},3] of [{rows},3] (tp=S0) = select(%all, dim=0, index=%i)
    group_start
    %c0 = send(%p.i, to=(coord(tp) + %i) mod {n}, axis=tp)
    %c1 = recv(%r.i, from=(coord(tp) - %i) mod {n}, axis=tp)
    group_end
    wait %c0
    wait %c1
    free %r.i, %p.i
  }}
  %y: f32[{part},3] of [{rows},3] (tp=S0) = sum(%all, dims=[0])
  free %all
  return %y
}}"""

#: A term is sent on as a term, and reduced by a post.
SENT_ON = """
host @sent_on on mesh(tp={n}) {{
  input %x: f32[{rows},3] (tp=P(sum))
  %h: f32[{rows},3] (tp=P(sum)) = alloc
  group_start
  %c0 = send(%x, to=(coord(tp) + 1) mod {n}, axis=tp)
  %c1 = recv(%h, from=(coord(tp) - 1) mod {n}, axis=tp)
  group_end
  wait %c0
  wait %c1
  %y: f32[{rows},3] (tp=R) = alloc
  %c2 = post allreduce[sum](%h) -> %y f32[{rows},3] (tp=P(sum)) => (tp=R) axis=tp
  wait %c2
  free %h
  return %y
}}"""

CHUNK = "f32[{part},3] of [{rows},3] (tp=P(sum), chunk(0,{n},(coord(tp) - {k}) mod {n}))"
NEIGHBOUR_STEP = """\
  %r{k}: {chunk} = alloc
  group_start
  %s{k} = send(%a{before}, to=(coord(tp) + 1) mod {n}, axis=tp)
  %t{k} = recv(%r{k}, from=(coord(tp) - 1) mod {n}, axis=tp)
  group_end
  wait %s{k}
  wait %t{k}
  %x{k}: {chunk} = chunk(%x)
  %a{k}: {chunk} = add(%r{k}, %x{k})
  free %a{before}, %r{k}, %x{k}
"""
NEIGHBOUR = """
host @neighbour on mesh(tp={n}) {{
  input %x: f32[{rows},3] (tp=P(sum))
  %y: f32[{part},3] of [{rows},3] (tp=S0) = alloc
  %own: f32[{part},3] of [{rows},3] (tp=P(sum), chunk(0,{n},coord(tp))) = own(%y)
  %xc: f32[{part},3] of [{rows},3] (tp=P(sum), chunk(0,{n},coord(tp))) = chunk(%x)
  %own = set(%xc)
  free %own, %xc
  %a1: {first} = chunk(%x)
{steps}\
  %r: f32[{part},3] of [{rows},3] (tp=S0) = alloc
  group_start
  %s = send(%a{last}, to=(coord(tp) + 1) mod {n}, axis=tp)
  %t = recv(%r, from=(coord(tp) - 1) mod {n}, axis=tp)
  group_end
  wait %s
  wait %t
  %y = add(%y, %r)
  free %a{last}, %r
  return %y
}}"""

#: The same, with sums in the chunks of one buffer.
IN_PLACE_STEP = """\
  %r{k}: {chunk} = alloc
  group_start
  %s{k} = send(%a{before}, to=(coord(tp) + 1) mod {n}, axis=tp)
  %t{k} = recv(%r{k}, from=(coord(tp) - 1) mod {n}, axis=tp)
  group_end
  wait %s{k}
  wait %t{k}
  %a{k}: {chunk} = chunk(%h)
  %a{k} = add(%a{k}, %r{k})
  free %a{before}, %r{k}
"""

#: Along one axis, then along the other one.
TWO_AXES = """
host @two_axes on mesh(dp=2, tp={n}) {{
  input %x: f32[{rows},4] (dp=P(sum), tp=P(sum))
  %h: f32[{part},4] of [{rows},4] (dp=P(sum), tp=S0) = alloc
  for %i in 0..{n} {{
    %p.i: f32[{part},4] of [{rows},4] (dp=P(sum), tp=P(sum), chunk(0,{n},(coord(tp) + %i) mod {n})) = chunk(%x)
    %r.i: f32[{part},4] of [{rows},4] (dp=P(sum), tp=S0) = alloc
    group_start
    %c0 = send(%p.i, to=(coord(tp) + %i) mod {n}, axis=tp)
    %c1 = recv(%r.i, from=(coord(tp) - %i) mod {n}, axis=tp)
    group_end
    wait %c1
    if %i == 0 {{
      %h = set(%r.i)
    }} else {{
      %h = add(%h, %r.i)
    }}
    free %r.i
    wait %c0
    free %p.i
  }}
  %y: f32[{part},2] of [{rows},4] (dp=S1, tp=S0) = alloc
  for %j in 0..2 {{
    %p.j: f32[{part},2] of [{rows},4] (dp=P(sum), tp=S0, chunk(1,2,(coord(dp) + %j) mod 2)) = chunk(%h)
    %r.j: f32[{part},2] of [{rows},4] (dp=S1, tp=S0) = alloc
    group_start
    %c2 = send(%p.j, to=(coord(dp) + %j) mod 2, axis=dp)
    %c3 = recv(%r.j, from=(coord(dp) - %j) mod 2, axis=dp)
    group_end
    wait %c3
    if %j == 0 {{
      %y = set(%r.j)
    }} else {{
      %y = add(%y, %r.j)
    }}
    free %r.j
    wait %c2
    free %p.j
  }}
  free %h
  return %y
}}"""  # noqa: E501


def texts(n: int, rows: int) -> Iterator[tuple[str, str, str]]:
    """Yield (name, text, reduce op) of each ring over n ranks."""
    names = {"n": n, "rows": rows, "part": -(-rows // n)}
    plain = SCATTER.format(**names, mesh=f"tp={n}", dp="")
    yield "scatter", plain, "sum"
    yield "in a grid", SCATTER.format(**names, mesh=f"dp=2, tp={n}", dp="dp=R, "), "sum"
    yield "scaled", plain.replace("= set(%r.i)", "= mul(%r.i, 1.0)"), "sum"
    for op, join in (("max", "maximum"), ("min", "minimum"), ("prod", "mul")):
        yield op, plain.replace("P(sum)", f"P({op})").replace("add(", f"{join}("), op
    yield "by turns", BY_TURNS.format(**names), "sum"
    yield "side by side", SIDE_BY_SIDE.format(**names), "sum"
    yield "sent on", SENT_ON.format(**names), "sum"
    yield "neighbour", neighbour(**names), "sum"
    yield "in place", in_place(**names), "sum"
    yield "two axes", TWO_AXES.format(**names), "sum"


def in_place(n: int, rows: int, part: int) -> str:
    """Sums go round that lie in one buffer."""
    text = neighbour(n, rows, part, IN_PLACE_STEP)
    head, tail = text.split("  %a1:")
    copied = f"  %h: f32[{rows},3] (tp=P(sum)) = mul(%x, 1.0)\n"
    tail = tail.replace("= chunk(%x)", "= chunk(%h)").replace("  return", "  free %h\n  return")
    return f"{head}{copied}  %a1:{tail}"


def neighbour(n: int, rows: int, part: int, step: str = NEIGHBOUR_STEP) -> str:
    """Sums go round, to which each rank adds its own term."""

    def chunk(k: int) -> str:
        return CHUNK.format(n=n, rows=rows, part=part, k=k)

    steps = [step.format(k=k, before=k - 1, n=n, chunk=chunk(k)) for k in range(2, n)]
    own = {"n": n, "rows": rows, "part": part, "first": chunk(1), "last": max(n - 1, 1)}
    return NEIGHBOUR.format(**own, steps="".join(steps))


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
