"""Operations that take ragged values, and the operands that they read beside them.

The rows of a ragged value [parts, experts, <=bound : n, d] that are there are computed with; the
others stay zero. A number that is added, and a tensor that is the same for all rows of an expert,
is spread over the rows that are there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mdfuse.errors import DefinitionError
from mdfuse.extents.extent import are_same
from mdfuse.frontend.handle import ValueId
from mdfuse.frontend.sites import Derived, Site
from mdfuse.ir.graph import Operand, Value
from mdfuse.ir.infer import scalar_sample
from mdfuse.ir.ops import TABLE

if TYPE_CHECKING:
    from mdfuse.frontend.recorder import Recorder

Call = tuple[str, tuple[Operand, ...], Mapping[str, Any]]

#: Operations on ragged values, which read the counts last.
_ON_ROWS = (
    "ungroup_rows", "rows_mm", "rows_mm_grad", "sum_of_rows", "spread_rows", "mask_rows",
)  # fmt: skip
_COPIES = ("set", "detach")
#: Elementwise ones that act on the rows that are there, though they make something else of zeros.
_ACTIVATIONS = ("sigmoid", "hardsigmoid", "softplus")
_LAST = 3  # the dim of the columns
_HINT = (
    "elementwise operations that make 0 of 0, grouped_mm, linear, sum over dim 2, ungroup_rows, set"
)


def fitted(
    recorder: Recorder,
    site: Site | Derived,
    op: str,
    given: tuple[tuple[Operand, ...], Mapping[str, Any]],
) -> Call:
    """Return a call with what it reads beside ragged values; others unchanged.

    Raises:
        DefinitionError: an operation that no ragged value takes; counts of other rows.
    """
    inputs, attrs = given
    values = recorder.values
    ragged = [x for x in inputs if isinstance(x, str) and values[x].rows]
    if not ragged and op not in _ON_ROWS and op != "group_rows":
        return op, inputs, attrs
    return _Fitting(recorder, site, op, inputs, attrs).call()


def is_zero_of_zeros(
    op: str, operands: Sequence[Value | Operand], attrs: Mapping[str, Any]
) -> bool:
    """Return whether an elementwise operation makes zeros of zeros."""
    samples = [_sample(x) for x in operands]
    try:
        result = TABLE[op].call(*samples, **attrs)
    except (RuntimeError, TypeError, ZeroDivisionError):
        return False
    return isinstance(result, torch.Tensor) and not bool(result.any())


def _sample(x: Value | Operand) -> Any:
    if not isinstance(x, Value):
        return x
    return torch.zeros(1, dtype=x.dtype) if x.is_tensor else scalar_sample(x.dtype)


def is_elementwise(op: str) -> bool:
    """Return whether an operation computes each element from one of each operand."""
    return TABLE[op].is_elementwise or op == "where"


def masked(recorder: Recorder, op: str, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> bool:
    """Return whether rows that are not there must be set to zero behind an operation."""
    values = [recorder.values[recorder.names[x]] if isinstance(x, ValueId) else x for x in inputs]
    ragged = [x for x in values if isinstance(x, Value) and x.rows]
    return bool(ragged) and is_elementwise(op) and not is_zero_of_zeros(op, values, attrs)


class RaggedRefusal(DefinitionError):
    """An operation that ragged values do not take."""


class _Fitting:
    """One call with a ragged value."""

    def __init__(
        self,
        recorder: Recorder,
        site: Site | Derived,
        op: str,
        inputs: tuple[Operand, ...],
        attrs: Mapping[str, Any],
    ) -> None:
        self.recorder, self.site, self.op = recorder, site, op
        self.inputs, self.attrs = inputs, attrs
        self.values = [recorder.values[x] if isinstance(x, str) else None for x in inputs]
        self.ragged = [x for x in self.values if x is not None and x.rows]

    def call(self) -> Call:
        op = self.op
        if op == "group_rows":
            cut = self._checked_counts(self.inputs[1], self.inputs[2])
            return op, self.inputs, {**self.attrs, **cut}
        if not self.ragged:
            raise self._refused("it takes rows that `group_rows` grouped")
        self._check_alike()
        if op in _ON_ROWS:
            return self._on_rows()
        if op in ("linear", "matmul"):
            return self._product()
        if op == "sum":
            return self._sum()
        if op == "expand" and _repeats_columns(self):
            columns = self._full(1, (1, 1, self.attrs["shape"][_LAST]))
            x = self.ragged[0]
            return "mul", (x.name, self._new("spread_rows", columns, x.name, x.rows)), {}
        if op in _COPIES or (op in _ALONG and _ALONG[op](self)):
            return op, self.inputs, self.attrs
        if is_elementwise(op):
            return self._elementwise()
        raise self._refused("it mixes rows of different experts, or places that no row has")

    # -- checks ------------------------------------------------------------------------------------

    def _check_alike(self) -> None:
        first = self.ragged[0]
        for x in self.ragged:
            if x.rows != first.rows or not all(map(are_same, x.shape[:3], first.shape[:3])):
                raise self._refused(f"%{x.name} and %{first.name} have rows of their own each")

    def _checked_counts(self, ids: Operand, n: Operand) -> Mapping[str, Any]:
        """Return how n cuts tokens into parts.

        Raises:
            DefinitionError: n counts no rows by these ids.
        """
        of = self._producer(n)
        while of is not None and of.op in ("clamp", "set"):
            of = self._producer(of.inputs[0])
        if of is None or of.op != "counts" or of.inputs[0] != ids:
            raise self._refused(f"%{n} are not the counts of %{ids}")
        return {k: x for k, x in of.attrs if k == "sizes"}

    def _producer(self, name: Operand) -> Any:
        return next((e for e in reversed(self.recorder.exprs) if name in e.outputs), None)

    def _refused(self, because: str) -> RaggedRefusal:
        shown = (
            f"%{x.name}: {x.type_text()}" if x is not None else str(given)
            for x, given in zip(self.values, self.inputs, strict=True)
        )
        return RaggedRefusal(
            f"{self.op}({', '.join(shown)})", where=self.site.where, because=because, hint=_HINT
        )

    # -- operations --------------------------------------------------------------------------------

    def _on_rows(self) -> Call:
        inputs = self.inputs
        if len(inputs) < TABLE[self.op].operands[0]:
            inputs = (*inputs, self.ragged[0].rows)
        if self.op == "ungroup_rows":
            cut = self._checked_counts(inputs[1], inputs[2])
            return self.op, inputs, {**self.attrs, **cut}
        return self.op, inputs, self.attrs

    def _product(self) -> Call:
        """Multiply by the same matrix for all experts."""
        x, weight, *others = self.values
        assert x is not None
        is_matrix = weight is not None and not weight.rows and len(weight.shape) in (2, 3)
        if not x.rows or weight is None or not is_matrix:
            raise self._refused("rows are multiplied from the right, by one matrix per expert")
        name: Operand = weight.name
        if self.op == "linear":
            name = self._new("permute", name, dims=(1, 0))
        if len(weight.shape) == 2:
            k, n = self.recorder.values[str(name)].shape
            name = self._new("unsqueeze", name, dims=(0,))
            name = self._new("expand", name, shape=(x.shape[1], k, n))
        bias = others[0] if others else None
        if bias is None:
            return "rows_mm", (x.name, name, x.rows), {}
        product = self._new("rows_mm", x.name, name, x.rows)
        return "add", (product, self._spread(bias.name, bias.shape)), {}

    def _sum(self) -> Call:
        x, ndim = self.ragged[0], 4
        dims = {d % ndim for d in self.attrs.get("dims") or range(ndim)}
        if dims == {_LAST} and self.attrs.get("keepdim"):
            return self.op, self.inputs, self.attrs
        if 2 not in dims or self.attrs.get("keepdim"):
            raise self._refused("rows are summed, over dim 2, or columns, with keepdim")
        rows = self._new("sum_of_rows", x.name, x.rows)
        others = tuple(d - (d > 2) for d in sorted(dims - {2}))
        if not others:
            return "set", (rows,), {}
        return "sum", (rows,), {**self.attrs, "dims": others}

    def _elementwise(self) -> Call:
        is_sum = self.op in ("add", "sub")
        inputs: list[Operand] = []
        for x, value in zip(self.inputs, self.values, strict=True):
            if value is not None and value.is_tensor and not value.rows:
                inputs.append(self._spread(value.name, value.shape))
            elif is_sum and (value is not None or x) and not (value and value.rows):
                inputs.append(self._spread(self._full(x), (1,)))
            else:
                inputs.append(x)
        values = [self.recorder.values[x] if isinstance(x, str) else x for x in inputs]
        is_mine = isinstance(self.site, Derived)  # of a gradient: what is behind is set to zero
        if self.op in _ACTIVATIONS and not is_mine:
            there = self._new(self.op, *inputs, **self.attrs)
            return "mask_rows", (there, self.ragged[0].rows), {}
        if not is_mine and not is_zero_of_zeros(self.op, values, self.attrs):
            raise self._refused(
                "behind its rows a ragged value is zero, and this makes something else of zeros"
            )
        return self.op, tuple(inputs), self.attrs

    def _full(self, number: Operand, shape: tuple[int, ...] = (1,)) -> str:
        return self._new("full", number, shape=shape, dtype=self.ragged[0].dtype)

    def _spread(self, name: Operand, shape: tuple[int, ...]) -> str:
        """Repeat what each expert has one of, for each of its rows."""
        whole = (1,) * (4 - len(shape)) + tuple(shape)
        if len(whole) > 4 or not are_same(whole[2], 1):
            raise self._refused(f"%{name} has an element for each place, whether a row is there")
        three = self._new("reshape", name, shape=(*whole[:2], whole[3]))
        x = self.ragged[0]
        return self._new("spread_rows", three, x.name, x.rows)

    def _new(self, op: str, *operands: Operand, **attrs: Any) -> str:
        """Record an expression of one result at the user's line; return the name of the result."""
        names = self.recorder.names
        ids = [
            ValueId(len(names) - 1 - names[::-1].index(x)) if isinstance(x, str) else x
            for x in operands
        ]
        self.recorder.op(Derived(self.site.source), op, ids, attrs)
        return names[-1]


def _takes_columns(of: _Fitting) -> bool:
    """Return whether a slice takes columns of all rows."""
    shape, attrs = of.ragged[0].shape, of.attrs
    whole = attrs.get("ends", attrs.get("shape", ()))[:_LAST]
    starts, steps = attrs["starts"][:_LAST], attrs["steps"][:_LAST]
    return (
        (*starts, *steps) == (0, 0, 0, 1, 1, 1)
        and len(whole) == _LAST
        and all(map(are_same, whole, shape))
    )


def _repeats_columns(of: _Fitting) -> bool:
    """Return whether an expansion repeats the only column of each row."""
    return all(map(are_same, of.attrs["shape"][:_LAST], of.ragged[0].shape))


#: Operations along columns -> whether a call is.
_ALONG = {
    "slice": _takes_columns,
    "slice_grad": _takes_columns,
    "cat": lambda of: of.attrs["dim"] % 4 == _LAST and len(of.ragged) == len(of.inputs),
}
