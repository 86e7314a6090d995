"""Torch's compiler, Inductor: all that mdfuse uses of it, which torch does not promise to keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mdfuse.plan.forms import Form, form_of

Function = Callable[..., Any]


def compiled(function: Function, forms: Sequence[Form]) -> tuple[Function, list[Form]]:
    """Compile a function of tensors, which returns a list of tensors and may write into arguments.

    Args:
        function: made of torch calls; none of them depends on an element.
        forms: of its arguments; calls take tensors of these forms.

    Returns:
        The compiled function, and the forms of its results.

    Raises:
        Exception: whatever the compiler raises where it cannot.
    """
    from torch._inductor import standalone_compile

    graph, arguments, results = traced(function, forms)
    return standalone_compile(graph, arguments), results


def traced(
    function: Function, forms: Sequence[Form]
) -> tuple[torch.fx.GraphModule, list[Any], list[Form]]:
    """Trace a function; see `compiled`.

    Returns:
        Its graph, arguments without elements, and the forms of its results.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with torch.no_grad(), FakeTensorMode(shape_env=ShapeEnv()):
        arguments: list[Any] = [
            torch.empty_strided(shape, strides, dtype=dtype, device=device)
            for shape, strides, dtype, device in forms
        ]
        with enable_python_dispatcher():  # as in torch.compile: it knows more strides as dense
            graph = make_fx(function, tracing_mode="fake")(*arguments)
        results = [form_of(x) for x in function(*arguments)]
    return graph, arguments, results
