"""What a calibration measures: host programs that do one thing again and again."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from mdfuse.cli.calibration.scales import Scale, blocks_of
from mdfuse.compiled.program import Program, compile
from mdfuse.config import Options
from mdfuse.frontend.definition import FusionDefinition
from mdfuse.hir.instructions import POSTS
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.ir.graph import dtype_name
from mdfuse.layouts.layout import Layout, Partial, Shard
from mdfuse.mesh import DeviceMesh
from mdfuse.seeing.amounts import QUERIES, is_work, nbytes, operations, product

#: One thing at a time: nothing is compiled into kernels with other work.
OPTIONS = Options(compile="never", verify=False)

#: Columns of the tensors of pointwise work.
_WIDTH = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Something that is measured.

    Attributes:
        table: which field of `mdfuse.seeing.Costs` it is for.
        key: in that field.
        at: size: bytes or operations; (m, n, k) of a product; (blocks, keys, features of a head)
            of attention.
        program: does it `times` times in a run.
        times: how often.
        runs: how many make a sample, the same on all ranks.
        local: of a communication: the work beside it in the program, which is taken off.
        without: of a communication behind other work: the program without it, whose time is taken
            off instead.
        options: that it is run with.
    """

    table: Literal["works", "products", "attentions", "links"]
    key: str
    at: float | tuple[int, int, int]
    program: HostProgram
    times: int
    runs: int
    local: tuple[Instruction, ...] = ()
    without: HostProgram | None = None
    options: Options = OPTIONS


def repeated(program: HostProgram, loops: int, frees: bool = False) -> HostProgram:
    """Return a program whose instructions are done several times in a run.

    It has no outputs: what it computes stays in buffers of its plan, as most values of a program.

    Args:
        program: whose instructions.
        loops: how often.
        frees: whether its results are freed at once, so that others may take their place: what is
            reduced then stays where it lies, as in programs.
    """
    work = tuple(i for i in program.instructions if i.op != "return")
    if frees:
        work += (Instruction(op="free", inputs=program.outputs),)
    attrs = (("start", 0), ("stop", loops), ("step", 1))
    loop = Instruction(op="for", outputs=("again",), attrs=attrs, body=work)
    return replace(program, instructions=(loop, Instruction(op="return")), outputs=())


#: Weights of products that do not fill a cache, and how much longer than others a run of products
#: may take where it takes more of them.
_LEAST_WEIGHTS, _LONGER = 4, 5

_Apply = Callable[[Any, Any, int], Any]

#: Work with curves of its own: name -> (definition, x, columns) -> result.
WORKS: dict[str, _Apply] = {
    "add": lambda fd, x, n: x + x,
    "mul": lambda fd, x, n: x * x,
    "neg": lambda fd, x, n: -x,
    "exp": lambda fd, x, n: fd.ops.exp(x),
    "tanh": lambda fd, x, n: fd.ops.tanh(x),
    "gelu": lambda fd, x, n: fd.ops.gelu(x),
    "silu": lambda fd, x, n: fd.ops.silu(x),
    "relu": lambda fd, x, n: fd.ops.relu(x),
    "rsqrt": lambda fd, x, n: fd.ops.rsqrt(x),
    "sum": lambda fd, x, n: fd.ops.sum(x, [-1]),
    "softmax": lambda fd, x, n: fd.ops.softmax(x, -1),
    "layer_norm": lambda fd, x, n: torch.nn.functional.layer_norm(x, (n,)),
    "rms_norm": lambda fd, x, n: torch.nn.functional.rms_norm(x, (n,)),
    "cat": lambda fd, x, n: torch.cat((x, x), -1),
}

#: Those that are measured in types but the first.
_FEW = ("add", "exp", "sum", "softmax")


def works(scale: Scale, mesh: DeviceMesh) -> Iterator[Subject]:
    """Yield pointwise work, reductions and copies, of each size; other work is like `add`."""
    for dtype in scale.dtypes:
        names = [*WORKS] if dtype is scale.dtypes[0] else _FEW
        for name, apply in ((name, WORKS[name]) for name in names):
            for size in scale.sizes:
                rows = max(1, size // dtype.itemsize // 2 // _WIDTH)
                subject = _work(scale, mesh, dtype, apply, (rows, _WIDTH))
                yield subject
                if name == "add":
                    yield replace(subject, key=f"* {dtype_name(dtype)}")
        for size in scale.sizes:
            yield _across(scale, mesh, dtype, size)
    for size in scale.compiled:
        yield _compiled_across(scale, mesh, scale.dtypes[0], size)


def _work(
    scale: Scale, mesh: DeviceMesh, dtype: torch.dtype, apply: _Apply, shape: tuple[int, ...]
) -> Subject:
    size = 2 * math.prod(shape) * dtype.itemsize
    with FusionDefinition("work") as fd:
        for _ in range(max(1, min(scale.tensors, scale.stale // size))):
            x = fd.define_tensor(shape, dtype, mesh=mesh)
            fd.add_output(apply(fd, x, shape[-1]))
    return _local(scale, "works", compile(fd, OPTIONS).host)


def _across(scale: Scale, mesh: DeviceMesh, dtype: torch.dtype, size: int) -> Subject:
    """Return the subject of sums of two tensors, one of which lies column by column."""
    rows = max(1, size // dtype.itemsize // 2 // _WIDTH)
    with FusionDefinition("across") as fd:
        for _ in range(max(1, min(scale.tensors, scale.stale // size))):
            fd.add_output(_sum_across(fd, mesh, dtype, rows))
    found = _local(scale, "works", compile(fd, OPTIONS).host)
    return replace(found, key=f"across {dtype_name(dtype)}")


def _compiled_across(scale: Scale, mesh: DeviceMesh, dtype: torch.dtype, size: int) -> Subject:
    """Return the subject of the same in a launch, of which a compiler makes one kernel, where
    there is one: as programs have it by default."""
    with FusionDefinition("across") as fd:  # a launch is of two operations at least
        fd.add_output(-_sum_across(fd, mesh, dtype, max(1, size // dtype.itemsize // 2 // _WIDTH)))
    options = replace(OPTIONS, compile="auto")
    found = _local(scale, "works", compile(fd, options).host)
    return replace(found, key=f"compiled across {dtype_name(dtype)}", options=options)


def _sum_across(fd: FusionDefinition, mesh: DeviceMesh, dtype: torch.dtype, rows: int) -> Any:
    x = fd.define_tensor([rows, _WIDTH], dtype, mesh=mesh)
    z = fd.define_tensor([_WIDTH, rows], dtype, mesh=mesh)
    return x + fd.ops.permute(z, [1, 0])


def _local(scale: Scale, table: Literal["works", "products"], host: HostProgram) -> Subject:
    """Return the subject of a program of equal instructions."""
    mine = host.project(host.meshes[0].ranks[0])
    (first, *more) = [i for i in mine.instructions if is_work(i)]
    sizes, count, moved = product(mine, first), operations(mine, first), nbytes(mine, first)
    works = 1 + len(more)
    once = max(count / scale.flops, moved / scale.bandwidth, _ONCE_S)
    loops = max(1, _times(scale, once) // works)
    dtype = dtype_name(mine.types[first.outputs[0]].dtype)
    return Subject(
        table=table,
        key=f"{first.fn} {dtype}",
        at=(sizes[1], sizes[2], sizes[3]) if sizes is not None else float(count or moved),
        program=repeated(host, loops),
        times=loops * works,
        runs=_runs(scale, once * loops * works),
    )


#: What anything takes at least, a guess.
_ONCE_S = 2e-6

#: Runs of a sample at most.
_MOST_RUNS = 16


def _times(scale: Scale, once: float) -> int:
    return max(1, min(scale.most, round(scale.run_s / once)))


def _runs(scale: Scale, run_s: float) -> int:
    return max(1, min(_MOST_RUNS, round(scale.sample_s / run_s)))


def products(scale: Scale, mesh: DeviceMesh) -> Iterator[Subject]:
    """Yield linear layers and, fewer, products, on a grid; in types but the first also fewer."""
    for dtype in scale.dtypes:
        for is_linear in (True, False):
            step = 1 if is_linear and dtype is scale.dtypes[0] else 2
            features = scale.features[::-1][::step][::-1]
            for m in scale.rows[::-1][::step][::-1]:
                for n in features:
                    yield from (_product(scale, mesh, dtype, is_linear, m, n, k) for k in features)


def _product(
    scale: Scale, mesh: DeviceMesh, dtype: torch.dtype, is_linear: bool, m: int, n: int, k: int
) -> Subject:
    size = n * k * dtype.itemsize
    once = max(2 * m * n * k / scale.flops, size / scale.bandwidth, _ONCE_S)
    most = max(_LEAST_WEIGHTS, min(scale.tensors, round(_LONGER * scale.run_s / once)))
    weights = max(1, min(most, scale.cache // size))
    with FusionDefinition("product") as fd:
        x = fd.define_tensor([m, k], dtype, mesh=mesh)
        for _ in range(weights):
            w = fd.define_tensor([n, k] if is_linear else [k, n], dtype, mesh=mesh)
            fd.add_output(fd.ops.linear(x, w) if is_linear else x @ w)
    return _local(scale, "products", compile(fd, OPTIONS).host)


#: Features of a head of attention.
_HEADS = 32, 64, 128


def attentions(scale: Scale, mesh: DeviceMesh) -> Iterator[Subject]:
    """Yield attention, with and without a causal mask: on a GPU by blocks, keys and features of a
    head, else by operations."""
    dtype = scale.dtypes[0]
    name = dtype_name(dtype)
    for mask, head, length in itertools.product(("", " causal"), _HEADS, scale.lengths):
        if not scale.multiprocessors:
            found = _attention(scale, mesh, [1, 16, length, head], mask)
            yield replace(found, key=f"attention {name} {head}{mask}")
        for blocks in blocks_of(scale):
            heads = blocks // math.ceil(length / QUERIES)
            found = _attention(scale, mesh, [1, heads, length, head], mask)
            at = blocks, length, head
            yield replace(found, table="attentions", key=f"{name}{mask}", at=at)


def _attention(scale: Scale, mesh: DeviceMesh, shape: list[int], mask: str) -> Subject:
    with FusionDefinition("attention") as fd:
        q, k, v = (fd.define_tensor(shape, scale.dtypes[0], mesh=mesh) for _ in range(3))
        fd.add_output(fd.ops.scaled_dot_product_attention(q, k, v, is_causal=bool(mask)))
    return _local(scale, "works", compile(fd, OPTIONS).host)


#: Kind of communication -> layouts before and after.
_SETS: dict[str, tuple[Any, Any]] = {
    "Allreduce": (Partial(), None),
    "Allgather": (Shard(0), None),
    "ReduceScatter": (Partial(), Shard(0)),
    "AllToAll": (Shard(0), Shard(1)),
}


#: The kind of what goes from one rank to another one.
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
    def key(self) -> str:
        """Its key in `mdfuse.seeing.Costs.links`."""
        name = self.kind if self.kind == _PAIR else f"{self.kind} {self.ranks}"
        return f"{self.backend}: {name}" if self.backend else name

    def sets(self, fd: FusionDefinition, dtype: torch.dtype, size: int) -> Any:
        """Define work on about so many bytes, and return what its result is set to.

        In programs, too, what is sent has just been written, on the stream that waits for it.
        """
        count = max(1, size // dtype.itemsize)
        if self.kind == _PAIR:
            x = fd.define_tensor([count], dtype, mesh=DeviceMesh([0]))
            return fd.ops.set(-x).on(DeviceMesh([1]))
        mesh, (before, after) = DeviceMesh.arange(x=self.ranks), _SETS[self.kind]
        columns = 8 * self.ranks
        shape = (max(1, count // columns // self.ranks) * self.ranks, columns)
        x = fd.define_tensor(shape, dtype, layout=Layout(mesh, {"x": before}))
        return fd.ops.set(-x).on(mesh, {} if after is None else {"x": after})


#: A backend, None for the usual one -> the options of programs whose communications it carries.
Backends = Mapping[str | None, Options]

_USUAL: Backends = {None: OPTIONS}


def ways(ranks: int, backends: Backends = _USUAL) -> list[Way]:
    """Return each kind among the first 2, 4, … of some ranks, and all of them, on each backend."""
    teams = sorted({1 << n for n in range(1, ranks.bit_length())} | {ranks})
    found = [(kind, n) for n in teams if 1 < n <= ranks for kind in _SETS]
    found += [(_PAIR, 2)] if ranks > 1 else []
    return [Way(*kind, *backend) for backend in backends.items() for kind in found]


def links(scale: Scale, of: Iterable[Way]) -> Iterator[Subject]:
    """Yield communications of each size."""
    for way in of:
        for size in scale.messages:
            with FusionDefinition(way.kind.lower()) as fd:
                fd.add_output(way.sets(fd, scale.dtypes[0], size))
                for y in _between(scale, fd, way) if scale.between_s else ():
                    fd.add_output(y)
            host = compile(fd, way.options).host
            yield _behind(scale, way, host) if scale.between_s else _sent(scale, way, host)


def _between(scale: Scale, fd: FusionDefinition, way: Way) -> Iterator[Any]:
    """Define products of about as long as ranks work between communications, on each mesh."""
    n, dtype = scale.features[1], scale.dtypes[0]
    m = max(1, round(scale.between_s * scale.flops / (2 * n * n)))
    of_pair = [DeviceMesh([0]), DeviceMesh([1])]
    for mesh in of_pair if way.kind == _PAIR else [DeviceMesh.arange(x=way.ranks)]:
        x, w = (fd.define_tensor([size, n], dtype, mesh=mesh) for size in (m, n))
        yield fd.ops.linear(x, w)


#: How many communications there are in a run, each behind other work; and runs of a sample.
_BEHIND, _BEHIND_RUNS = 4, 4


def _behind(scale: Scale, way: Way, host: HostProgram) -> Subject:
    """Return the subject of communications each of which comes when its ranks have worked."""
    post = next(i for i in host.instructions if i.op in POSTS)
    work = [i for i in host.instructions if i.fn == "linear"]
    rest = [i for i in host.instructions if i.fn != "linear"]
    behind = replace(host, instructions=(*work, *rest))
    sent = {*post.outputs, *(x for i in rest if i.op in (*POSTS, "wait") for x in i.outputs)}
    left = tuple(i for i in behind.instructions if i.op not in (*POSTS, "wait"))
    without = replace(
        behind, instructions=left, outputs=tuple(x for x in host.outputs if x not in sent)
    )
    found = _sent(scale, way, behind)
    return replace(
        found,
        program=repeated(behind, _BEHIND, frees=True),
        without=repeated(without, _BEHIND, frees=True),
        times=_BEHIND,
        runs=_BEHIND_RUNS,
        local=(),
    )


def _sent(scale: Scale, way: Way, host: HostProgram) -> Subject:
    comm = next(i.comm for i in host.instructions if i.op in POSTS and i.comm is not None)
    moved = max(comm.bytes_received(rank) for rank in comm.destination.mesh.ranks)
    once = max(4 * moved / scale.bandwidth, 10 * _ONCE_S)  # slower than memory
    loops = _times(scale, once)
    mine = host.project(comm.source.mesh.ranks[0])
    local = tuple(i for i in mine.instructions if is_work(i))
    return Subject(
        table="links",
        key=way.key,
        at=float(max(1, moved)),
        program=repeated(host, loops, frees=True),
        times=loops,
        runs=_runs(scale, once * loops),
        local=local,
        options=way.options,
    )


def beside(scale: Scale, way: Way, size: int | None, has_product: bool = True) -> HostProgram:
    """Return a program of a product and a communication beside it, or of one of them.

    Args:
        scale: what is measured.
        way: the communication.
        size: its bytes; None: there is none.
        has_product: whether there is a product.
    """
    mesh = DeviceMesh.arange(x=way.ranks)
    m, n = scale.rows[-1], scale.features[-2]
    with FusionDefinition("beside") as fd:
        if size is not None:
            fd.add_output(way.sets(fd, scale.dtypes[0], size))
        if has_product:
            a = fd.define_tensor([m, n], scale.dtypes[0], mesh=mesh)
            w = fd.define_tensor([n, n], scale.dtypes[0], mesh=mesh)
            fd.add_output(fd.ops.linear(a, w))
    return repeated(compile(fd, way.options).host, _BESIDE, frees=True)


#: How often something is done beside a communication in a run.
_BESIDE = 2


#: Kinds of work that stand between products.
BETWEEN = ("gelu", "softmax", "add", "layer_norm")


def switches(scale: Scale, mesh: DeviceMesh, between: str) -> Iterator[HostProgram]:
    """Yield products, other work as often, and both of them in turns: programs of as many each."""
    m, n, dtype = scale.rows[len(scale.rows) // 2], scale.features[1], scale.dtypes[0]
    for has_product, has_other in ((True, False), (False, True), (True, True)):
        with FusionDefinition("switches") as fd:
            x, w = (fd.define_tensor([size, n], dtype, mesh=mesh) for size in (m, n))
            for _ in range(TURNS):
                if has_product:
                    fd.add_output(fd.ops.linear(x, w))
                if has_other:
                    fd.add_output(WORKS[between](fd, x, n))
        yield repeated(compile(fd, OPTIONS).host, 1)


#: How often products and other work take turns in a run.
TURNS = 8


#: How often the programs do something that show what a run takes, however little it does.
_CHAINS = 16, 32


def chains(scale: Scale, ranks: int) -> Iterator[Program]:
    """Yield two programs of equal work, of which the second one does twice as much."""
    size, dtype = scale.sizes[0], scale.dtypes[0]
    for times in _CHAINS:
        with FusionDefinition(f"chain_{times}") as fd:
            shape = [max(1, size // dtype.itemsize // 2 // _WIDTH), _WIDTH]
            x: Any = fd.define_tensor(shape, dtype, mesh=DeviceMesh.arange(x=ranks))
            for _ in range(times):
                x = -x
            fd.add_output(x)
        yield compile(fd, OPTIONS)


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
    for times in _CHAINS:
        yield repeated(host, times // 4, frees=True)


def subjects(
    scale: Scale, ranks: int, backends: Backends = _USUAL
) -> Mapping[str, Callable[[], Iterator[Subject]]]:
    """Return what is measured on some ranks: local work first, which communications need."""
    mesh = DeviceMesh.arange(x=ranks)
    return {
        "work": lambda: works(scale, mesh),
        "products": lambda: products(scale, mesh),
        "attention": lambda: attentions(scale, mesh),
        "communications": lambda: links(scale, ways(ranks, backends)),
    }


def points(scale: Scale, ranks: int, backends: Backends = _USUAL) -> int:
    """Return about how many subjects there are."""
    few = math.ceil(len(scale.features) / 2) ** 2 * math.ceil(len(scale.rows) / 2)
    many = len(scale.features) ** 2 * len(scale.rows)
    of_types = len(scale.dtypes)
    return (
        (len(WORKS) + 2 + (of_types - 1) * (len(_FEW) + 2)) * len(scale.sizes)
        + many + few + (of_types - 1) * 2 * few
        + len(scale.compiled)
        + 2 * len(_HEADS) * len(scale.lengths) * max(1, len(blocks_of(scale)))
        + len(ways(ranks, backends)) * len(scale.messages)
    )  # fmt: skip
