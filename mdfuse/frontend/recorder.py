"""Make the fusion of a definition, call by call: names, values, expressions, and their checks."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from mdfuse.errors import DefinitionError, Source, counted
from mdfuse.extents.assumptions import Assumptions, assuming
from mdfuse.extents.extent import Extent, pinned
from mdfuse.frontend import gradients, ragged_operands
from mdfuse.frontend import sharding_constraints as constraints
from mdfuse.frontend.argument_kinds import kind_of, no_value
from mdfuse.frontend.cache import Fact, Recorded, Symbolic
from mdfuse.frontend.handle import ValueId
from mdfuse.frontend.plain import brief, is_in_range, plain_number
from mdfuse.frontend.recomputed_values import RecomputedValues
from mdfuse.frontend.settings import check_setting, settings_of
from mdfuse.frontend.sites import Derived, Site
from mdfuse.frontend.stride_order import dims_of, no_permutation, stride_order_of
from mdfuse.frontend.symbols import Symbols
from mdfuse.ir.graph import DTYPE_NAMES, Expr, Fusion, Like, Names, Operand, Value, value_text
from mdfuse.ir.infer import inferred, scalar_sample
from mdfuse.ir.ops import TABLE
from mdfuse.ir.scalars import as_number, scalar_call
from mdfuse.layouts.layout import Layout
from mdfuse.layouts.stream import Stream
from mdfuse.mesh import DeviceMesh

_SCALAR_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64}


class Recorder:
    """The part of a definition's fusion that is recorded so far.

    Each public method records one call: it takes the site of the user's call and the arguments, and
    returns the fact of the new value. A call that raises changes nothing.

    Attributes:
        assumed: guards on extents from the calls.
    """

    def __init__(self, name: str, decided: Assumptions) -> None:
        self.name = name
        self.assumed = Assumptions()
        self.values: dict[str, Value] = {}
        self.names: list[str] = []  # of the values, by id
        self._constants: dict[int, float | int | bool] = {}
        self._exprs: list[Expr] = []
        self.recomputed = RecomputedValues()
        self._made_by: dict[int, int] = {}  # id of a value -> the number of its expression
        self._inputs: list[int] = []
        self._outputs: list[int] = []
        self._fresh = Names()
        self._reuse: dict[int, int] = {}
        self._used: dict[str, Source | None] = {}
        self._stated: dict[str, Source | None] = {}
        self._symbols = Symbols(decided, self.assumed)

    @property
    def symbols(self) -> Symbolic | None:
        """The symbolic extents so far; None where there are none."""
        return self._symbols.now

    def fusion(self) -> Fusion:
        """The fusion so far."""
        return Fusion(
            name=self.name,
            values=dict(self.values),
            exprs=tuple(self._exprs),
            inputs=tuple(self.names[i] for i in self._inputs),
            outputs=tuple(self.names[i] for i in self._outputs),
            reuse={self.names[i]: self.names[j] for i, j in self._reuse.items()},
            ids={name: i for i, name in enumerate(self.names)},
        )

    @property
    def exprs(self) -> tuple[Expr, ...]:
        """The expressions so far."""
        return tuple(self._exprs)

    def call(self, call: Recorded, site: Site) -> Any:
        """Record a call: one of the methods that follow."""
        with assuming(self.assumed):
            return getattr(self, call.method)(site, *call.arguments)

    # -- calls -----------------------------------------------------------------------------------

    def tensor(
        self,
        site: Site,
        shape: Sequence[int],
        dtype: torch.dtype,
        order: Sequence[int] | None,
        place: tuple[Any, ...] | None,
    ) -> Fact:
        """Record an input; see `FusionDefinition.define_tensor`."""
        extents = self._symbols.current(_extents(shape, site.where))
        if not isinstance(dtype, torch.dtype):
            raise DefinitionError(
                f"dtype={brief(dtype)}", where=site.where, hint="a torch dtype: torch.float32"
            )
        dims = tuple(range(len(extents)))
        if order is not None:
            permutation = dims_of(order, len(dims))
            if permutation is None:
                raise no_permutation(
                    order, len(dims), f"a tensor of {counted(len(dims), 'dim')}", site.where
                )
            dims = permutation
        name = self._fresh.fresh(self.values, self._symbols.unused(site.name or "in"))
        if any(type(n) is int and n == -1 for n in extents):
            extents = self._symbols.symbolic_shape(name, extents)
        layout = None if place is None else constraints.layout(name, extents, dtype, site, *place)
        if layout is not None:
            self._stated[name] = site.source
        self._inputs.append(len(self.names))
        is_law = layout is not None
        fields = {"shape": extents, "dtype": dtype, "order": dims, "is_law": is_law}
        return self._add(name, site.source, layout=layout, **fields)

    def scalar(self, site: Site, value: float | int | bool | None, dtype: Any) -> Fact:
        """Record a number; see `FusionDefinition.define_scalar`."""
        value = pinned(value) if isinstance(value, Extent) else plain_number(value)
        said: Any = (float if value is None else type(value)) if dtype is None else dtype
        kind: Any = next((k for t, k in _SCALAR_DTYPES.items() if t is said), said)
        is_kind = isinstance(kind, torch.dtype) and kind in DTYPE_NAMES and is_in_range(value)
        if not is_kind or (value is not None and as_number(value, kind) is None):
            raise DefinitionError(
                f"define_scalar(value={brief(value)}, dtype={brief(dtype)})",
                where=site.where,
                because="a scalar is a bool, an int or a float, and its dtype is of that kind",
                hint="define_scalar(2.0), or define_scalar(dtype=int) for an input of each run",
            )
        value = None if value is None else as_number(value, kind)
        if value is None:
            self._inputs.append(len(self.names))
        return self._add_scalar(site, kind, value)

    def op(
        self, site: Site | Derived, op: str, operands: Sequence[Any], attrs: Mapping[str, Any]
    ) -> Fact | tuple[Fact, ...]:
        """Record an expression; return a fact, or one per result if there are several."""
        for key, setting in attrs.items():
            check_setting(op, key, setting, site)
        inputs = tuple([self._operand(x, op, site) for x in operands])
        given = self._symbols.current((inputs, attrs))
        op, inputs, attrs = ragged_operands.fitted(self, site, op, given)
        names = [x for x in inputs if isinstance(x, str)]
        kinds = [self.values[n].kind for n in names]
        if "tensor" not in kinds and not TABLE[op].is_creation:
            return self._scalar_op(site, op, inputs, attrs)
        results = self._inferred(op, inputs, attrs, site.source)
        for name in names:
            self._used.setdefault(name, site.source)
        self.recomputed.read(operands)
        settings = settings_of(self._symbols.current(attrs))
        if len(results) == 1:
            return self._expr(site, op, inputs, settings, (site.name,), results)[0]
        return self._expr(site, op, inputs, settings, site.names(len(results)), results)

    def grad(self, site: Site, of: int, wrt: Sequence[int], seed: int | None) -> gradients.Made:
        """Record the expressions of a gradient; see `mdfuse.grad`."""
        names, exprs, used = len(self.names), list(self._exprs), dict(self._used)
        try:
            return gradients.append(self, site, {of: seed}, wrt)
        except BaseException:
            for name in self.names[names:]:
                self._fresh.free(name)
                del self.values[name]
            for i in range(names, len(self.names)):
                self._made_by.pop(i, None)
            del self.names[names:]
            self._exprs, self._used = exprs, used
            raise

    def recompute(self, site: Site, begins: bool | str | None) -> None:
        """Begin a block of values that gradients compute again, go on with one, or end it."""
        self.recomputed.begin(begins)

    def region(self, _: Site, name: str | None) -> None:
        """Enter a region, or leave it; see `RecomputedValues`."""
        self.recomputed.enter(name)

    def place(
        self,
        site: Site,
        of: int,
        mesh: DeviceMesh | Layout,
        placements: constraints.Pairs | None,
        order: tuple[tuple[int, tuple[str, ...]], ...],
        stream: Stream | None,
    ) -> None:
        """State a value's layout; see `Handle.on`."""
        name = self.names[of]
        value = self.values[name]
        layout = constraints.of_value(value, site, mesh, placements, order, stream)
        self._check_unplaced(value, f"is laid out as {layout}", site)
        self.values[name] = replace(value, layout=layout, is_law=True)
        self._note_place(of, site)

    def place_like(self, site: Site, of: int, other: int, but: constraints.Pairs) -> None:
        """Give a value the layout of another one, but along some axes; see `Handle.on`."""
        name, referee = self.names[of], self.names[other]
        value, shown = self.values[name], self.values[referee]
        self._check_unplaced(value, f"lies as %{referee}", site)
        constraints.check_referee(value, shown, site)
        like = Like(referee, but=constraints.counted_from_0(value, but, site))
        self.values[name] = replace(value, like=like)
        self._used.setdefault(referee, site.source)
        self._note_place(of, site)

    def _check_unplaced(self, value: Value, law: str, site: Site) -> None:
        """Raise LayoutError for a scalar, a second law, or one that comes after the first use."""
        constraints.check_unplaced(value, law, site, self._stated.get(value.name))
        if value.name in self._used:
            raise constraints.too_late(value.name, site, self._used[value.name])

    def _note_place(self, of: int, site: Site) -> None:
        """Note the line that placed a value; the value takes the name of the assigned variable."""
        name = self.names[of]
        self._stated[name] = site.source
        if site.name and name.rstrip("_0123456789") in ("t", "in"):
            self._rename(of, site.name)

    def output(self, site: Site, of: int, reuse: int | None) -> None:
        """Record an output of the program; see `FusionDefinition.add_output`."""
        name = self.names[of]
        if not self.values[name].is_tensor:
            raise DefinitionError(
                f"%{name} is a scalar", where=site.where, hint="outputs are tensors"
            )
        if of in self._outputs:
            raise DefinitionError(
                f"%{name} is an output already",
                where=site.where,
                because="an output does not alias another output",
                hint="use the first output twice, or copy it: t * 1",
            )
        if reuse is not None:
            self._check_reuse(of, reuse, site)
        self._check_kept(of, reuse, site)
        self.recomputed.read((ValueId(of),))
        if reuse is not None:
            self._reuse[of] = reuse
        self._outputs.append(of)

    # -- steps of a call -------------------------------------------------------------------------

    def _check_reuse(self, of: int, reuse: int, site: Site) -> None:
        name, other = self.names[of], self.names[reuse]
        result, buffer = self.values[name], self.values[other]
        if reuse not in self._inputs or not buffer.is_tensor:
            raise DefinitionError(
                f"reuse={value_text(buffer)} is not an input tensor of @{self.name}",
                where=site.where,
                hint="pass what define_tensor returned",
            )
        if (result.shape, result.dtype) != (buffer.shape, buffer.dtype):
            raise DefinitionError(
                f"%{name}: {result.type_text()} cannot be written into "
                f"%{other}: {buffer.type_text()}",
                where=site.where,
                because="the result takes the place of the input's elements",
                hint="leave reuse= out, or cast or reshape the result",
            )
        if result.is_order_required and result.order != buffer.order:
            raise DefinitionError(
                f"%{name} has a required memory order that is not the one of %{other}",
                where=site.where,
                because=f"the result takes the place of the elements of %{other}, which lie in the "
                "order that its definition declares",
                hint=f"define %{other} with that stride_order, or leave reuse= out",
            )
        if reuse in self._reuse.values():
            raise DefinitionError(
                f"%{other} is reused twice",
                where=site.where,
                because="one buffer holds one result",
                hint="leave reuse= out for one of them",
            )

    def _check_kept(self, of: int, reuse: int | None, site: Site) -> None:
        """Refuse an input that is both returned itself and overwritten."""
        overwritten = {*self._reuse, *self._reuse.values()}
        if reuse is not None:
            overwritten |= {of, reuse}
        returned = [i for i in (of, reuse) if i in self._inputs and i in (of, *self._outputs)]
        wrong = [self.names[i] for i in returned if i in overwritten]
        if wrong:
            raise DefinitionError(
                f"%{wrong[0]} is an input and an output, and reuse= is said of it",
                where=site.where,
                because="an input that is returned is the caller's tensor itself: it lies in no "
                "other one's place, and has no old value once it is written",
                hint=f"return a copy of it: fd.ops.set({wrong[0]})",
            )

    def _inferred(
        self, op: str, inputs: tuple[Operand, ...], attrs: Mapping[str, Any], source: Source | None
    ) -> tuple[dict[str, Any], ...]:
        """Infer an operation's results; if it refuses the examples of symbols, try others."""
        row, symbols = TABLE[op], self._symbols
        attrs = dict(attrs)
        if not symbols.examples:
            return inferred(row, inputs, attrs, self.values, source)
        # Guards of inference are taken at lowering, which infers again. They must not apply here,
        # because a definition's extents hold for all values of the symbols.
        with assuming(None):
            try:
                return inferred(row, inputs, attrs, self.values, source)
            except DefinitionError:
                outputs = ("",) * row.results
                expr = Expr(op=op, inputs=inputs, outputs=outputs, attrs=settings_of(attrs))
                unified = symbols.unified(self.values, self._exprs, expr)
                if unified is None:
                    raise
            self.values, self._exprs = unified
            inputs, attrs = symbols.current((inputs, attrs))
            return inferred(row, inputs, attrs, self.values, source)

    def _expr(
        self,
        site: Site | Derived,
        op: str,
        inputs: tuple[Operand, ...],
        settings: tuple[tuple[str, Any], ...],
        said: Sequence[str | None],
        results: Sequence[Mapping[str, Any]],
    ) -> tuple[Fact, ...]:
        """Append an expression and its results, named as said."""
        number, facts, outputs = len(self._exprs), [], []
        for name, fields in zip(said, results, strict=True):
            self._made_by[len(self.names)] = number
            outputs.append(self._fresh.fresh(self.values, name or "t"))
            facts.append(self._add(outputs[-1], site.source, **fields))
        expr = Expr(
            op=op, inputs=inputs, outputs=tuple(outputs), attrs=settings, source=site.source
        )
        self._exprs.append(expr)
        return tuple(facts)

    def _scalar_op(
        self, site: Site | Derived, op: str, inputs: tuple[Operand, ...], attrs: Mapping[str, Any]
    ) -> Fact:
        inputs = tuple(pinned(x) if isinstance(x, Extent) else x for x in inputs)

        def call(*numbers: Any) -> Any:
            return TABLE[op].call(*numbers, **attrs)

        constant = not any(isinstance(x, str) for x in inputs)
        samples = [scalar_sample(self.values[x].dtype) if isinstance(x, str) else x for x in inputs]
        try:
            result = scalar_call(call, samples)
            if type(result) not in _SCALAR_DTYPES:
                raise TypeError(f"the result is {result}, and no number of a run is complex")
        except (RuntimeError, TypeError, LookupError, AttributeError) as error:
            raise DefinitionError(
                f"{op} of scalars means nothing",
                where=site.where,
                because=f"of such numbers: {str(error).splitlines()[0]}",
                hint=f"numbers and arguments that torch takes for {op}",
            ) from error
        fact = self._add_scalar(site, _SCALAR_DTYPES[type(result)], result if constant else None)
        if not constant:
            settings, name = settings_of(attrs), self.names[-1]
            self._made_by[len(self.names) - 1] = len(self._exprs)
            self._exprs.append(
                Expr(op=op, inputs=inputs, outputs=(name,), attrs=settings, source=site.source)
            )
        return fact

    def current(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return a shape with the names and examples that symbols have now."""
        return self._symbols.current(shape)

    def is_placed(self, name: str) -> bool:
        """Return whether a value is an input, or has a law."""
        value = self.values[name]
        is_input = any(self.names[i] == name for i in self._inputs)
        return is_input or value.layout is not None or value.like is not None

    def is_used(self, name: str) -> bool:
        """Return whether something reads a value."""
        return name in self._used

    def keep_sums(self, of: Container[str]) -> None:
        """Add the log-sum-exp output to an attention expression whose gradient reads it."""
        for at, expr in enumerate(self._exprs):
            if expr.op != "scaled_dot_product_attention" or expr.output not in of:
                continue
            _, sums = self._inferred("attention", expr.inputs, expr.kwargs, expr.source)
            name = self._fresh.fresh(self.values, f"{expr.output}.sums")
            self._made_by[len(self.names)] = at
            self._add(name, expr.source, **sums)
            self._exprs[at] = replace(expr, op="attention", outputs=(expr.output, name))

    def rename(self, names: Mapping[int, str]) -> None:
        """Rename values that nothing reads yet; names may get a suffix."""
        new = {self.names[i]: self._fresh.fresh(self.values, name) for i, name in names.items()}
        for i in names:
            old = self.names[i]
            self.names[i] = new[old]
            expr = self._exprs[self._made_by[i]]
            outputs = tuple(new[x] if x == old else x for x in expr.outputs)
            self._exprs[self._made_by[i]] = replace(expr, outputs=outputs)
        if new:
            self.values = {
                new.get(n, n): replace(v, name=new[n]) if n in new else v
                for n, v in self.values.items()
            }
        for old in new:
            self._fresh.free(old)

    def _rename(self, of: int, name: str) -> None:
        """Rename a value to the variable that it is assigned to."""
        new = self._fresh.fresh(self.values, name)
        old, self.names[of] = self.names[of], new
        self._fresh.free(old)
        value = replace(self.values[old], name=new)
        if next(reversed(self.values)) == old:  # usual case: the previous call made it
            del self.values[old]
            self.values[new] = value
        else:
            self.values = {
                (new if k == old else k): (value if k == old else v) for k, v in self.values.items()
            }
        if of in self._made_by:
            n = self._made_by[of]
            outputs = tuple(new if name == old else name for name in self._exprs[n].outputs)
            self._exprs[n] = replace(self._exprs[n], outputs=outputs)
        self._stated[new] = self._stated.pop(old)
        self.values, self._exprs = self._symbols.rename(old, new, self.values, self._exprs)

    def _operand(self, x: Any, op: str, site: Site | Derived) -> Operand:
        if isinstance(x, ValueId):
            return self._constants.get(x, self.names[x])
        x = plain_number(x)
        if x is None or (isinstance(x, bool | int | float | Extent) and is_in_range(x)):
            return x
        raise no_value(op, x, site.where)

    def _add_scalar(self, site: Site | Derived, dtype: torch.dtype, constant: Any) -> Fact:
        if constant is not None:
            self._constants[len(self.names)] = constant
        name = self._fresh.fresh(self.values, site.name or "s")
        fact = self._add(name, site.source, shape=(), dtype=dtype, kind="scalar")
        return replace(fact, constant=constant)

    def _add(self, name: str, source: Source | None, **fields: Any) -> Fact:
        value = Value(name=name, source=source, **fields)
        self.values[name] = value
        if self.recomputed.open and value.is_tensor and len(self.names) in self._made_by:
            self.recomputed.note(len(self.names))  # an input exists already
        self.names.append(name)
        required = stride_order_of(value.order) if value.is_order_required else None
        return Fact(value.shape, value.dtype, value.is_tensor, required=required)


def _extents(shape: Sequence[int], where: list[str]) -> tuple[int, ...]:
    given = kind_of("Integers").take(shape)
    extents = given if isinstance(given, list | tuple) else ("not a sequence",)
    if not all(type(n) is Extent or _is_extent(n) for n in extents):
        raise DefinitionError(
            f"shape {brief(shape)}",
            where=where,
            because="a shape is a list of integers of at least 0, or -1 for a symbolic extent",
            hint="for example [8, 16], or [-1, 16]",
        )
    if math.prod(n for n in extents if type(n) is int and n > 0) >= _MANY:
        raise DefinitionError(
            f"shape {brief(shape)}",
            where=where,
            because=f"a tensor has fewer than 2**{_MANY.bit_length() - 1} elements",
            hint="smaller extents",
        )
    return tuple(extents)


#: Elements of at most 8 bytes, whose bytes are counted in 64 bits.
_MANY = 1 << 59


def _is_extent(n: Any) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and n >= -1


def replay(
    name: str, decided: Assumptions, calls: Sequence[Recorded | None], sites: Sequence[Site]
) -> Recorder:
    """Return a recorder of calls, each from its line."""
    recorder = Recorder(name, decided)
    for call, site in zip(calls, sites, strict=True):
        assert call is not None
        recorder.call(call, site)
    return recorder
