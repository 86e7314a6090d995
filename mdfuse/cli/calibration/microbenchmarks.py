"""Subjects of a calibration: host programs that do one thing again and again."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from mdfuse.cli.calibration.scales import Scale, blocks_of
from mdfuse.compiled.program import Program, compile
from mdfuse.config import Options
from mdfuse.frontend.definition import FusionDefinition
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.hir.rank.pipelines import project
from mdfuse.ir.graph import dtype_name
from mdfuse.mesh import DeviceMesh
from mdfuse.seeing.amounts import QUERIES, is_work, nbytes, operations, product
from mdfuse.seeing.cost_keys import LinkKey, WorkKey
from mdfuse.seeing.costs import ONE_QUERY

#: One thing at a time: nothing is compiled into kernels with other work.
OPTIONS = Options(compile="never", verify=False, overlap="never")

#: Columns of the tensors of pointwise work.
_WIDTH = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbenchmark:
    """Something that is measured.

    Attributes:
        table: which field of `mdfuse.seeing.Costs` it is for; "colds" of its links.
        key: in that field.
        at: size: bytes or operations; (m, n, k) of a product; (blocks, keys, features of a head)
            of attention.
        program: does it `times` times in a run.
        times: how often.
        runs: how many make a sample, the same on all ranks.
        local: for a communication, the other work of the program, whose time is subtracted.
        without: for a communication behind other work, the program without it, whose time is
            subtracted instead.
        options: that it is run with.
    """

    table: Literal["works", "products", "attentions", "links", "colds"]
    key: LinkKey | WorkKey
    at: float | tuple[int, int, int]
    program: HostProgram
    times: int
    runs: int
    local: tuple[Instruction, ...] = ()
    without: HostProgram | None = None
    options: Options = OPTIONS

    @property
    def is_sent(self) -> bool:
        """True if its ranks communicate."""
        return self.table in ("links", "colds")


def repeated(program: HostProgram, loops: int, frees: bool = False) -> HostProgram:
    """Return a program whose instructions are repeated in a run.

    It has no outputs: its results stay in buffers of its plan, as most values of a program.

    Args:
        program: whose instructions.
        loops: how often.
        frees: whether its results are freed at once, so that others may take their place: reduced
            values then stay in place, as in programs.
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


def _norm(name: str, fd: Any, x: Any, n: int, weights: int) -> Any:
    """Define a norm with the weights that models have: a library goes another way without them."""
    given = [fd.define_tensor([n], x.dtype, mesh=x.layout.mesh) for _ in range(weights)]
    return getattr(torch.nn.functional, name)(x, (n,), *given)


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
    "layer_norm": lambda fd, x, n: _norm("layer_norm", fd, x, n, 2),
    "rms_norm": lambda fd, x, n: _norm("rms_norm", fd, x, n, 1),
    "cat": lambda fd, x, n: torch.cat((x, x), -1),
}

#: Those that are measured in types but the first.
FEW = ("add", "exp", "sum", "softmax")


def works(scale: Scale, mesh: DeviceMesh) -> Iterator[Microbenchmark]:
    """Yield pointwise work, reductions and copies, of each size; other work is like `add`."""
    for dtype in scale.dtypes:
        names = [*WORKS] if dtype is scale.dtypes[0] else FEW
        for name, apply in ((name, WORKS[name]) for name in names):
            for size in scale.sizes:
                rows = max(1, size // dtype.itemsize // 2 // _WIDTH)
                subject = _work(scale, mesh, dtype, apply, (rows, _WIDTH))
                yield subject
                if name == "add":
                    yield replace(subject, key=WorkKey("*", dtype_name(dtype)))
        for size in scale.sizes:
            yield _across(scale, mesh, dtype, size)
    for size in scale.compiled:
        yield from _compiled(scale, mesh, scale.dtypes[0], size)


def _work(
    scale: Scale, mesh: DeviceMesh, dtype: torch.dtype, apply: _Apply, shape: tuple[int, ...]
) -> Microbenchmark:
    size = 2 * math.prod(shape) * dtype.itemsize
    with FusionDefinition("work") as fd:
        for _ in range(max(1, min(scale.tensors, scale.stale // size))):
            x = fd.define_tensor(shape, dtype, mesh=mesh)
            fd.add_output(apply(fd, x, shape[-1]))
    return _local(scale, "works", compile(fd, OPTIONS).host)


def _across(scale: Scale, mesh: DeviceMesh, dtype: torch.dtype, size: int) -> Microbenchmark:
    """Return the subject of sums of two tensors, one of which lies column by column."""
    rows = max(1, size // dtype.itemsize // 2 // _WIDTH)
    with FusionDefinition("across") as fd:
        for _ in range(max(1, min(scale.tensors, scale.stale // size))):
            fd.add_output(_sum_across(fd, mesh, dtype, rows))
    subject = _local(scale, "works", compile(fd, OPTIONS).host)
    return replace(subject, key=WorkKey("across", dtype_name(dtype)))


def _compiled(
    scale: Scale, mesh: DeviceMesh, dtype: torch.dtype, size: int
) -> Iterator[Microbenchmark]:
    """Yield the subjects of compiled launches: pointwise work, and work across memory.

    The latter reduces rows or does not. Each launch is one kernel where there is a compiler, as in
    programs by default.
    """
    rows = max(1, size // dtype.itemsize // 2 // _WIDTH)
    for name in ("compiled", "compiled across", "compiled rows across"):
        with FusionDefinition("work") as fd:  # a launch has two operations at least
            if name == "compiled":
                x, z = (fd.define_tensor([rows, _WIDTH], dtype, mesh=mesh) for _ in range(2))
                fd.add_output(-(x * z))
            elif name == "compiled across":
                fd.add_output(-_sum_across(fd, mesh, dtype, rows))
            else:
                y = _sum_across(fd, mesh, dtype, rows)
                fd.add_output(fd.ops.rms_norm(y, [_WIDTH]))
        options = replace(OPTIONS, compile="auto")
        subject = _local(scale, "works", compile(fd, options).host)
        yield replace(subject, key=WorkKey(name, dtype_name(dtype)), options=options)


def _sum_across(fd: FusionDefinition, mesh: DeviceMesh, dtype: torch.dtype, rows: int) -> Any:
    x = fd.define_tensor([rows, _WIDTH], dtype, mesh=mesh)
    z = fd.define_tensor([_WIDTH, rows], dtype, mesh=mesh)
    return x + fd.ops.permute(z, [1, 0])


def _local(scale: Scale, table: Literal["works", "products"], host: HostProgram) -> Microbenchmark:
    """Return the subject of a program of equal instructions."""
    mine = project(host, host.meshes[0].ranks[0])
    (first, *others) = [i for i in mine.instructions if is_work(i)]
    sizes, count, moved = product(mine, first), operations(mine, first), nbytes(mine, first)
    works = 1 + len(others)
    once = max(count / scale.flops, moved / scale.bandwidth, ONCE_S)
    loops = max(1, how_often(scale, once) // works)
    dtype = dtype_name(mine.types[first.outputs[0]].dtype)
    return Microbenchmark(
        table=table,
        key=WorkKey(first.fn or "", dtype),
        at=(sizes[1], sizes[2], sizes[3]) if sizes is not None else float(count or moved),
        program=repeated(host, loops),
        times=loops * works,
        runs=runs_of(scale, once * loops * works),
    )


#: The least seconds of any work, a guess.
ONCE_S = 2e-6

#: Runs of a sample at most.
_MOST_RUNS = 16


def how_often(scale: Scale, once: float) -> int:
    return max(1, min(scale.most, round(scale.run_s / once)))


def runs_of(scale: Scale, run_s: float) -> int:
    return max(1, min(_MOST_RUNS, round(scale.sample_s / run_s)))


def products(scale: Scale, mesh: DeviceMesh) -> Iterator[Microbenchmark]:
    """Yield linear layers and, fewer, products, on a grid; in types but the first also fewer."""
    for dtype in scale.dtypes:
        for is_linear in (True, False):
            step = 1 if is_linear and dtype is scale.dtypes[0] else 2
            features = scale.features[::-1][::step][::-1]
            for m in scale.rows[::-1][::step][::-1]:
                for n in features:
                    yield from (_product(scale, mesh, dtype, is_linear, m, n, k) for k in features)


def linear(
    scale: Scale, mesh: DeviceMesh, dtype: torch.dtype, m: int, n: int, k: int
) -> Microbenchmark:
    """Return the subject of a linear layer of so many rows, features and inner ones."""
    return _product(scale, mesh, dtype, True, m, n, k)


def _product(
    scale: Scale, mesh: DeviceMesh, dtype: torch.dtype, is_linear: bool, m: int, n: int, k: int
) -> Microbenchmark:
    size = n * k * dtype.itemsize
    once = max(2 * m * n * k / scale.flops, size / scale.bandwidth, ONCE_S)
    most = max(_LEAST_WEIGHTS, min(scale.tensors, round(_LONGER * scale.run_s / once)))
    weights = max(1, min(most, scale.cache // size))
    with FusionDefinition("product") as fd:
        x = fd.define_tensor([m, k], dtype, mesh=mesh)
        for _ in range(weights):
            w = fd.define_tensor([n, k] if is_linear else [k, n], dtype, mesh=mesh)
            fd.add_output(fd.ops.linear(x, w) if is_linear else x @ w)
    return _local(scale, "products", compile(fd, OPTIONS).host)


#: How many heads a processor computes, one after the other.
_HEADS = 16

#: Whether attention is causal.
MASKS = False, True


def attentions(scale: Scale, mesh: DeviceMesh) -> Iterator[Microbenchmark]:
    """Yield attention, with and without a causal mask.

    On a GPU it is measured by blocks, keys and features of a head, else for each query by keys.
    """
    dtype = scale.dtypes[0]
    name = dtype_name(dtype)
    for mask, head, length in itertools.product(MASKS, scale.heads, scale.lengths):
        if not scale.multiprocessors:
            subject = _attention(scale, mesh, [1, _HEADS, length, head], mask)
            times = subject.times * _HEADS * length
            key = WorkKey("query", name, head, mask)
            yield replace(subject, key=key, at=float(length), times=times)
        for blocks in blocks_of(scale, mask):
            heads = blocks // math.ceil(length / QUERIES)
            subject = _attention(scale, mesh, [1, heads, length, head], mask)
            at = blocks, length, head
            yield replace(subject, table="attentions", key=WorkKey("", name, 0, mask), at=at)
    for length in scale.lengths:
        yield _one_query(scale, mesh, length)


def _attention(scale: Scale, mesh: DeviceMesh, shape: list[int], mask: bool) -> Microbenchmark:
    with FusionDefinition("attention") as fd:
        q, k, v = (fd.define_tensor(shape, scale.dtypes[0], mesh=mesh) for _ in range(3))
        fd.add_output(fd.ops.scaled_dot_product_attention(q, k, v, is_causal=mask))
    return _local(scale, "works", compile(fd, OPTIONS).host)


#: Sequences that are decoded at once, their heads of keys, the heads of a query that share one of
#: these, and features of each.
_DECODED = 16, 4, 4, 64


def _one_query(scale: Scale, mesh: DeviceMesh, length: int) -> Microbenchmark:
    """Return the subject of attention of one query each, as in decoding.

    It is measured by bytes: its keys are in no core's cache.
    """
    (rows, heads, of_each, features), dtype = _DECODED, scale.dtypes[0]
    size = 2 * rows * heads * length * features * dtype.itemsize
    with FusionDefinition("one_query") as fd:
        for _ in range(max(1, min(scale.tensors, scale.cache // size))):
            q = fd.define_tensor([rows, heads * of_each, 1, features], dtype, mesh=mesh)
            past = [rows, heads, length, features]
            k, v = (fd.define_tensor(past, dtype, mesh=mesh) for _ in range(2))
            attend: Any = torch.nn.functional.scaled_dot_product_attention
            fd.add_output(attend(q, k, v, enable_gqa=True))
    host = compile(fd, OPTIONS).host
    mine = project(host, mesh.ranks[0])
    moved = nbytes(mine, next(i for i in mine.instructions if is_work(i)))
    subject = _local(scale, "works", host)
    return replace(subject, key=WorkKey(ONE_QUERY, dtype_name(dtype)), at=float(moved))


#: Repetitions in the programs that show the fixed time of a run.
CHAINS = 16, 32


def chains(scale: Scale, ranks: int) -> Iterator[Program]:
    """Yield two programs of equal work, of which the second one does twice as much."""
    size, dtype = scale.sizes[0], scale.dtypes[0]
    for times in CHAINS:
        with FusionDefinition(f"chain_{times}") as fd:
            shape = [max(1, size // dtype.itemsize // 2 // _WIDTH), _WIDTH]
            x: Any = fd.define_tensor(shape, dtype, mesh=DeviceMesh.arange(x=ranks))
            for _ in range(times):
                x = -x
            fd.add_output(x)
        yield compile(fd, OPTIONS)
