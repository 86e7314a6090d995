"""The context in which calls are prepared: the program, this rank's slots, its buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from mdfuse.backends.base import Poster
from mdfuse.hir.program import BufferType, HostProgram, Instruction
from mdfuse.hir.uncapturable import HostValues
from mdfuse.ir.infer import dense_strides
from mdfuse.layouts.boxes import Box
from mdfuse.layouts.call import Call
from mdfuse.names import base_name
from mdfuse.plan.lines import Line, SlotRef, Slots
from mdfuse.plan.numbered_streams import CALLER

if TYPE_CHECKING:
    from mdfuse.plan.index_checks import IndexChecks

#: The slot of the caller's stream in every plan.
CALLER_SLOT = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStep:
    """The prepared calls of one instruction.

    Attributes:
        lines: the calls, in order.
        label: its description, for error messages.
        op: the instruction's op.
        outputs: the slots that it binds or writes.
        inputs: the slots that it reads.
        stream: the stream that is current when it runs.
        waits: the slot of the communication that it waits for, and which piece of it.
        joins: the stream that the current one waits for.
        posters: prepared calls of a backend, one for each piece that it posts.
        calls: for each of the posters, this rank's part of the communication.
        eager: the reason why no CUDA graph can hold it; None where one can.
        instruction: the number of its instruction in the written-out program; -1: it has none.
    """

    lines: tuple[Line, ...]
    label: str
    op: str
    outputs: tuple[int, ...] = ()
    inputs: tuple[int, ...] = ()
    stream: int = CALLER
    waits: tuple[int, int | None] | None = None
    joins: int | None = None
    posters: tuple[Poster, ...] = ()
    calls: tuple[Call, ...] = ()
    eager: str | None = None
    instruction: int = -1

    def run(self, slots: Slots) -> None:
        """Make its calls on a list of slots."""
        for line in self.lines:
            line(slots)


class Fuse(Protocol):
    """A compiler of host units: it merges the steps of a unit."""

    def __call__(
        self,
        i: Instruction,
        steps: Sequence[PlanStep],
        outside: Mapping[int, str],
        context: Context,
    ) -> list[PlanStep]:
        """Return the steps of a unit.

        Args:
            i: the unit.
            steps: its calls one by one.
            outside: slot -> name, for buffers that exist before the unit.
            context: the state behind the unit.
        """

    def finish(self, steps: Sequence[PlanStep], context: Context) -> list[PlanStep]:
        """Return the steps of a plan, whose units went through `__call__`, ready to run."""


@dataclass(slots=True)
class Context:
    """The state while the steps of one rank are prepared, in program order.

    Attributes:
        program: written out for the rank.
        rank: the rank.
        slots: name -> slot; a name that is bound again, after it was freed, gets another slot.
        size: how many slots there are.
        names: slot -> its name as programs print it, for readers.
        bind: prepares a call on a backend whose teams are made.
        device: where buffers lie.
        poison: fill new buffers with NaN or the largest value.
        has_streams: whether the device has streams, which the plan then switches and joins.
        one_stream: everything runs on the stream that is current when a run starts.
        caller: the handle of the caller's CUDA stream; 0 without a GPU.
        stream: the handle of the stream that is current.
        facts: name -> a meta tensor with the strides of its buffer, where these are known.
        bound: names that have a value here.
        given: outputs for which the caller passed a buffer.
        allocated: names whose buffer an `alloc` made, and in which memory.
        expanded: name -> the dims of it that `expand` made.
        parts: name -> the chunks whose parts are added up in its buffer, while some are missing.
        storage: name -> the name whose memory it shares; names with memory of their own are absent.
        updated: names that may share memory with a buffer that is written again after it was bound.
        fetched: which names are numbers that the host waits for in a run.
        host_values: which names stand for numbers of a run, or for host memory.
        shapes: type -> the shape of this rank's part; many values have the same type.
        checks: looks at the indices of tables; None: nobody does.
        fuse: makes the steps of a host unit fewer; None: each stays.
        in_unit: calls are prepared for such a unit, in which torch makes the results: a compiler
            finds the buffers itself, and lays them out as its kernels like them.
        symmetric: the memory of each `alloc(memory=symmetric)`, in order, as bytes; None: of it,
            or of all, as of other buffers.
    """

    program: HostProgram
    rank: int
    slots: dict[str, int]
    bind: Callable[[Call], Poster]
    device: torch.device
    poison: bool
    has_streams: bool
    one_stream: bool
    caller: int = 0
    stream: int = 0
    size: int = CALLER_SLOT + 1
    names: dict[int, str] = field(default_factory=lambda: {CALLER_SLOT: "caller's stream"})
    facts: dict[str, Tensor] = field(default_factory=dict)
    bound: set[str] = field(default_factory=set)
    given: set[str] = field(default_factory=set)
    allocated: dict[str, str] = field(default_factory=dict)
    expanded: dict[str, tuple[int, ...]] = field(default_factory=dict)
    parts: dict[str, frozenset[int]] = field(default_factory=dict)
    storage: dict[str, str] = field(default_factory=dict)
    updated: frozenset[str] = frozenset()
    host_values: HostValues = field(init=False)
    fetched: frozenset[str] = field(init=False)
    shapes: dict[BufferType, tuple[int, ...]] = field(default_factory=dict)
    checks: IndexChecks | None = None
    fuse: Fuse | None = None
    in_unit: bool = False
    symmetric: Iterator[Tensor | None] = field(default_factory=lambda: repeat(None))

    def __post_init__(self) -> None:
        self.host_values = HostValues(self.program)
        every = self.program.instructions
        self.fetched = frozenset(x for i in every if i.op == "fetch" for x in i.outputs)

    def slot(self, name: str) -> int:
        if name not in self.slots:
            self.slots[name] = self.new_slot()
            self.names[self.slots[name]] = f"%{name}"
        return self.slots[name]

    def new_slot(self) -> int:
        """Return a new slot."""
        self.size += 1
        return self.size - 1

    def ref(self, name: str) -> SlotRef:
        return SlotRef(self.slot(name))

    def type(self, name: str) -> BufferType:
        return self.program.types[name]

    def is_counted(self, name: str) -> bool:
        """Tell whether a name stands for as many rows as the host counts in a run."""
        kind = self.program.types.get(name)
        return kind is not None and kind.counts in self.fetched

    def box(self, name: str) -> Box:
        return self.type(name).box(self.rank)

    def local(self, name: str) -> tuple[int, ...]:
        kind = self.type(name)
        shape = self.shapes.get(kind)
        if shape is None:
            shape = self.shapes[kind] = kind.local_shape(self.rank)
        return shape

    # -- which names have a buffer ---------------------------------------------------------------

    def has_buffer(self, name: str) -> bool:
        """Tell whether a name has a buffer; if so, results are written there."""
        return name in self.bound or name in self.given

    def bind_name(self, name: str, shares: str | None = None) -> None:
        """Note that a name has a buffer from here on; it is a view of `shares`."""
        if shares is not None and not self.has_buffer(name):
            self.storage[name] = self.storage.get(shares, shares)
        self.bound.add(name)

    def release(self, name: str) -> None:
        """Forget all facts about a name; it may be bound again."""
        self.bound.discard(name)
        for known in (self.slots, self.storage, self.expanded, self.allocated, self.facts):
            known.pop(name, None)

    def is_on_device(self, name: str) -> bool:
        """Tell whether a name's buffer is where this rank computes."""
        memory = self.allocated.get(self.storage.get(name, name), "device")
        return self.device.type == "cpu" or memory not in ("host", "pinned")

    # -- facts about buffers ---------------------------------------------------------------------

    def fact(self, x: Any) -> Tensor | None:
        """Return a meta tensor like an operand's buffer; None where its strides are not known."""
        return self.facts.get(x) if isinstance(x, str) else None

    def dense(self, name: str, order: tuple[int, ...] | None = None) -> Tensor:
        """Return a meta tensor like a dense buffer of a name; None: row-major."""
        shape = self.local(name)
        strides, dtype = dense_strides(shape, order), self.type(name).dtype
        return torch.empty_strided(shape, strides, dtype=dtype, device="meta")

    def know(self, name: str, fact: Tensor | None) -> None:
        """Note the strides of a name's buffer from this point on; None where they are not known.

        Those of counted rows are not, as nobody knows how many there are.
        """
        if fact is None or self.is_counted(name):
            self.facts.pop(name, None)
        else:
            self.facts[name] = fact

    def share(self, a: str, b: str) -> bool:
        """Tell whether two names share memory."""
        return self.storage.get(a, a) == self.storage.get(b, b)

    def where(self, i: Instruction) -> list[str]:
        """Return the user's line of an instruction, for error messages."""
        return [i.source.quote()] if i.source else []


def described(i: Instruction) -> str:
    """Return a short description of an instruction, for error messages."""
    outputs = ", ".join(f"%{base_name(n)}" for n in i.outputs)
    if outputs:
        return f"{outputs} = {i.fn or i.op}"
    read = ", ".join(f"%{base_name(n)}" for n in i.reads)
    piece = f"[{i.kwargs['piece']}]" if "piece" in i.kwargs else ""
    return f"{i.op} {read}{piece}".rstrip()


def label(i: Instruction) -> str:
    """Return the user's line of an instruction, or its description."""
    return str(i.source or described(i))
