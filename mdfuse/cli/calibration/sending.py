"""Communications that a calibration measures: by themselves, behind other work, and beside it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from mdfuse.cli.calibration.microbenchmarks import (
    CHAINS,
    ONCE_S,
    OPTIONS,
    Microbenchmark,
    how_often,
    repeated,
    runs_of,
)
from mdfuse.cli.calibration.scales import Scale
from mdfuse.compiled.program import compile
from mdfuse.config import Options
from mdfuse.frontend.definition import FusionDefinition
from mdfuse.hir.instructions import POSTS
from mdfuse.hir.program import HostProgram
from mdfuse.hir.rank.pipelines import project
from mdfuse.layouts.layout import Layout, Partial, Shard
from mdfuse.mesh import DeviceMesh
from mdfuse.seeing.amounts import is_work
from mdfuse.seeing.cost_keys import LinkKey

#: Kind of communication -> layouts before and after.
_SETS: dict[str, tuple[Any, Any]] = {
    "Allreduce": (Partial(), None),
    "Allgather": (Shard(0), None),
    "ReduceScatter": (Partial(), Shard(0)),
    "AllToAll": (Shard(0), Shard(1)),
}


#: The kind of a transfer from one rank to another one.
_PAIR = "SendRecv"


@dataclass(frozen=True, slots=True)
class Way:
    """A kind of communication among the first of some ranks, by a backend.

    Attributes:
        kind: of communication.
        ranks: how many take part.
        backend: which carries it; None: the usual one.
        options: that its programs are compiled with.
    """

    kind: str
    ranks: int
    backend: str | None = None
    options: Options = OPTIONS

    @property
    def key(self) -> LinkKey:
        """Its key in `mdfuse.seeing.Costs.links`."""
        ranks = 0 if self.kind == _PAIR else self.ranks
        return LinkKey(self.kind, ranks=ranks, backend=self.backend)

    def sets(self, fd: FusionDefinition, dtype: torch.dtype, size: int) -> Any:
        """Define work on about so many bytes, and return a set of its result.

        In programs, too, the sent data has just been written, on the stream that waits for it.
        """
        moved = fd.ops.set(self.written(fd, dtype, size))
        if self.kind == _PAIR:
            return moved.on(DeviceMesh([1]))
        after = _SETS[self.kind][1]
        return moved.on(DeviceMesh.arange(x=self.ranks), {} if after is None else {"x": after})

    def written(self, fd: FusionDefinition, dtype: torch.dtype, size: int) -> Any:
        """Define that work alone, and return its result."""
        count = max(1, size // dtype.itemsize)
        if self.kind == _PAIR:
            return -fd.define_tensor([count], dtype, mesh=DeviceMesh([0]))
        mesh, columns = DeviceMesh.arange(x=self.ranks), 8 * self.ranks
        shape = (max(1, count // columns // self.ranks) * self.ranks, columns)
        before = {"x": _SETS[self.kind][0]}
        return (-fd.define_tensor(shape, dtype, layout=Layout(mesh, before))).on(mesh, before)


#: A backend, None for the usual one -> the options of programs whose communications it carries.
Backends = Mapping[str | None, Options]

USUAL: Backends = {None: OPTIONS}


def ways(ranks: int, backends: Backends = USUAL) -> list[Way]:
    """Return each kind among the first 2, 4, … of some ranks, and all of them, on each backend."""
    teams = sorted({1 << n for n in range(1, ranks.bit_length())} | {ranks})
    kinds = [(kind, n) for n in teams if 1 < n <= ranks for kind in _SETS]
    kinds += [(_PAIR, 2)] if ranks > 1 else []
    return [Way(*kind, *backend) for backend in backends.items() for kind in kinds]


def links(scale: Scale, of: Iterable[Way]) -> Iterator[Microbenchmark]:
    """Yield communications of each size."""
    for way in of:
        for size in scale.messages:
            with FusionDefinition(way.kind.lower()) as fd:
                fd.add_output(way.sets(fd, scale.dtypes[0], size))
                for y in _between(scale, fd, way) if scale.between_s else ():
                    fd.add_output(y)
            host = compile(fd, way.options).host
            yield _behind(scale, way, host) if scale.between_s else _sent(scale, way, host)
        yield from (_chilled(scale, way, size) for size in scale.chilled)


def _between(scale: Scale, fd: FusionDefinition, way: Way) -> Iterator[Any]:
    """Define products of about as long as ranks work between communications, on each mesh."""
    n = scale.features[1]
    m = max(1, round(scale.between_s * scale.flops / (2 * n * n)))
    return _products(scale, fd, way, m, n, n)


def _products(
    scale: Scale, fd: FusionDefinition, way: Way, m: int, n: int, k: int
) -> Iterator[Any]:
    of_pair = [DeviceMesh([0]), DeviceMesh([1])]
    for mesh in of_pair if way.kind == _PAIR else [DeviceMesh.arange(x=way.ranks)]:
        x, w = (fd.define_tensor([size, k], scale.dtypes[0], mesh=mesh) for size in (m, n))
        yield fd.ops.linear(x, w)


def _chilled(scale: Scale, way: Way, size: int) -> Microbenchmark:
    """Return the subject of communications behind a product that evicts a GPU's cache.

    The product has few rows and more weights than the cache holds, so that the library's own data
    is evicted, too.
    """
    m, n, k = scale.rows[1], scale.features[-2], scale.features[-3]
    with FusionDefinition("chilled") as fd:
        fd.add_output(way.sets(fd, scale.dtypes[0], size))
        for y in _products(scale, fd, way, m, n, k):
            fd.add_output(y)
    host = _products_first(compile(fd, way.options).host)
    subject = _sent(scale, way, host)
    program = repeated(host, _BEHIND, frees=True)
    return replace(subject, table="colds", program=program, times=_BEHIND, runs=_BEHIND_RUNS)


def _products_first(host: HostProgram) -> HostProgram:
    work = [i for i in host.instructions if i.fn == "linear"]
    others = [i for i in host.instructions if i.fn != "linear"]
    return replace(host, instructions=(*work, *others))


#: How many communications there are in a run, each behind other work; runs of a sample at most, and
#: seconds of a sample from which on it has fewer.
_BEHIND, _BEHIND_RUNS, _BEHIND_S = 4, 4, 25e-3


def _behind(scale: Scale, way: Way, host: HostProgram) -> Microbenchmark:
    """Return the subject of communications, each of them behind other work of its ranks."""
    post = next(i for i in host.instructions if i.op in POSTS)
    behind = _products_first(host)
    others = [i for i in host.instructions if i.fn != "linear"]
    sent = {*post.outputs, *(x for i in others if i.op in (*POSTS, "wait") for x in i.outputs)}
    left = tuple(i for i in behind.instructions if i.op not in (*POSTS, "wait"))
    without = replace(
        behind, instructions=left, outputs=tuple(x for x in host.outputs if x not in sent)
    )
    subject = _sent(scale, way, behind)
    once = scale.between_s + 4 * received(host) / scale.bandwidth
    return replace(
        subject,
        program=repeated(behind, _BEHIND, frees=True),
        without=repeated(without, _BEHIND, frees=True),
        times=_BEHIND,
        runs=max(1, min(_BEHIND_RUNS, round(_BEHIND_S / (_BEHIND * once)))),
        local=(),
    )


def received(host: HostProgram) -> int:
    """Return the bytes that a rank receives by the first communication of a program, at least 1."""
    comm, *_ = host.communications
    return max(1, *(comm.bytes_received(rank) for rank in comm.destination.mesh.ranks))


def _sent(scale: Scale, way: Way, host: HostProgram) -> Microbenchmark:
    moved = received(host)
    once = max(4 * moved / scale.bandwidth, 10 * ONCE_S)  # slower than memory
    loops = how_often(scale, once)
    mine = project(host, host.communications[0].source.mesh.ranks[0])
    local = tuple(i for i in mine.instructions if is_work(i))
    return Microbenchmark(
        table="links",
        key=way.key,
        at=float(moved),
        program=repeated(host, loops, frees=True),
        times=loops,
        runs=runs_of(scale, once * loops),
        local=local,
        options=way.options,
    )


def beside(scale: Scale, way: Way, size: int, *, sends: bool) -> HostProgram:
    """Return a program of a product, and of a communication beside it.

    Args:
        scale: what is measured.
        way: the communication.
        size: its bytes.
        sends: whether there is one; its data is written either way.
    """
    mesh = DeviceMesh.arange(x=way.ranks)
    m, n = scale.beside
    with FusionDefinition("beside") as fd:
        fd.add_output((way.sets if sends else way.written)(fd, scale.dtypes[0], size))
        a = fd.define_tensor([m, n], scale.dtypes[0], mesh=mesh)
        w = fd.define_tensor([n, n], scale.dtypes[0], mesh=mesh)
        fd.add_output(fd.ops.linear(a, w))
    return repeated(compile(fd, way.options).host, BESIDE, frees=True)


#: Repetitions of work beside a communication in a run.
BESIDE = 2


def posting(scale: Scale, ranks: int, options: Options) -> Iterator[HostProgram]:
    """Yield two programs of equal small communications, of which the second one has twice as many.

    Args:
        scale: what is measured.
        ranks: how many there are, at least two.
        options: of programs that the usual backend carries.
    """
    way = Way("Allgather", ranks, None, options)
    with FusionDefinition("posting") as fd:
        fd.add_output(way.sets(fd, scale.dtypes[0], scale.messages[0]))
    host = compile(fd, options).host
    for count in CHAINS:
        yield repeated(host, count // 4, frees=True)
