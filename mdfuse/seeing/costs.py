"""Costs: how long an instruction takes, from a small table.

Work takes what its operations or its bytes take, whichever is longer, and at least a launch. A
communication takes a latency, and its bytes over a bandwidth (the α-β model: Hockney 1994).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from mdfuse.errors import ProgramError
from mdfuse.hir.instructions import COMMUNICATIONS, MEMORY, PURE_VIEWS, is_library, op_of
from mdfuse.hir.program import HostProgram, Instruction

#: Instructions that take no time by themselves; what communications take, a link says.
_NOTHING = frozenset(
    (*MEMORY, *PURE_VIEWS, *COMMUNICATIONS, "return", "get_stream", "set_stream", "sync")
)

#: How many products of the size of the first one there are in an attention, and in its gradient.
_ATTENTIONS = {"scaled_dot_product_attention": 2, "attention": 2, "attention_grad": 5}


def _check(**numbers: float) -> None:
    for name, x in numbers.items():
        is_time = name.endswith("_s")
        is_number = isinstance(x, int | float) and not isinstance(x, bool) and not math.isnan(x)
        if not is_number or x < 0 or (x == 0 and not is_time):
            raise ProgramError(
                f"{name}={x!r}",
                because="it is a time in seconds" if is_time else "it is a speed, per second",
                hint="a number from 0" if is_time else "a number above 0; math.inf takes no time",
            )


@dataclass(frozen=True, slots=True)
class Link:
    """What a communication takes.

    Attributes:
        latency_s: seconds, however little is sent.
        bandwidth: bytes per second that arrive at a rank.
    """

    latency_s: float = 0.0
    bandwidth: float = math.inf

    def __post_init__(self) -> None:
        _check(latency_s=self.latency_s, bandwidth=self.bandwidth)

    def seconds(self, nbytes: int) -> float:
        """Return the seconds that some bytes take."""
        return self.latency_s + nbytes / self.bandwidth


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """A table of costs.

    Attributes:
        name: what the figures are of, for readers.
        launch_s: seconds that any work takes at least.
        flops: floating-point operations per second of products and attention.
        bandwidth: bytes per second of all other work, read and written.
        links: kind of communication, axis, or "kind axis" -> its link; "*" is any other.
            "SendRecv" is the kind of send and recv, too.

    Raises:
        ProgramError: a number is negative, or a speed 0; a link of no kind.

    >>> costs = Costs(launch_s=1e-6, links={"*": Link(2e-6, 1e9), "tp": Link(1e-6, 1e11)})
    >>> costs.link("Allreduce", "tp").seconds(100_000), costs.link("Allgather", "dp").latency_s
    (2e-06, 2e-06)
    """

    name: str = "a table"
    launch_s: float = 0.0
    flops: float = math.inf
    bandwidth: float = math.inf
    links: Mapping[str, Link] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check(launch_s=self.launch_s, flops=self.flops, bandwidth=self.bandwidth)
        for key, link in self.links.items():
            if not isinstance(link, Link):
                raise ProgramError(
                    f"links[{key!r}] is {link!r}",
                    because="a link is a latency and a bandwidth",
                    hint="for example Link(10e-6, 100e9)",
                )

    def link(self, kind: str, where: str) -> Link:
        """Return the link of a kind of communication along an axis, or between meshes."""
        for key in (f"{kind} {where}", where, kind, "*"):
            if key in self.links:
                return self.links[key]
        return Link()

    def transfer_seconds(self, kind: str, where: str, nbytes: int) -> float:
        """Return the seconds of a communication that brings some bytes to a rank."""
        return self.link(kind, where).seconds(nbytes)

    def seconds(self, program: HostProgram, i: Instruction) -> float:
        """Return the seconds that an instruction takes on the rank of a projection.

        Views, buffers and what begins or awaits a communication take none.
        """
        if not is_work(i):
            return 0.0
        if i.op == "launch":
            inner = [j for j in i.body if is_library(j)]
            moved = nbytes(program, i) / self.bandwidth if len(inner) < len(i.body) else 0.0
            return max(self.launch_s, moved + sum(self._work(program, j) for j in inner))
        return max(self.launch_s, self._work(program, i))

    def _work(self, program: HostProgram, i: Instruction) -> float:
        moved = nbytes(program, i) / self.bandwidth
        return max(moved, operations(program, i) / self.flops)


#: Each piece of work and each communication takes a second: for counting on one's fingers.
UNIT = Costs(name="1 s for all work and each communication", launch_s=1.0, links={"*": Link(1.0)})

#: An estimate: 60 % of what the data sheet of the H100 SXM says of bf16, memory and NVLink.
H100 = Costs(
    name="H100, 60 % of its data sheet",
    launch_s=3e-6,
    flops=0.6 * 989e12,
    bandwidth=0.6 * 3.35e12,
    links={"*": Link(12e-6, 0.6 * 450e9)},
)


def is_work(i: Instruction) -> bool:
    """Return whether an instruction computes or copies on its rank."""
    if i.op in _NOTHING:
        return False
    op = op_of(i)
    return op is None or not op.is_view


def nbytes(program: HostProgram, i: Instruction) -> int:
    """Return the bytes that an instruction reads and writes on the rank of a projection."""
    names = {*i.reads, *i.outputs}
    return sum(buffer_bytes(program, name) for name in names)


def buffer_bytes(program: HostProgram, name: str) -> int:
    """Return the bytes that the rank of a projection has of a buffer; 0 for what is none."""
    kind = program.types.get(name)
    if kind is None or kind.layout is None or program.rank not in kind.layout.mesh:
        return 0
    return math.prod(kind.local_shape(program.rank)) * kind.dtype.itemsize


def operations(program: HostProgram, i: Instruction) -> int:
    """Return the floating-point operations of a product or an attention; 0 for other work."""
    shapes = [_shape(program, x) if isinstance(x, str) else () for x in i.inputs]
    if i.fn in ("matmul", "linear"):
        return 2 * math.prod(_shape(program, i.outputs[0])) * shapes[0][-1]
    if i.fn in _ATTENTIONS:
        q, k = shapes[:2]
        return 2 * _ATTENTIONS[i.fn] * math.prod(q) * k[-2]
    if i.fn == "contract":
        labels = (*i.kwargs["left"], *i.kwargs["right"])
        extents = zip(labels, (*shapes[0], *shapes[1]), strict=True)
        return 2 * math.prod(dict(sorted(extents, key=lambda pair: pair[1])).values())
    if i.fn in ("convolution", "convolution_grad"):  # a gradient is that of both operands
        given, weight = shapes[-2:]
        is_grad, is_spread = i.fn == "convolution_grad", i.kwargs.get("transposed")
        made = shapes[0] if is_grad else _shape(program, i.outputs[0])
        places = given if is_spread else made
        return 2 * (1 + is_grad) * math.prod(places) * math.prod(weight[1:])
    if i.fn in ("grouped_mm", "grouped_mm_grad"):
        return 2 * math.prod(shapes[0]) * (shapes[1][-1])
    return 0


def _shape(program: HostProgram, name: str) -> tuple[int, ...]:
    return program.types[name].local_shape(program.rank)
