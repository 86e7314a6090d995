"""Explain how a program's posts are carried: in groups, staging memory, mixed backends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from mdfuse.config import Options, backend_choice, options_from_environment
from mdfuse.errors import counted
from mdfuse.evaluator import HostIrEvaluator
from mdfuse.hir.instructions import TRANSFERS
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.hir.rank.pipelines import as_run, project
from mdfuse.hir.row_norms import is_sum
from mdfuse.plan.arena import arena
from mdfuse.runtime.backend_rows import BACKENDS
from mdfuse.runtime.sharing import carried
from mdfuse.seeing.report.numbers import size_text


def staging(host: HostProgram, options: Options | None) -> Iterator[str]:
    """Yield lines on the staging memory of the backends that carry a program's posts."""
    usual = backend_choice(options_from_environment(options).backend).usual
    for name, named in ((usual, None), *((x, x) for x in host.backends)):
        posted = [*_teams(host, named)]
        room = BACKENDS[name].staging if name in BACKENDS else {}
        if posted and room:
            teams = len({*posted})
            sizes = " or ".join(f"{size_text(n)} of {of}" for of, n in room.items())
            yield f"staging: {name} takes {sizes} memory of a rank for each team, at most {teams}"
    if any(i.kwargs.get("memory") == "symmetric" for i in host.walk()):
        first = host.meshes[0].ranks[0]
        size = arena(as_run(project(host, first))).size
        if size:
            yield f"arena: {size_text(size)} of a GPU for what the others copy from rank {first}"


def together(host: HostProgram) -> Iterator[str]:
    """Yield a line for each kind of posts that go in groups, of the parameters of a layer each."""
    group, sizes = list[Instruction](), defaultdict[str, list[list[int]]](list)
    for i in host.instructions:
        if i.op == "group_start":
            group = []
        elif i.op == "post":
            group.append(i)
        elif i.op == "group_end" and group and group[0].comm is not None:
            of = sizes[group[0].comm.kind]
            of.append([host.types[j.reads[-1]].nbytes() for j in group])
    for kind, of in sizes.items():
        most = size_text(max(map(sum, of)))
        yield (
            f"groups: {sum(map(len, of))} {kind} in {counted(len(of), 'post')}, one for the"
            f" parameters of a layer, which brings at most {most} (bucket_bytes)"
        )


def between_carriers(host: HostProgram, options: Options | None) -> Iterator[str]:
    """Yield a line for each set of axes of several backends along which programs exchange."""
    choice = backend_choice(options_from_environment(options).backend)
    counts = dict[tuple[str, ...], int]()
    for i in host.walk():
        axes = i.comm.along if i.comm is not None and not i.comm.axes else ()
        if choice.carriers and len({choice.by_axis.get(a, choice.usual) for a in axes}) > 1:
            counts[axes] = counts.get(axes, 0) + 1
    for axes, n in counts.items():
        of = " and ".join(f"{a} ({choice.by_axis.get(a, choice.usual)})" for a in axes)
        yield (
            f"backends: {counted(n, 'exchange')} along {of}, by {choice.usual}, the usual one: it"
            " is one post along all of them"
        )


def _teams(host: HostProgram, backend: str | None) -> Iterator[object]:
    """Yield the key of the teams of each post that names a backend."""
    for i in host.walk():
        if i.comm is not None and i.comm.backend == backend:
            yield i.comm.source.mesh, i.comm.destination.mesh, i.comm.axes
        elif i.op in TRANSFERS and i.kwargs.get("backend") == backend:
            layout = host.types[i.reads[0]].placed
            yield layout.mesh, layout.mesh, tuple(filter(None, [i.kwargs.get("axis")]))


def elsewhere(last: HostIrEvaluator | None) -> Iterator[str]:
    """Yield lines on teams that another backend carries than was asked for, once they are made."""
    if last is not None and last.communicator is not None:
        yield from carried(last.communicator)


def norms(host: HostProgram) -> Iterator[str]:
    """Yield a line on sums over ranks that are computed with the norms behind them."""
    sums = [i for i in host.walk() if is_sum(i)]
    joined = sum("then" in i.kwargs for i in sums)
    if joined:
        what = "sums over ranks with the norms behind them in one kernel, on GPUs by symmetric"
        yield f"sums: {joined} of {len(sums)} {what}"
