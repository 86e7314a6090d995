"""The dims of a buffer along which all elements are equal, as `expand` makes them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property

from mdfuse.errors import MdfuseError
from mdfuse.hir.analysis.dataflow import shared_operand
from mdfuse.hir.instructions import received
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.ir.graph import Value
from mdfuse.ir.infer import expanded_dims as stretched
from mdfuse.ir.infer import infer
from mdfuse.ir.ops import TABLE


class Expanded:
    """The expanded dims of the buffers of a program.

    A dim counts as expanded if its elements are equal, also where each has memory of its own, as in
    a result with a memory order.
    """

    def __init__(self, program: HostProgram) -> None:
        self.program = program

    def dims(self, name: str, reader: Instruction) -> frozenset[int]:
        """Return the expanded dims of a name where an instruction reads it.

        Only a buffer that a single view op binds or writes has any.
        """
        root = self.program.root(name)
        writers = self.writers.get(root, ())
        if len(writers) != 1 or self._is_changed(root):
            return frozenset()
        (writer,) = writers
        is_view = writer.fn in TABLE and TABLE[writer.fn].is_view
        is_old = root in self.program.inputs and not self._is_ahead(writer, reader)
        return self._through(writer) if is_view and not is_old else frozenset()

    def _is_ahead(self, writer: Instruction, reader: Instruction) -> bool:
        """Return whether a write precedes a read, outside of all loops and branches."""
        for i in self.program.instructions:
            for j in i.body if i.op == "launch" else (i,):
                if any(k is reader for k in j.walk()):
                    return False
                if j is writer:
                    return True
        return False

    @cached_property
    def writers(self) -> Mapping[str, list[Instruction]]:
        """Buffer -> the instructions that bind it, write into it or receive into it."""
        writers = defaultdict[str, list[Instruction]](list)
        for i in self.program.walk():
            if i.op != "launch":
                for root in {self.program.root(n) for n in (*i.outputs, *received(i))}:
                    writers[root].append(i)
        return writers

    @cached_property
    def views(self) -> Mapping[str, list[str]]:
        """Buffer -> its views, without views of views."""
        views = defaultdict[str, list[str]](list)
        for root, (maker, *_) in self.writers.items():
            of = shared_operand(maker)
            if of is not None:
                views[self.program.root(of)].append(root)
        return views

    def _is_changed(self, root: str) -> bool:
        """Return whether an instruction writes into a buffer through views, or views of views."""
        seen, waiting = {root}, [root]
        while waiting:
            views = {*self.views.get(waiting.pop(), ())} - seen
            if any(len(self.writers[v]) > 1 for v in views):
                return True
            seen |= views  # an input that is updated may be a view of its own views
            waiting += views
        return False

    def _through(self, i: Instruction) -> frozenset[int]:
        """Return the expanded dims of a view's result, as the strides of torch's result show."""
        source, kind = i.inputs[0], self.program.types[i.outputs[0]]
        before = self.program.types.get(source) if isinstance(source, str) else None
        if before is None or not isinstance(source, str):
            return frozenset()
        dims = self.dims(source, i)
        if i.fn == "slice":  # a rank's own names places in its part, which may be a single row
            return frozenset(d for d in dims if kind.shape[d] > 1)
        value = Value(
            name=source,
            shape=before.shape,
            dtype=before.dtype,
            kind="tensor",
            order=tuple(range(len(before.shape))),
            expanded=dims,
        )
        attrs = {**i.kwargs}
        if i.fn in ("reshape", "expand"):
            attrs["shape"] = kind.shape
        try:
            inferred = infer(TABLE[i.fn], [source], attrs, {source: value}, None)
        except MdfuseError:
            return frozenset()
        return stretched(inferred)  # type: ignore[arg-type]
