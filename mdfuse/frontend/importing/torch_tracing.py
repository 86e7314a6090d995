"""The private parts of torch that an export uses: what it notes of each operation, once for all.

Torch traces each operation of a module apart; most operations of a model's layers are alike.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import takewhile
from traceback import FrameSummary, StackSummary
from types import CodeType, EllipsisType, FrameType, NoneType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses import FakeTensor
from torch.fx import Node, proxy
from torch.fx._lazy_graph_module import _use_lazy_graph_module as lazily
from torch.fx.experimental.proxy_tensor import (
    _ProxyTensor,
    get_proxy_mode,
    get_proxy_slot,
    set_proxy_slot,
)
from torch.fx.node import map_arg
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from mdfuse.torch_private import forward_level, pytree


def late_code() -> AbstractContextManager[None]:
    """Return a context in which torch writes the code of a graph only where it is run."""
    return lazily(should_use=True)


@contextmanager
def frames_once() -> Iterator[None]:
    """Let torch make one object of each line on the stack, however many operations it traces there.

    It asks C++ for each of some 70 lines for each operation, and reads their texts from the file.
    """
    private: Any = proxy
    plain, known = private.CapturedTraceback, dict[Any, tuple[FrameSummary, CodeType]]()

    def summary() -> StackSummary:
        stack = StackSummary()
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            key = id(code), frame.f_lasti  # code's hash, and a line's number, take long
            if key not in known:
                line = code.co_filename, frame.f_lineno, code.co_name
                known[key] = FrameSummary(*line, lookup_line=False), code
            stack.append(known[key][0])
            frame = frame.f_back
        stack.reverse()
        return stack

    private.CapturedTraceback = SimpleNamespace(extract=lambda: SimpleNamespace(summary=summary))
    try:
        yield
    finally:
        private.CapturedTraceback = plain


class CallsOnce(TorchFunctionMode):
    """Lets torch trace a call once for operands of some forms; calls like it have copies of nodes.

    Torch passes each call through some ten layers of Python, and computes the form of attention's
    result in 40 times a copy's time; the layers of a model make equal calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[Any, _Traced | None] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function, or do what it did for such operands."""
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():  # branches of `torch.cond`
            return func(*args, **kwargs)
        mode = get_proxy_mode()
        is_asked = mode is not None and mode.pre_dispatch and func.__name__ != "__get__"
        if mode is None or not is_asked or not _is_of_torch(func):
            return func(*args, **kwargs)
        tracer: Any = mode.tracer
        with torch._C.DisableTorchFunction():
            nodes: list[Node] = []
            key = _key(func, (args, kwargs), tracer, nodes)
            known = self._known.get(key)
            if known is not None:
                return known.again(tracer, nodes, func, args, kwargs)
        if key is None or key in self._known:
            return func(*args, **kwargs)
        last = next(iter(reversed(tracer.graph.nodes)))
        result = func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            self._known[key] = _traced(tracer, nodes, last, result, (args, kwargs))
        return result


@dataclass(frozen=True, slots=True)
class _Traced:
    """A traced call.

    Attributes:
        operands: the nodes of its operands.
        nodes: those that it added.
        places: for each tensor of the result, which of the nodes it is.
        copy: of the result, where that is one tensor in memory of its own.
    """

    operands: tuple[Node, ...]
    nodes: tuple[Node, ...]
    places: tuple[int, ...]
    copy: Tensor | None

    def again(
        self, tracer: Any, operands: Sequence[Node], func: Any, args: Any, kwargs: Any
    ) -> Any:
        """Add copies of the nodes, which read other operands, and return such a result."""
        with _untraced():
            result = func(*args, **kwargs) if self.copy is None else self.copy.clone()
        stand = dict(zip(self.operands, operands, strict=True))
        for node in self.nodes:
            inputs = (map_arg(x, stand.__getitem__) for x in (node.args, node.kwargs))
            stand[node] = copy = tracer.create_node(node.op, node.target, *inputs, name=node.name)
            for key, value in node.meta.items():
                copy.meta.setdefault(key, value)
        for x, place in zip(pytree.tree_leaves(result), self.places, strict=True):
            proxy = tracer.proxy(stand[self.nodes[place]])
            set_proxy_slot(x, tracer, _ProxyTensor(proxy, None))
        return result


def _traced(
    tracer: Any, operands: Sequence[Node], last: Node, result: Any, given: Any
) -> _Traced | None:
    """Return a call by the nodes behind the last one before it; None: it is traced each time."""
    nodes = tuple(takewhile(lambda x: x is not last, reversed(tracer.graph.nodes)))[::-1]
    readable = {*operands, *nodes}
    if not all(_is_copied(x) and readable.issuperset(x.all_input_nodes) for x in nodes):
        return None
    leaves, places = pytree.tree_leaves(result), list[int]()
    for x in leaves:
        is_fixed = type(x) is FakeTensor and not x._has_symbolic_sizes_strides
        slot = get_proxy_slot(x, tracer, None) if is_fixed else None
        if slot is None or slot.constant is not None or slot.proxy.node not in nodes:
            return None
        places.append(nodes.index(slot.proxy.node))
    tensors = {id(x) for x in pytree.tree_leaves(given)}
    if not leaves or not tensors.isdisjoint(map(id, leaves)):
        return None
    return _Traced(tuple(operands), nodes, tuple(places), _copy(result, given))


def _untraced() -> Any:
    """Return a context in which an export traces nothing."""
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.PreDispatch)
    return torch._C._ExcludeDispatchKeyGuard(key)


def _is_copied(node: Node) -> bool:
    """Return whether a node like another one does what a trace would note."""
    op = node.target
    if op is operator.getitem:
        return True
    is_plain = isinstance(op, OpOverload) and op.namespace == "aten"
    return node.op == "call_function" and is_plain and not op._schema.is_mutable  # type: ignore


def _is_of_torch(func: Any) -> bool:
    """Return whether a function is torch's, which goes by what `_key` has; users' may not."""
    module = getattr(func, "__module__", None) or getattr(func, "__objclass__", func).__module__
    return (module or "").split(".")[0] == "torch"


def _key(func: Any, given: Any, tracer: Any, nodes: list[Node]) -> Any:
    """Return all that decides what a call adds to the graph; None: its operands do not tell.

    Nodes of the operands are added to a list, each once.
    """
    if torch._C._is_any_autocast_enabled() or forward_level() >= 0:
        return None
    state, of = torch._C, torch.backends.cuda
    keys = state._dispatch_tls_local_include_set(), state._dispatch_tls_local_exclude_set()
    attention = of.flash_sdp_enabled(), of.mem_efficient_sdp_enabled(), of.math_sdp_enabled()
    settings = torch.is_grad_enabled(), torch.get_default_dtype(), of.cudnn_sdp_enabled()
    is_same = torch.are_deterministic_algorithms_enabled()
    try:
        forms = _form(given, tracer, nodes)
    except TypeError:
        return None
    if not nodes:
        return None
    return func, id(tracer), forms, *(x.raw_repr() for x in keys), attention, settings, is_same


def _form(x: Any, tracer: Any, nodes: list[Node]) -> Any:
    """Return the form of a value, or of values in one; TypeError: its form may not be all of it."""
    if type(x) is FakeTensor and x.constant is None and not x._has_symbolic_sizes_strides:
        slot = get_proxy_slot(x, tracer, None)
        if slot is None or slot.constant is not None:
            raise TypeError(x)
        node = slot.proxy.node
        nodes += [] if node in nodes else [node]
        keys = torch._C._dispatch_keys(x).raw_repr()
        form = x.shape, x.stride(), x.storage_offset(), x.dtype, x.fake_device
        return *form, x.fake_mode, x.requires_grad, keys, nodes.index(node)
    if isinstance(x, list | tuple):
        return type(x), *(_form(y, tracer, nodes) for y in x)
    if isinstance(x, dict):
        return *x, *(_form(y, tracer, nodes) for y in x.values())
    if type(x) is slice:
        return slice, *(_form(y, tracer, nodes) for y in (x.start, x.stop, x.step))
    if type(x) is float:
        return x.hex()  # 0.0 and -0.0 are equal
    if type(x) in _PLAIN:
        return type(x), x
    raise TypeError(x)


_PLAIN = {bool, int, str, NoneType, EllipsisType, torch.dtype, torch.device, torch.layout}
_PLAIN |= {torch.memory_format}


def _copy(x: Any, operands: Any) -> Tensor | None:
    """Return a copy of a tensor that shares no operand's memory; None where strides differ."""
    if type(x) is not FakeTensor or x.storage_offset():
        return None
    tensors = [y for y in pytree.tree_leaves(operands) if isinstance(y, Tensor)]
    if x.untyped_storage()._cdata in {y.untyped_storage()._cdata for y in tensors}:
        return None
    with _untraced():
        copy = x.clone()
    return copy if copy.stride() == x.stride() else None


def traced() -> list[Node]:
    """Return the nodes so far of the graph that torch traces."""
    mode = get_proxy_mode()
    return [] if mode is None else [*mode.tracer.graph.nodes]


@contextmanager
def checkpoints_entered(enter: Callable[[bool], AbstractContextManager[None]]) -> Iterator[None]:
    """Replace what `torch.utils.checkpoint.checkpoint(use_reentrant=False)` does by a context.

    Args:
        enter: takes whether the call has a `context_fn`; its context is around the function.
    """
    private: Any = checkpoint
    plain = private._checkpoint_without_reentrant_generator

    def generator(_: Any, __: Any, context_fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        with enter(context_fn is not checkpoint.noop_context_fn):
            yield

    private._checkpoint_without_reentrant_generator = generator
    try:
        yield
    finally:
        private._checkpoint_without_reentrant_generator = plain
