"""Traced functions as bytes, for a process that compiles them.

A graph is written as its calls, one after the other: the operation's name, and the names of the
calls whose results it takes. Settings travel with it, so that either process compiles the same.
"""

from __future__ import annotations

import io
import operator
import pickle
from collections.abc import Mapping
from typing import Any

import torch

from mdfuse.plan import inductor
from mdfuse.plan.inductor import OpOverload, TracedGraph
from mdfuse.plan.tensor_meta import form_of

#: Values of torch that are written as their names: their own way finds them in whichever module
#: has a name for them, such as the user's.
_NAMED = torch.dtype | torch.memory_format | torch.layout

#: What a name is looked up in.
_ROOTS: dict[str, Any] = {"op": torch.ops, "value": torch}


class _Packer(pickle.Pickler):
    """Writes operations, calls and constants of torch as their names."""

    def persistent_id(self, x: Any) -> tuple[str, str] | None:
        if isinstance(x, torch.fx.Node):
            return "call", x.name
        if isinstance(x, OpOverload):
            return "op", str(x)
        return ("value", str(x).removeprefix("torch.")) if isinstance(x, _NAMED) else None


class _Unpacker(pickle.Unpickler):
    """Reads one part that a `_Packer` wrote.

    Attributes:
        calls: those that are there already, by name.
    """

    def __init__(self, stream: io.BytesIO, calls: Mapping[str, torch.fx.Node]) -> None:
        super().__init__(stream)
        self.calls = calls

    def persistent_load(self, named: tuple[str, str]) -> Any:
        kind, name = named
        return self.calls[name] if kind == "call" else operator.attrgetter(name)(_ROOTS[kind])


def packed_settings(device: torch.device) -> bytes:
    """Return this process's settings of the compiler as bytes for `assume_packed`.

    Raises:
        Exception: one of them cannot leave this process.
    """
    stream = io.BytesIO()
    _Packer(stream).dump((device, inductor.settings_of([device])))
    return stream.getvalue()


def assume_packed(data: bytes) -> torch.device:
    """Make settings of another process this one's; return the device that they are for.

    Raises:
        Exception: this process has other versions or another GPU.
    """
    device: torch.device
    device, settings = _Unpacker(io.BytesIO(data), {}).load()
    inductor.assume(settings)
    return device


def packed(traced: TracedGraph) -> bytes:
    """Return a traced function without symbolic sizes as bytes for `unpacked`.

    Raises:
        Exception: a part of it, or of the compiler's settings, cannot leave this process.
    """
    calls, constants = [*traced.graph.graph.nodes], dict[str, torch.Tensor]()
    for x in calls:
        value = getattr(traced.graph, x.target) if x.op == "get_attr" else None
        is_known = isinstance(x.target, str | OpOverload) or x.target is operator.getitem
        if not is_known or (x.op == "get_attr" and type(value) is not torch.Tensor):
            raise TypeError(f"{x.target} cannot leave this process")
        constants |= {} if value is None else {x.target: value}
    forms = [form_of(x) for x in traced.arguments]
    settings = inductor.settings_for(traced)
    stream = io.BytesIO()
    for part in (
        inductor.settings_of(form[3] for form in forms),
        (forms, traced.results, constants, settings, len(calls)),
        *((x.op, x.name, x.target, x.args, x.kwargs) for x in calls),
    ):
        _Packer(stream).dump(part)
    return stream.getvalue()


def unpacked(data: bytes) -> TracedGraph:
    """Return a traced function of another process, whose settings become those of this one.

    Raises:
        Exception: this process has other versions or another GPU, or lacks an operation.
    """
    stream, calls = io.BytesIO(data), dict[str, torch.fx.Node]()
    inductor.assume(_Unpacker(stream, calls).load())
    forms, results, constants, settings, count = _Unpacker(stream, calls).load()
    graph = torch.fx.Graph()
    for _ in range(count):
        kind, name, target, args, kwargs = _Unpacker(stream, calls).load()
        calls[name] = graph.create_node(kind, target, args, kwargs, name)
    module = torch.fx.GraphModule(constants, graph)
    return inductor.rebuilt(module, forms, results, settings)
