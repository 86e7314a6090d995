"""Fusion definitions: the one mutable thing, until its `with` block ends."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextvars import Token
from dataclasses import replace
from functools import cached_property
from typing import Any, Self

import torch

from mdfuse.assumptions import Assumptions, assuming
from mdfuse.communication import check_reduce_op
from mdfuse.errors import (
    CommunicationError,
    DefinitionError,
    LayoutError,
    Source,
    user_source,
)
from mdfuse.extents import Extent, pinned
from mdfuse.frontend import ops as operations
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.names import assigned_name
from mdfuse.frontend.stride_order import dims_of
from mdfuse.frontend.symbols import Symbols
from mdfuse.ir.graph import DTYPE_NAMES, Expr, Fusion, Operand, Value, fresh_name
from mdfuse.ir.infer import inferred, scalar_sample
from mdfuse.ir.ops import TABLE
from mdfuse.ir.symbolic import check_definition
from mdfuse.layout import Layout, Partial, Placement, Stream
from mdfuse.mesh import DeviceMesh
from mdfuse.plan.local_ops import as_number, scalar_call

_SCALAR_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64}


class FusionDefinition:
    """Records a fusion, operation by operation.

    >>> import mdfuse as mf
    >>> mesh = mf.DeviceMesh.arange(tp=2)
    >>> with mf.FusionDefinition("double") as fd:
    ...     x = fd.define_tensor([4], mesh=mesh, layout={"tp": mf.Shard(0)})
    ...     fd.add_output(x + x)
    >>> fd.outputs
    [1]
    """

    def __init__(self, name: str = "fusion") -> None:
        self.name = name
        self.values: dict[str, Value] = {}
        self._exprs: list[Expr] = []
        self._inputs: list[Handle] = []
        self._outputs: list[Handle] = []
        self._reuse: dict[str, str] = {}
        self._used: dict[str, Source | None] = {}
        self._stated: dict[str, Source | None] = {}
        self._handles = 0
        self._streams = 0
        self._open = False
        self._token: Token[FusionDefinition | None] | None = None
        #: what the user's code, and operations that look at extents, decided about them
        self.assumed = Assumptions()
        self._assuming = assuming(self.assumed)
        self._symbols = Symbols(self.assumed)

    # -- life ------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if self._handles or self._open:
            raise DefinitionError(f"@{self.name} is defined already", hint="make a new definition")
        self._open = True
        self._token = operations.current.set(self)
        self._assuming.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._open = False
        assert self._token is not None
        self._assuming.__exit__(None, None, None)
        operations.current.reset(self._token)

    def _check_open(self) -> None:
        if not self._open:
            raise DefinitionError(
                f"@{self.name} is not being defined",
                where=self.fusion_where(),
                because="a definition takes operations inside its `with` block only",
                hint="move the line into the block, or define a new fusion",
            )

    def fusion_where(self) -> list[str]:
        """The user's line, for error messages."""
        source = user_source()
        return [source.quote()] if source else []

    # -- reading ---------------------------------------------------------------------------------

    @property
    def examples(self) -> Mapping[str, int]:
        """The symbolic extents, each with what it is while the fusion is defined."""
        return self._symbols.examples

    @property
    def ops(self) -> Any:
        """The operations, as functions."""
        return operations

    @property
    def inputs(self) -> list[int]:
        """Ids of the inputs."""
        return [h.id for h in self._inputs]

    @property
    def outputs(self) -> list[int]:
        """Ids of the outputs."""
        return [h.id for h in self._outputs]

    @property
    def extents(self) -> list[int]:
        """Ids of the inputs' extents: -1, -2, … in order of inputs and dims."""
        return [-1 - i for i in range(sum(h.ndim for h in self._inputs if h.value.is_tensor))]

    @cached_property
    def fusion(self) -> Fusion:
        """The immutable fusion; there once the `with` block has ended."""
        if self._open:
            raise DefinitionError(
                f"@{self.name} is still being defined",
                hint="compile it after its `with` block",
            )
        return Fusion(
            name=self.name,
            values=dict(self.values),
            exprs=tuple(self._exprs),
            inputs=tuple(h.name for h in self._inputs),
            outputs=tuple(h.name for h in self._outputs),
            reuse=dict(self._reuse),
        )

    def __str__(self) -> str:
        """Every value with its layout: the user's marked !, the others inferred."""
        from mdfuse.passes import propagate_layouts

        if self._open:
            return f"fusion @{self.name} (still being defined)"
        return str(propagate_layouts.run(self.fusion))

    # -- defining --------------------------------------------------------------------------------

    def define_tensor(
        self,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        mesh: DeviceMesh | Layout | None = None,
        layout: Mapping[str, Placement] | Layout | None = None,
        order: Mapping[int, Sequence[str]] | None = None,
        stride_order: Sequence[int] | None = None,
        name: str | None = None,
    ) -> Handle:
        """An input.

        Args:
            shape: global extents; -1 stands for one that each run chooses: `x.0` is dim 0 of x.
            dtype: element type.
            mesh: where it lives; alone: replicated; without mesh and layout: inferred.
            layout: axis -> placement.
            order: dim -> the axes that split it, outermost first.
            stride_order: the memory order of what is passed: the place of each dim, 0 the fastest.
            name: how programs print it; by default the variable that it is assigned to.
        """
        self._check_open()
        extents = self._symbols.current(_extents(shape, self.fusion_where()))
        if not isinstance(dtype, torch.dtype):
            raise DefinitionError(
                f"dtype={dtype!r}", where=self.fusion_where(), hint="a torch dtype: torch.float32"
            )
        _check_name(name)
        dims = tuple(range(len(extents)))
        if stride_order is not None:
            of = f"a tensor of {len(dims)} dims"
            dims = dims_of(stride_order, len(dims), of, self.fusion_where())
        name = self._symbols.unused(name or assigned_name() or "in")
        handle = self._add(name, shape=extents, dtype=dtype, order=dims)
        self._inputs.append(handle)
        if any(type(n) is int and n == -1 for n in extents):
            shape = self._symbols.made(handle.name, extents)
            self.values[handle.name] = replace(handle.value, shape=shape)
        if isinstance(layout, Layout):
            mesh, layout = layout, None
        if mesh is not None:
            self.place(handle, mesh, layout, order, None)
        elif layout is not None:
            raise LayoutError(
                f"%{handle.name} has a layout but no mesh",
                where=self.fusion_where(),
                hint="pass mesh= as well",
            )
        return handle

    def define_scalar(
        self, value: float | int | bool | None = None, dtype: Any = None, name: str | None = None
    ) -> Handle:
        """A number: a constant, or with value None an input of each run.

        Args:
            value: the constant.
            dtype: of an input: float (the default), int, bool or a torch dtype.
            name: how programs print it.
        """
        self._check_open()
        value = pinned(value) if isinstance(value, Extent) else value
        kind = dtype or (type(value) if value is not None else float)
        kind = _SCALAR_DTYPES.get(kind, kind)
        if kind not in DTYPE_NAMES or (value is not None and as_number(value, kind) is None):
            raise DefinitionError(
                f"define_scalar(value={value!r}, dtype={dtype})",
                because="a scalar is a bool, an int or a float, and its dtype is of that kind",
                hint="define_scalar(2.0), or define_scalar(dtype=int) for an input of each run",
            )
        _check_name(name)
        value = None if value is None else as_number(value, kind)
        handle = self._add(
            name or assigned_name() or "s", shape=(), dtype=kind, kind="scalar", constant=value
        )
        if value is None:
            self._inputs.append(handle)
        return handle

    def define_vector(self, values: Sequence[float | int | bool]) -> list[Handle]:
        """A scalar for each number."""
        return [self.define_scalar(v) for v in values]

    def add_output(
        self, t: Handle, stride_order: Sequence[int] | None = None, reuse: Handle | None = None
    ) -> None:
        """Make a value an output of the program.

        Args:
            t: a tensor of this definition.
            stride_order: the memory order that it must have: the place of each dim, 0 the fastest.
            reuse: an input into whose buffer the result is written.

        Raises:
            DefinitionError: t is no tensor of this definition, or is an output already; another
                order is required of it, or of the buffer that it reuses; the reuse does not fit.
        """
        self._check_open()
        where = self.fusion_where()
        if not isinstance(t, Handle) or t.definition is not self:
            raise DefinitionError(
                f"{t!r} is not a value of @{self.name}",
                where=where,
                hint="pass what an operation of this definition returned",
            )
        if not t.value.is_tensor:
            raise DefinitionError(f"%{t.name} is a scalar", where=where, hint="outputs are tensors")
        if stride_order is not None:
            t = self._in_order(t, stride_order, where)
        if any(t.name == o.name for o in self._outputs):
            raise DefinitionError(
                f"%{t.name} is an output already",
                where=where,
                because="an output does not alias another output",
                hint="use the first output twice, or copy it: t * 1",
            )
        if reuse is not None:
            self._check_reuse(t, reuse, where)
            self._reuse[t.name] = reuse.name
        self._outputs.append(t)

    def _in_order(self, t: Handle, stride_order: Sequence[int], where: list[str]) -> Handle:
        """The value in a memory order: itself, where that order is required of it already."""
        required = t.stride_order_requirement
        if required is None:
            return operations.stride_order(t, stride_order)
        dims_of(stride_order, t.ndim, f"%{t.name}: {t.value.type_text()}", where)
        if required != tuple(stride_order):
            raise DefinitionError(
                f"%{t.name} as an output with stride_order={tuple(stride_order)}, "
                f"but stride_order={required} is required of it",
                where=[*where, t.value.source.quote() if t.value.source else ""],
                because="a value has one memory order",
                hint=f"leave one out, or make another value: fd.ops.stride_order({t.name}, ...)",
            )
        return t

    def _check_reuse(self, t: Handle, reuse: Handle, where: list[str]) -> None:
        if all(reuse is not i for i in self._inputs) or not reuse.value.is_tensor:
            raise DefinitionError(
                f"reuse={reuse!r} is not an input tensor of @{self.name}",
                where=where,
                hint="pass what define_tensor returned",
            )
        if (t.shape, t.dtype) != (reuse.shape, reuse.dtype):
            raise DefinitionError(
                f"%{t.name}: {t.value.type_text()} cannot be written into "
                f"%{reuse.name}: {reuse.value.type_text()}",
                where=where,
                because="the result takes the place of the input's elements",
                hint="leave reuse= out, or cast or reshape the result",
            )
        if t.value.is_order_required and t.value.order != reuse.value.order:
            raise DefinitionError(
                f"%{t.name} has a required memory order that is not the one of %{reuse.name}",
                where=where,
                because=f"the result takes the place of the elements of %{reuse.name}, which lie "
                "in the order that its definition declares",
                hint=f"define %{reuse.name} with that stride_order, or leave reuse= out",
            )
        if reuse.name in self._reuse.values():
            raise DefinitionError(
                f"%{reuse.name} is reused twice",
                where=where,
                because="one buffer holds one result",
                hint="leave reuse= out for one of them",
            )

    # -- what handles and operations call --------------------------------------------------------

    def next_stream(self) -> int:
        """A number for each random operation, so that two draws differ."""
        self._streams += 1
        return self._streams

    def record(self, op: str, operands: Sequence[Any], **attrs: Any) -> Handle:
        """Append an expression; returns the handle of its result."""
        self._check_open()
        source = user_source()
        inputs = tuple(self._operand(x, op, source) for x in operands)
        inputs, attrs = self._symbols.current((inputs, attrs))
        names = [x for x in inputs if isinstance(x, str)]
        if not any(self.values[n].is_tensor for n in names) and op != "uniform":
            return self._record_scalar(op, inputs, attrs, source)
        found = self._inferred(op, inputs, attrs, source)
        for name in names:
            self._used.setdefault(name, source)
        handle = self._add(assigned_name() or "t", source=source, **found)
        settings = _settings(self._symbols.current(attrs))
        self._exprs.append(
            Expr(op=op, inputs=inputs, output=handle.name, attrs=settings, source=source)
        )
        return handle

    def check_extents(self, extents: Mapping[str, int]) -> None:
        """Raise DefinitionError where the definition would be another one for these extents."""
        check_definition(self.name, self.assumed, extents)

    def _inferred(
        self, op: str, inputs: tuple[Operand, ...], attrs: dict[str, Any], source: Source | None
    ) -> dict[str, Any]:
        """What an operation gives; where it refuses the examples of symbols, others are tried."""
        row, symbols = TABLE[op], self._symbols
        if not symbols.examples:
            return inferred(row, inputs, attrs, self.values, source)
        # What inference assumes counts when the fusion is lowered, which infers again.
        with assuming(Assumptions()):
            try:
                return inferred(row, inputs, attrs, self.values, source)
            except DefinitionError:
                expr = Expr(op=op, inputs=inputs, output="", attrs=_settings(attrs))
                found = symbols.unified(self.values, self._exprs, expr)
                if found is None:
                    raise
            self.values, self._exprs = found
            inputs, attrs = symbols.current((inputs, attrs))
            return inferred(row, inputs, attrs, self.values, source)

    def _record_scalar(
        self, op: str, inputs: tuple[Operand, ...], attrs: dict[str, Any], source: Source | None
    ) -> Handle:
        inputs = tuple(pinned(x) if isinstance(x, Extent) else x for x in inputs)

        def call(*numbers: Any) -> Any:
            return TABLE[op].call(*numbers, **attrs)

        constant = not any(isinstance(x, str) for x in inputs)
        samples = [scalar_sample(self.values[x].dtype) if isinstance(x, str) else x for x in inputs]
        try:
            result = scalar_call(call, samples)
        except (RuntimeError, TypeError, KeyError, AttributeError) as error:
            raise DefinitionError(
                f"{op} of scalars means nothing",
                where=[source.quote()] if source else (),
                because=f"torch says: {str(error).splitlines()[0]}",
                hint=f"numbers and arguments that torch takes for {op}",
            ) from error
        handle = self._add(
            assigned_name() or "s",
            shape=(),
            dtype=_SCALAR_DTYPES[type(result)],
            kind="scalar",
            constant=result if constant else None,
        )
        if not constant:
            settings = _settings(attrs)
            self._exprs.append(
                Expr(op=op, inputs=inputs, output=handle.name, attrs=settings, source=source)
            )
        return handle

    def place(
        self,
        handle: Handle,
        mesh: DeviceMesh | Layout,
        placements: Mapping[str, Placement] | None,
        order: Mapping[int, Sequence[str]] | None,
        stream: Stream | None,
    ) -> None:
        """State a value's layout; see `Handle.on`."""
        self._check_open()
        where = self.fusion_where()
        value = handle.value
        layout = self._layout(handle, mesh, placements, order, stream, where)
        if not value.is_tensor:
            raise LayoutError(
                f"%{handle.name} is placed, but it is a scalar",
                where=where,
                because="every rank has every scalar",
                hint="leave .on() out",
            )
        if value.layout is not None:
            raise self._contradiction(handle, layout, where)
        if handle.name in self._used:
            used = self._used[handle.name]
            raise LayoutError(
                f"%{handle.name} is placed after its first use",
                where=[*where, f"used at {used.quote()}" if used else ""],
                because="a law is stated before the value is used",
                hint="write .on(...) where the value is defined",
            )
        self.values[handle.name] = replace(value, layout=layout, is_law=True)
        self._stated[handle.name] = user_source()
        name = assigned_name()
        if name and handle.name.rstrip("_0123456789") in ("t", "in"):
            self._rename(handle, name)

    def _layout(
        self,
        handle: Handle,
        mesh: DeviceMesh | Layout,
        placements: Mapping[str, Placement] | None,
        order: Mapping[int, Sequence[str]] | None,
        stream: Stream | None,
        where: list[str],
    ) -> Layout:
        value = handle.value
        if not isinstance(mesh, Layout):
            mesh = mesh if isinstance(mesh, DeviceMesh) else DeviceMesh(mesh)
            layout = Layout(mesh, placements, order, stream)
        elif placements or order or stream:
            raise LayoutError(
                f"%{handle.name}: a Layout and placements at once",
                where=where,
                hint=".on(layout), or .on(mesh, {axis: placement})",
            )
        else:
            layout = mesh
        try:
            layout = layout.normalized(len(value.shape))
            for placement in layout.placements:
                if isinstance(placement, Partial):
                    check_reduce_op(placement.op, value.dtype)
        except (LayoutError, CommunicationError) as error:
            raise LayoutError(
                f"%{handle.name}: {error.what}", where=where, because=error.because, hint=error.hint
            ) from error
        return layout

    def _contradiction(self, handle: Handle, layout: Layout, where: list[str]) -> LayoutError:
        first = self._stated.get(handle.name)
        return LayoutError(
            f"%{handle.name} is laid out as {layout}, but its law says {handle.value.layout}",
            where=[*where, f"stated at {first.quote()}" if first else ""],
            because="a value has one layout; the second .on() contradicts the first",
            hint=f"reshard with a set: fd.ops.set({handle.name}).on(...)",
        )

    def _rename(self, handle: Handle, name: str) -> None:
        """Give a value the name of the variable it is assigned to, once that is known."""
        new = fresh_name(self.values, name)
        old, handle.name = handle.name, new
        self.values = {
            (new if k == old else k): (replace(v, name=new) if k == old else v)
            for k, v in self.values.items()
        }
        self._exprs = [replace(e, output=new) if e.output == old else e for e in self._exprs]
        self._stated[new] = self._stated.pop(old)
        self.values, self._exprs = self._symbols.rename(old, new, self.values, self._exprs)

    def _operand(self, x: Any, op: str, source: Source | None) -> Operand:
        if isinstance(x, Handle):
            if x.definition is not self:
                raise DefinitionError(
                    f"%{x.name} belongs to @{x.definition.name}, not to @{self.name}",
                    where=[source.quote()] if source else (),
                    because="a fusion computes with its own values only",
                    hint="define the value in this fusion as well",
                )
            return x.constant if x.constant is not None else x.name
        if x is None or isinstance(x, bool | int | float | Extent):
            return x
        raise DefinitionError(
            f"{op}: {type(x).__name__} is no operand",
            where=[source.quote()] if source else (),
            because="operands are values of the definition and numbers",
            hint="make it an input with fd.define_tensor",
        )

    def _add(
        self,
        name: str,
        *,
        constant: float | int | bool | None = None,
        source: Source | None = None,
        **fields: Any,
    ) -> Handle:
        name = fresh_name(self.values, name)
        source = source or user_source()
        self.values[name] = Value(name=name, source=source, **fields)
        handle = Handle(self, name, self._handles, constant)
        self._handles += 1
        return handle


def _extents(shape: Sequence[int], where: list[str]) -> tuple[int, ...]:
    extents = tuple(shape) if isinstance(shape, Sequence) else ("not a sequence",)
    if not all(type(n) is Extent or _is_extent(n) for n in extents):
        raise DefinitionError(
            f"shape {shape!r}",
            where=where,
            because="a shape is a list of integers of at least 0, or -1 for a symbolic extent",
            hint="for example [8, 16], or [-1, 16]",
        )
    return extents


def _is_extent(n: Any) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and n >= -1


def _check_name(name: str | None) -> None:
    if name is not None and not re.fullmatch(r"[\w.]+", name):
        raise DefinitionError(
            f"name={name!r}",
            because="programs print and parse it as one word",
            hint="letters, digits, _ and .",
        )


def _settings(attrs: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Attributes as expressions hold them: hashable; None and False are left out."""
    said = ((k, v) for k, v in attrs.items() if v is not None and v is not False)
    return tuple((k, _frozen(v)) for k, v in said)


def _frozen(x: Any) -> Any:
    return tuple(map(_frozen, x)) if isinstance(x, list | tuple) else x
