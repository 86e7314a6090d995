"""What writes over a value that a compiler would also read elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from mdfuse.ir.ops import TABLE, Op
from mdfuse.plan.overwrites import is_tangled

Function = Callable[[Tensor, Tensor], list[Tensor]]

_ROWS = torch.tensor([2, 0, 1])


def _written(w: Tensor, condition: Tensor, x: Tensor, turned: bool = False) -> Tensor:
    """Write rows of x into w where a condition holds, else those that w has there or elsewhere."""
    at = x[0].long()
    read = w.index_select(0, at.flip(0) if turned else at)
    return w.index_copy_(0, at, torch.where(condition, x, read))


def _with_rows(w: Tensor, x: Tensor) -> list[Tensor]:
    """Return rows, too, that are written back."""
    at = x[0].long()
    rows = w.index_select(0, at)
    return [rows, w.index_copy_(0, at, torch.where(x.any(), x, rows))]


def _swapped(w: Tensor, x: Tensor) -> list[Tensor]:
    """Write rows back where a condition holds, and others else."""
    at = x[0].long()
    return [w.index_copy_(0, at, torch.where(x.any(), w.index_select(0, at), x))]


_relu_backward = torch.ops.aten.threshold_backward.grad_input

#: Each thread of a kernel reads the element that it writes, or another value.
APART: dict[str, Function] = {
    "an update": lambda w, x: [w.copy_(w + x)],
    "by way of another dtype": lambda w, x: [torch.mul(w.to(torch.float64), x, out=w)],
    "what was there is not read": lambda w, x: [torch.mul(x, x, out=w), w.T * 2],
    "another value is transposed": lambda w, x: [torch.mul(x.T, x, out=w)],
    "twice": lambda w, x: [torch.mul(w, x, out=w), torch.add(w, x, out=w)],
    "a derivative fills it": lambda w, x: [_relu_backward(x.T, x, 0, grad_input=w)],
    "a derivative of what lies there": lambda w, x: [_relu_backward(w, x, 0, grad_input=w)],
    "a view of what is not read": lambda w, x: [w.T.copy_(x)],
    "what the function makes": lambda w, x: [(w + x).add_(w.T)],
    "rows of what is not read": lambda w, x: [w.index_copy_(0, _ROWS, x * 2)],
    "a choice": lambda w, x: [torch.where(w > 0, w, x, out=w)],
    "rows that are written back": lambda w, x: [_written(w, x.any(), x)],
    "nothing is written": lambda w, x: [w.T * 2, w @ x],
}

#: Some element may be read after it is written.
TANGLED: dict[str, Function] = {
    "transposed": lambda w, x: [w.copy_(w.T + x)],
    "transposed, for a derivative": lambda w, x: [_relu_backward(w.T, x, 0, grad_input=w)],
    "transposed, by out=": lambda w, x: [torch.mul(w.T, x, out=w)],
    "transposed, for another result": lambda w, x: [(w + 1).T * 2, torch.mul(w, x, out=w)],
    "transposed behind": lambda w, x: [torch.mul(w, x, out=w), w.T * 2],
    "a product": lambda w, x: [w @ x, torch.mul(w, x, out=w)],
    "a list": lambda w, x: [torch.cat([x, w]), torch.mul(w, x, out=w)],
    "a sum behind": lambda w, x: [w.add_(x), w.sum()],
    "a view is written": lambda w, x: [w.T.copy_(w + x)],
    "a view is written that is read behind": lambda w, x: [w[0].copy_(x[0]), w * 2],
    "rows of what is read before": lambda w, x: [w * 2, w.index_copy_(0, _ROWS, x)],
    "rows of what is read behind": lambda w, x: [w.index_copy_(0, _ROWS, x), w + x],
    "rows made of others": lambda w, x: [w.index_copy_(0, _ROWS, w + x)],
    "a choice of others": lambda w, x: [torch.where(x > 0, w.T, x, out=w)],
    "the largest": lambda w, x: [torch.amax(w, 0), torch.mul(w, x, out=w)],
    "some rows that are written back": lambda w, x: [_written(w, x > 0, x)],
    "rows that are written back elsewhere": lambda w, x: [_written(w, x.any(), x, turned=True)],
    "rows that are written back, or are others": _swapped,
    "rows that are written back and returned": _with_rows,
    "broadcast": lambda w, x: [torch.mul(w, x[:, :, None]), w.copy_(x)],
}


def found(function: Function) -> bool:
    w, x = torch.ones(3, 3), torch.ones(3, 3)
    return is_tangled(
        make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(w, x).graph
    )


@pytest.mark.parametrize("name", APART)
def test_apart(name: str) -> None:
    assert not found(APART[name])


@pytest.mark.parametrize("name", TANGLED)
def test_tangled(name: str) -> None:
    assert found(TANGLED[name])


def test_every_elementwise_op_may_write_over_its_operand() -> None:
    """But for losses, which may be sums; of some ops torch does not say so."""
    tangled, count = set(), 0
    for name, op in TABLE.items():
        if not op.is_elementwise or op.results > 1:
            continue

        def write(*given: Tensor, op: Op = op) -> list[Tensor]:
            if op.writes.form is None:
                given[-1].copy_(op.call(*given))
            else:
                op.writes.form(*given, out=given[-1])
            return [given[-1]]

        given = [torch.ones(3, 3) for _ in range(max(op.operands[0], 1))]
        given[0] = given[0].bool() if name == "where" else given[0]
        try:
            graph = make_fx(write, tracing_mode="fake")(*given).graph
        except (RuntimeError, TypeError, ValueError, NotImplementedError):
            continue  # it has attributes, or is for numbers of another kind
        count += 1
        tangled |= {name} if is_tangled(graph) else set()
    assert tangled == {"huber_loss", "smooth_l1_loss"}
    assert count > 80
