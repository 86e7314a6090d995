"""Costs: how long an instruction takes, from a table of a few numbers or of measured points.

Work takes the measured time of its kind; else the time of its operations or of its bytes, whichever
is longer, and at least a launch. A communication takes a latency, and its bytes over a bandwidth
(the α-β model: Hockney 1994), or the measured time of its kind among so many ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mdfuse.errors import ProgramError
from mdfuse.hir.instructions import is_library
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.ir.graph import dtype_name
from mdfuse.seeing.amounts import (
    Attention,
    attention,
    is_across,
    is_work,
    nbytes,
    operations,
    product,
)
from mdfuse.seeing.cost_keys import LinkKey, WorkKey
from mdfuse.seeing.curves import Curve, Grid, as_measured
from mdfuse.seeing.kernels import Kernel, kernels

#: The longest time, in seconds, and the lowest speed: beyond them sums overflow.
_LONGEST, _LOWEST = 1e9, 1e-9


def _check(**numbers: float) -> None:
    for name, x in numbers.items():
        is_time = name.endswith("_s")
        is_number = isinstance(x, int | float) and not isinstance(x, bool)
        if not is_number or not (0 <= x <= _LONGEST if is_time else x >= _LOWEST):
            raise ProgramError(
                f"{name}={x!r}",
                because="it is a time in seconds" if is_time else "it is a speed, per second",
                hint=f"a number from 0 to {_LONGEST:g}"
                if is_time
                else f"a number from {_LOWEST:g}; math.inf takes no time",
            )


#: The most that communications slow down work: it never stops beside them.
MOST_SLOWED = 0.95


@dataclass(frozen=True, slots=True)
class Link:
    """The costs of a communication.

    Attributes:
        latency_s: seconds, however little is sent.
        bandwidth: bytes per second that arrive at a rank.
        curve: measured seconds by bytes, which go before the two numbers.
        slows: the share of its speed that work loses while the communication runs: 0.05 for 5 %.
        cold: the measured cache-miss penalty: additional seconds by bytes, once work has replaced
            the contents of the cache; the last point's time holds for all more bytes.
    """

    latency_s: float = 0.0
    bandwidth: float = math.inf
    curve: Curve | None = None
    slows: float = 0.0
    cold: Curve | None = None

    def __post_init__(self) -> None:
        _check(latency_s=self.latency_s, bandwidth=self.bandwidth)
        is_number = isinstance(self.slows, int | float) and not isinstance(self.slows, bool)
        if not is_number or not 0 <= self.slows <= MOST_SLOWED:
            raise ProgramError(
                f"slows={self.slows!r}",
                because="it is the share of its speed that work loses beside a communication",
                hint=f"a number from 0 to {MOST_SLOWED}",
            )

    def seconds(self, nbytes: int, cold: float = 0.0) -> float:
        """Return the seconds that some bytes take.

        Args:
            nbytes: that arrive at a rank.
            cold: the share of a cache, 0 to 1, that work has gone through since the last one.

        >>> link = Link(2e-6, 1e9, cold=Curve(((1000.0, 3e-6), (3000.0, 5e-6))))
        >>> [round(link.seconds(n, 0.5) * 1e6, 2) for n in (0, 1000, 2000, 9000)]
        [3.5, 4.5, 6.0, 13.5]
        """
        penalty = 0.0
        if self.cold is not None and cold:
            penalty = cold * self.cold.seconds(min(max(nbytes, 1), self.cold.points[-1][0]))
        if self.curve is not None:
            return self.curve.seconds(max(nbytes, 1)) + penalty
        return self.latency_s + nbytes / self.bandwidth + penalty


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """A table of costs.

    Attributes:
        name: the origin of the figures, for readers.
        launch_s: seconds that any work takes at least.
        run_s: fixed seconds of a run, besides its instructions.
        posting_s: additional seconds of a run that communicates.
        flops: floating-point operations per second of products and attention.
        bandwidth: bytes per second of all other work, read and written.
        links: the links of communications; the link of the most special key counts.
        works: curves of work by name. "gelu", or "*" for all other work of a type: seconds by bytes
            read and written. "across": elementwise work whose operands lie in different memory
            orders. "compiled", "compiled across" and "compiled rows across": compiled kernels. "one
            query": attention whose heads have one query each. "query" with features of a head:
            seconds of each query of a head, by keys, on a processor.
        attentions: grids without a name: seconds by blocks of 128 queries of all heads, keys and
            features of a head. A grid goes before the curves of attention.
        multiprocessors: of a GPU: that many blocks are computed at once, so times rise in steps; 0:
            not known. Under a causal mask blocks end one by one.
        cache: bytes of a GPU's cache: work on so many bytes evicts the data of the last
            communication; 0: not known.
        products: grids of "linear", or "matmul" for all other products: seconds by m, n and k.
        is_fused: whether the work of a launch is compiled into few kernels, or done one by one.

    Raises:
        ProgramError: a number is negative, or a speed 0; a link of no kind; multiprocessors or a
            cache that are no number.

    >>> links = {LinkKey(): Link(2e-6, 1e9), LinkKey(axes="tp"): Link(1e-6, 1e11)}
    >>> costs = Costs(launch_s=1e-6, links=links)
    >>> costs.link("Allreduce", "tp").seconds(100_000), costs.link("Allgather", "dp").latency_s
    (2e-06, 2e-06)
    """

    name: str = "a table"
    launch_s: float = 0.0
    run_s: float = 0.0
    posting_s: float = 0.0
    flops: float = math.inf
    bandwidth: float = math.inf
    links: Mapping[LinkKey, Link] = field(default_factory=dict)
    works: Mapping[WorkKey, Curve] = field(default_factory=dict)
    products: Mapping[WorkKey, Grid] = field(default_factory=dict)
    attentions: Mapping[WorkKey, Grid] = field(default_factory=dict)
    multiprocessors: int = 0
    cache: int = 0
    is_fused: bool = True

    def __post_init__(self) -> None:
        times = {"run_s": self.run_s, "posting_s": self.posting_s}
        _check(**times, launch_s=self.launch_s, flops=self.flops, bandwidth=self.bandwidth)
        for name, what in (("multiprocessors", "how many"), ("cache", "how many bytes of it")):
            count = getattr(self, name)
            if not isinstance(count, int) or isinstance(count, bool) or count < 0:
                raise ProgramError(
                    f"{name}={count!r}",
                    because=f"it is {what} a GPU has",
                    hint="a number of at least 0",
                )
        for key, link in self.links.items():
            if not isinstance(key, LinkKey) or not isinstance(link, Link):
                raise ProgramError(
                    f"links[{key!r}] is {link!r}",
                    because="a table has a LinkKey for each Link, a latency and a bandwidth",
                    hint='for example links={LinkKey(axes="tp"): Link(10e-6, 100e9)}',
                )

    def link(self, kind: str, axes: str, ranks: int = 2, backend: str | None = None) -> Link:
        """Return the link of a kind of communication along axes, or between meshes.

        A number of ranks that was not measured takes the link of the next number below; a backend
        that was not measured is like the usual one.
        """
        if all(key.backend != backend for key in self.links):
            backend = None
        measured = [
            k.ranks for k in self.links if (k.kind, k.backend) == (kind, backend) and k.ranks
        ]
        nearest = max((n for n in measured if n <= ranks), default=min(measured, default=0))
        for key in (
            LinkKey(kind, axes, 0, backend),
            LinkKey("*", axes, 0, backend),
            LinkKey(kind, "", nearest, backend),
            LinkKey(kind, "", 0, backend),
            LinkKey("*", "", 0, backend),
        ):
            if key in self.links:
                return self.links[key]
        return Link()

    def by(self, backend: str, usual: str | None = None) -> Costs | None:
        """Return the table for programs whose usual backend is another one; None: not measured.

        Args:
            backend: their usual one.
            usual: the backend of this table, whose links are then those of posts that name it.

        >>> costs = Costs(links={LinkKey(): Link(2e-6), LinkKey(backend="symmetric"): Link(1e-6)})
        >>> costs.by("symmetric").link("Allgather", "tp").latency_s, costs.by("mpi")
        (1e-06, None)
        """
        if all(key.backend != backend for key in self.links):
            return None
        links = {k: x for k, x in self.links.items() if k.backend is not None}
        for key, link in self.links.items():
            if key.backend == backend:
                links[key._replace(backend=None)] = link
            elif key.backend is None and usual is not None:
                links[key._replace(backend=usual)] = link
        return replace(self, links=links)

    def copy_seconds(self, nbytes: int, dtype: str) -> float:
        """Return the seconds of a copy of some bytes on a rank, each of which is read and written.

        >>> Costs(bandwidth=2e9).copy_seconds(1_000_000, "f32")
        0.001
        """
        return self._bytes(2 * nbytes, dtype)

    def seconds(self, program: HostProgram, i: Instruction) -> float:
        """Return the seconds that an instruction takes on the rank of a projection.

        Views, buffers, posts and waits take none.
        """
        if i.op == "launch":
            return self._launch(program, i)
        return self._work(program, i) if is_work(i) else 0.0

    def _launch(self, program: HostProgram, i: Instruction) -> float:
        inner = [j for j in i.body if is_library(j)]
        if not self.is_fused:
            return sum(self.seconds(program, j) for j in i.body)
        if self.works:
            seconds = sum(self._kernel(k) for k in kernels(program, i))
            return sum((self._work(program, j) for j in inner), start=seconds)
        moved = sum(k.nbytes for k in kernels(program, i)) / self.bandwidth
        return max(self.launch_s, moved + sum(self._modelled(program, j) for j in inner))

    def _kernel(self, k: Kernel) -> float:
        """Return the seconds of a compiled kernel: as measured for its kind, in any dtype.

        A kernel that reads across memory and reduces rows takes the time of uncompiled work if it
        was not measured: a compiler cannot choose its tiles then.
        """
        name = _COMPILED.get(k.like)
        curve = self.works.get(WorkKey(name, k.dtype)) if name is not None else None
        if curve is None:
            curve = next((curve for key, curve in self.works.items() if key.name == name), None)
        if curve is not None:
            return max(self._bytes(k.nbytes, k.dtype), curve.seconds(max(k.nbytes, 1)))
        return self._bytes(k.nbytes, k.dtype, "across" if k.like == "rows across" else k.like)

    def _bytes(self, size: int, dtype: str, like: str = "*") -> float:
        """Return the seconds of work on some bytes: at least those of pointwise work."""
        curves = (self.works.get(WorkKey(name, dtype)) for name in {"*", like})
        measured = [curve.seconds(max(size, 1)) for curve in curves if curve is not None]
        return max(measured, default=max(self.launch_s, size / self.bandwidth))

    def _work(self, program: HostProgram, i: Instruction) -> float:
        """Return the seconds of work: as measured, if it was."""
        dtype = _dtype(program, i)
        sizes = product(program, i)
        if sizes is not None:
            name = "linear" if i.fn == "linear" else "matmul"
            keys = WorkKey(name, dtype), WorkKey("matmul", dtype)
            grid = next((self.products[key] for key in keys if key in self.products), None)
            if grid is not None and min(sizes) > 0:
                count, *mnk = sizes
                return count * grid.seconds(*mnk)
        count = operations(program, i)
        if (heads := attention(program, i)) is not None:
            return self._attention(count, dtype, heads, nbytes(program, i))
        curve = self.works.get(WorkKey(i.fn or "", dtype))
        if curve is None and not count:
            curve = self.works.get(WorkKey("*", dtype))
        across = self._bytes(nbytes(program, i), dtype, "across") if is_across(program, i) else 0.0
        if curve is not None:
            return max(across, curve.seconds(max(count or nbytes(program, i), 1)))
        return max(across, self.launch_s, self._modelled(program, i))

    def _attention(self, count: int, dtype: str, a: Attention, moved: int) -> float:
        """Return the seconds of attention: as measured, and at least those of its bytes.

        Heads with one query, as in decoding, are split by keys instead, so that their bytes count,
        as measured if they were. Heads of a size between two measured ones take the time of the
        next one: kernels are made for few sizes.
        """
        one = self.works.get(WorkKey(ONE_QUERY, dtype)) if a.queries == 1 else None
        if one is not None:
            return a.passes * one.seconds(max(moved, 1))
        key = WorkKey("", dtype, is_causal=a.is_causal)
        grid = self.attentions.get(key, self.attentions.get(WorkKey("", dtype)))
        if grid is None:
            curve, seconds = self._query(dtype, a), count / self.flops
            if curve is not None:
                seconds = a.passes * a.heads * a.queries * curve.seconds(max(a.keys, 1))
            return max(self._bytes(moved, dtype), seconds)
        counts, _, heads = grid.axes
        features = min((x for x in heads if x >= a.features), default=a.features)
        blocks: float = a.blocks
        if self.multiprocessors and not a.is_causal:
            blocks = as_measured(blocks, counts, self.multiprocessors)
        sizes = (1, 1, features) if a.queries == 1 else (blocks, a.keys, features)
        return max(self._bytes(moved, dtype), a.passes * grid.seconds(*sizes))

    def _query(self, dtype: str, a: Attention) -> Curve | None:
        """Return the curve of a query, which a core takes through all keys; None: not measured.

        It is that of heads of the nearest size, with the mask where it was measured.
        """
        keys = [k for k in self.works if k[:2] == ("query", dtype) and not k.is_causal]
        if not keys:
            return None
        key = min(keys, key=lambda k: abs(math.log(k.features / max(a.features, 1))))
        return self.works.get(key._replace(is_causal=a.is_causal), self.works[key])

    def _modelled(self, program: HostProgram, i: Instruction) -> float:
        moved = nbytes(program, i) / self.bandwidth
        return max(moved, operations(program, i) / self.flops)


#: The kind of a compiled kernel -> the name of its measurements.
_COMPILED = {
    "*": "compiled",
    "across": "compiled across",
    "rows across": "compiled rows across",
}

#: The name of measured attention whose heads have one query each.
ONE_QUERY = "one query"


def _dtype(program: HostProgram, i: Instruction) -> str:
    """Return the dtype of the first tensor of an instruction; factors of a product go first."""
    read = i.reads[::-1] if i.op == "addmm" else i.reads
    kinds = (program.types.get(x) for x in (*read, *i.outputs))
    floats = [k.dtype for k in kinds if k is not None and k.dtype.is_floating_point]
    return dtype_name(floats[0]) if floats else "f32"


#: Each piece of work and each communication takes a second: for counting on one's fingers.
UNIT = Costs(
    name="1 s for all work and each communication", launch_s=1.0, links={LinkKey(): Link(1.0)}
)

#: An estimate: 60 % of the figures for bf16, memory and NVLink in the H100 SXM's data sheet.
H100 = Costs(
    name="H100, 60 % of its data sheet",
    launch_s=3e-6,
    flops=0.6 * 989e12,
    bandwidth=0.6 * 3.35e12,
    links={LinkKey(): Link(12e-6, 0.6 * 450e9)},
)
