"""The private parts of torch that an export uses: what it notes of each operation, once for all.

Torch traces each operation of a module apart; most operations of a model's layers are alike.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from threading import get_ident
from traceback import FrameSummary, StackSummary
from types import CodeType, FrameType, NoneType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses import FakeTensor
from torch.fx import Node, proxy
from torch.fx._lazy_graph_module import _use_lazy_graph_module as lazily
from torch.fx.experimental.proxy_tensor import get_proxy_mode
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


@contextmanager
def forms_once() -> Iterator[None]:
    """Let torch compute the form of a composite operation's result once for operands of some forms.

    An export computes it from all parts of the operation: for attention in 40 times a copy's time.
    """
    plain, known, thread = OpOverload.__call__, dict[Any, Tensor](), get_ident()

    def call(op: Any, /, *args: Any, **kwargs: Any) -> Any:
        is_asked = get_ident() == thread and get_proxy_mode() is None
        key = _composite_call(op, args, kwargs) if is_asked else None
        if key in known:
            return known[key].clone()
        result = plain(op, *args, **kwargs)
        if key is not None and _is_new(result, (args, kwargs)):
            known[key] = result
        return result

    OpOverload.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        OpOverload.__call__ = plain  # type: ignore[method-assign]


def _composite_call(op: Any, args: Any, kwargs: Any) -> Any:
    """Return all that decides the form of a result of a composite operation; None of others."""
    if not _is_composite(op) or torch._C._is_any_autocast_enabled() or forward_level() >= 0:
        return None
    state, of = torch._C, torch.backends.cuda
    keys = state._dispatch_tls_local_include_set(), state._dispatch_tls_local_exclude_set()
    attention = of.flash_sdp_enabled(), of.mem_efficient_sdp_enabled(), of.math_sdp_enabled()
    try:
        forms = _form(args), _form(kwargs)
    except TypeError:
        return None
    settings = torch.is_grad_enabled(), torch.get_default_dtype(), of.cudnn_sdp_enabled()
    return op, forms, *(x.raw_repr() for x in keys), attention, settings


@cache
def _is_composite(op: Any) -> bool:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    is_plain = op.namespace == "aten" and not op._schema.is_mutable
    return is_plain and bool(has(op.name(), "CompositeImplicitAutograd"))


def _form(x: Any) -> Any:
    """Return the form of a value, or of values in one; TypeError: its form may not be all of it."""
    if type(x) is FakeTensor and x.constant is None and not x._has_symbolic_sizes_strides:
        keys = torch._C._dispatch_keys(x).raw_repr()
        form = x.shape, x.stride(), x.storage_offset(), x.dtype, x.fake_device
        return *form, x.fake_mode, x.requires_grad, keys
    if isinstance(x, list | tuple):
        return type(x), *map(_form, x)
    if isinstance(x, dict):
        return *x, *map(_form, x.values())
    if type(x) in _PLAIN:
        return type(x), x
    raise TypeError(x)


_PLAIN = {bool, int, float, str, NoneType, torch.dtype, torch.device, torch.layout}
_PLAIN |= {torch.memory_format}


def _is_new(x: Any, operands: Any) -> bool:
    """Return whether a tensor shares no operand's memory, and a copy of it has its strides."""
    if type(x) is not FakeTensor or x.constant is not None or x._has_symbolic_sizes_strides:
        return False
    tensors = [y for y in pytree.tree_leaves(operands) if isinstance(y, Tensor)]
    memory = {y.untyped_storage()._cdata for y in tensors}
    is_apart = x.untyped_storage()._cdata not in memory and not x.storage_offset()
    return is_apart and x.clone().stride() == x.stride()


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
