"""What work takes more where a processor's caches no longer hold what it reads.

Everything else is measured again and again in a row. Here it is measured as programs do it: behind
products that go through more bytes than the cache of a core holds, and with more weights than are
in any cache.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator

from mdfuse.cli.calibration.scales import Scale
from mdfuse.cli.calibration.subjects import OPTIONS, TURNS, WORKS, repeated
from mdfuse.compiled.program import compile
from mdfuse.frontend.definition import FusionDefinition
from mdfuse.hir.program import HostProgram
from mdfuse.mesh import DeviceMesh
from mdfuse.seeing.caches import ANY, Caches
from mdfuse.seeing.curves import Curve

#: Rows and columns of what work reads behind products: so few that its bytes take no time.
_ROWS, _COLUMNS = 32, 512

#: Heads of attention on as many elements, and features of one.
_HEADS, _HEAD = 8, 64

#: How often each is looked at, in turns with what is taken off; the median counts.
_LOOKS = 3

#: Tells what a run takes, in seconds.
Timer = Callable[[], float]

#: Kinds of work: those with curves of their own, products, attention.
KINDS = (*WORKS, "linear", "scaled_dot_product_attention")

#: Rows of products that read weights from memory: as few as decoding has, and so many that most of
#: it comes while they compute.
_STREAMED = 4, 32

#: How many times the weights are that come from memory, of those that are in some cache.
_MORE = 8


def caches(
    scale: Scale,
    ranks: int,
    prepared: Callable[[HostProgram], Timer],
    run_s: float,
    switch_s: float,
) -> Caches:
    """Return what was measured, on a processor; all ranks call it.

    Args:
        scale: what is measured.
        ranks: how many there are.
        prepared: what tells, each time anew, what a run of a program takes on them.
        run_s: what a run takes besides its work.
        switch_s: what work takes more behind other work, with everything in the caches.
    """
    mesh = DeviceMesh.arange(x=ranks)
    returns = {}
    for kind in KINDS:
        given = ((kind, False), (None, True), (kind, True))
        timers = [prepared(turns(scale, mesh, *some)) for some in given]
        found = [[timer() for timer in timers] for _ in range(_LOOKS)]
        more = statistics.median(both - fills - hot for hot, fills, both in found)
        returns[kind] = max(0.0, (more + run_s) / TURNS - 2 * switch_s)
    any_s, *_ = statistics.quantiles(returns.values(), n=4)  # the least is what noise took off
    returns = {kind: max(0.0, more - any_s) for kind, more in returns.items()}
    returns |= {"*": statistics.median(returns.values()), ANY: any_s}
    stale = {m: _stale(scale, mesh, m, prepared, run_s) for m in _STREAMED}
    curve = Curve(tuple((float(m), seconds) for m, seconds in stale.items()))
    return Caches(core=scale.core, returns=returns, shared=scale.cache, stale=curve)


#: Seconds of a byte are above 0.
_LEAST_S = 1e-15


def _stale(
    scale: Scale,
    mesh: DeviceMesh,
    rows: int,
    prepared: Callable[[HostProgram], Timer],
    run_s: float,
) -> float:
    """Return what a byte of weights takes more from memory, by products of some rows."""
    programs = [(size, prepared(host)) for size, host in streamed(scale, mesh, rows)]
    found = [[(timer() - run_s) / size for size, timer in programs] for _ in range(_LOOKS)]
    return max(_LEAST_S, statistics.median(many - few for few, many in found))


def _side(scale: Scale) -> int:
    """Return the features of a product with four times the bytes that a core's cache holds."""
    return math.isqrt(4 * scale.core // scale.dtypes[0].itemsize)


def turns(scale: Scale, mesh: DeviceMesh, kind: str | None, is_behind: bool) -> HostProgram:
    """Return a program that does a kind of work several times.

    Args:
        scale: what is measured.
        mesh: all ranks.
        kind: of work; None: there are products alone.
        is_behind: whether each time comes behind a product that goes through the cache of a core.
    """
    dtype, side = scale.dtypes[0], _side(scale)
    with FusionDefinition("turns") as fd:
        x = fd.define_tensor([_ROWS, _COLUMNS], dtype, mesh=mesh)
        y = fd.define_tensor([scale.rows[0], side], dtype, mesh=mesh)
        w = fd.define_tensor([scale.features[0], _COLUMNS], dtype, mesh=mesh)
        shape = [1, _HEADS, _ROWS * _COLUMNS // _HEADS // _HEAD, _HEAD]
        q = fd.define_tensor(shape, dtype, mesh=mesh)
        for _ in range(TURNS):
            if is_behind:
                fills = fd.define_tensor([side, side], dtype, mesh=mesh)
                fd.add_output(fd.ops.matmul(y, fills))
            match kind:
                case None:
                    pass
                case "linear":
                    fd.add_output(fd.ops.linear(x, w))
                case "scaled_dot_product_attention":
                    fd.add_output(fd.ops.scaled_dot_product_attention(q, q, q))
                case _:
                    fd.add_output(WORKS[kind](fd, x, _COLUMNS))
    return repeated(compile(fd, OPTIONS).host, 1, frees=True)


def streamed(scale: Scale, mesh: DeviceMesh, rows: int) -> Iterator[tuple[int, HostProgram]]:
    """Yield products with as many weights as some cache has, and with many more; and the bytes."""
    dtype, n = scale.dtypes[0], _side(scale)
    size = n * n * dtype.itemsize
    for total in (scale.cache, scale.cache * _MORE):
        count = max(1, total // size)
        with FusionDefinition("streamed") as fd:
            x = fd.define_tensor([rows, n], dtype, mesh=mesh)
            for _ in range(count):
                fd.add_output(fd.ops.linear(x, fd.define_tensor([n, n], dtype, mesh=mesh)))
        yield count * size, repeated(compile(fd, OPTIONS).host, 1, frees=True)
