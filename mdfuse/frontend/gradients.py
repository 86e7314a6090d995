"""Gradients: append to a definition the expressions that compute them.

Reverse mode: the definition's expressions are visited from the last to the first. Each passes the
cotangent of its result on to its operands by the rule of its op (`vjps.py`); cotangents from
several readers are added. Layouts of the backward are inferred as all others are, except for two
laws by reference: the gradient of an input, or of a value with a law, has its layout; a cotangent
that goes back through a `set` has the layout of the set's operand.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mdfuse.errors import BACKWARD, RECOMPUTED, DefinitionError, Source
from mdfuse.extents.extent import are_same
from mdfuse.frontend.cache import Fact
from mdfuse.frontend.handle import Handle, ValueId
from mdfuse.frontend.ops import recording
from mdfuse.frontend.ragged_operands import masked
from mdfuse.frontend.sites import Derived, Site
from mdfuse.frontend.vjps import COMPLEX, NO_GRADIENT, RULES, STEPS
from mdfuse.frontend.vjps.slice_cotangents import Part, Window, joined
from mdfuse.ir.again import Recomputation
from mdfuse.ir.graph import Expr, Like, Operand, Value
from mdfuse.layouts.layout import Shard

if TYPE_CHECKING:
    from mdfuse.frontend.recorder import Recorder

#: The gradients of a call of `grad`: (id, fact) of each.
Made = tuple[tuple[int, Fact], ...]


def append(
    recorder: Recorder, site: Site, of: Mapping[int, int | None], wrt: Sequence[int]
) -> Made:
    """Append the expressions that compute the gradients of values; see `mdfuse.grad`.

    Args:
        recorder: of the calls so far.
        site: the user's call.
        of: id of each value -> id of its cotangent; None: one.
        wrt: ids of the values with respect to which they are differentiated.

    Raises:
        DefinitionError: one of the values has no gradient; there is no rule for an op between them;
            the call stands inside of `recompute`.
    """
    for y, seed in of.items():
        _check(recorder, site, y, wrt, seed)
    names = recorder.names
    path = _path(recorder, [names[y] for y in of], [names[x] for x in wrt])
    recorder.keep_sums(path)
    return _Backward(recorder, site, of, wrt, path).run()


def _path(recorder: Recorder, of: Sequence[str], wrt: Sequence[str]) -> set[str]:
    """Return the values on paths from the values of wrt to those differentiated."""
    values, after = recorder.values, {*wrt}
    for expr in recorder.exprs:
        if expr.op in NO_GRADIENT or after.isdisjoint(expr.reads):
            continue
        outputs = [values[name] for name in expr.outputs]
        after.update(x.name for x in outputs if x.is_tensor and _is_differentiable(x))
    before = {*of} & after
    for expr in reversed(recorder.exprs):
        if not before.isdisjoint(expr.outputs):
            before.update(x for x in expr.reads if x in after)
    return before


def _leading(recorder: Recorder, of: Sequence[str]) -> set[str]:
    """Return the ancestors of some values to which torch gives a gradient, even of zeros."""
    values, leading = recorder.values, {*of}
    for expr in reversed(recorder.exprs):
        is_passed = expr.op not in NO_GRADIENT or expr.op in STEPS
        if is_passed and not leading.isdisjoint(expr.outputs):
            read = (values[x] for x in expr.reads)
            leading.update(x.name for x in read if x.is_tensor and _is_differentiable(x))
    return leading


def _check(recorder: Recorder, site: Site, of: int, wrt: Sequence[int], seed: int | None) -> None:
    y = recorder.values[recorder.names[of]]
    for i in (of, *wrt, *(() if seed is None else (seed,))):
        value = recorder.values[recorder.names[i]]
        if not value.is_tensor or not value.dtype.is_floating_point:
            what = value.type_text() if value.is_tensor else "a scalar"
            raise DefinitionError(
                f"grad of %{y.name}" + (f" with %{value.name}" if i != of else "") + f": {what}",
                where=site.where,
                because="gradients are those of floating-point tensors",
                hint="cast it before, or leave it out of the list",
            )
    if seed is None and y.shape:
        raise DefinitionError(
            f"grad of %{y.name}: {y.type_text()}, without a seed",
            where=site.where,
            because="the gradient is that of one number",
            hint=f"grad(%{y.name}.mean(), ...), or seed= with the cotangent of %{y.name}",
        )
    if seed is not None:
        ct = recorder.values[recorder.names[seed]]
        if ct.dtype != y.dtype or not _are_alike(ct.shape, y.shape):
            raise DefinitionError(
                f"grad of %{y.name}: {y.type_text()} with the seed %{ct.name}: {ct.type_text()}",
                where=site.where,
                because="each element of the seed belongs to one of the value",
                hint=f"a seed of {y.type_text()}",
            )
    if recorder.recomputed.open:
        raise DefinitionError(
            f"grad of %{y.name} inside of recompute()",
            where=site.where,
            because="what is defined inside is computed again for a gradient that comes later",
            hint="end the block before",
        )


def _are_alike(a: Sequence[int], b: Sequence[int]) -> bool:
    return len(a) == len(b) and all(are_same(n, m) or n == m for n, m in zip(a, b, strict=True))


class _Scribe:
    """Stands in for the definition while rules run: operations record into the recorder.

    Attributes:
        line: the origin that is noted for recorded expressions.
    """

    def __init__(self, recorder: Recorder, line: Derived) -> None:
        self.recorder = recorder
        self.line = line
        self.ids = {name: i for i, name in enumerate(recorder.names)}

    def record(
        self, op: str, operands: Sequence[Any], attrs: Mapping[str, Any] | None = None
    ) -> Any:
        ids = [ValueId(x.id) if isinstance(x, Handle) else x for x in operands]
        recorded = self.recorder.op(self.line, op, ids, attrs or {})
        if masked(self.recorder, op, ids, attrs or {}):
            last = ValueId(len(self.recorder.names) - 1)
            recorded = self.recorder.op(self.line, "mask_rows", (last,), {})
        names = self.recorder.names
        facts = (recorded,) if isinstance(recorded, Fact) else recorded
        first = len(names) - len(facts)
        self.ids.update({names[at]: at for at in range(first, len(names))})
        handles = [Handle(self, first + n, fact) for n, fact in enumerate(facts)]  # type: ignore[arg-type]
        return handles[0] if isinstance(recorded, Fact) else tuple(handles)

    #: an op with several results returns a tuple
    record_several = record

    def handle(self, name: str) -> Handle:
        value = self.recorder.values[name]
        fact = Fact(value.shape, value.dtype, value.is_tensor)
        return Handle(self, self.ids[name], fact)  # type: ignore[arg-type]

    def value_of(self, at: int) -> Value:
        return self.recorder.values[self.recorder.names[at]]

    def current(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return self.recorder.current(shape)

    def begin_recompute(self, begins: bool | str | None = True) -> None:
        """Do nothing: values of a gradient are kept for the next one."""

    def end_recompute(self) -> None:
        """Do nothing."""

    def fusion_where(self) -> list[str]:
        return self.line.where


class _Backward:
    """One call of `grad`."""

    def __init__(
        self,
        recorder: Recorder,
        site: Site,
        of: Mapping[int, int | None],
        wrt: Sequence[int],
        path: set[str],
    ) -> None:
        self.recorder = recorder
        self.site = site
        self.path = path
        self.exprs = recorder.exprs
        self.scribe = _Scribe(recorder, Derived(site.source))
        self.first = len(recorder.names)
        names = recorder.names
        self.of = {names[y]: None if seed is None else names[seed] for y, seed in of.items()}
        self.wrt = [recorder.names[i] for i in wrt]
        #: the cotangents of each value, from its last reader to its first
        self.parts: dict[str, list[Part]] = {}
        #: their sums, for visited values
        self.totals: dict[str, Handle] = {}
        #: `recompute` block -> what computes its values again
        self.again: dict[int, Recomputation] = {}

    def run(self) -> Made:
        path = self.path
        self._check_rules()
        token = recording.current.set(self.scribe)  # type: ignore[arg-type]
        try:
            for name, seed in self.of.items():
                if name in path or name in self.wrt:
                    self.parts[name] = [self._seed(name, seed)]
            for expr in reversed(self.exprs):
                if any(x in path and x in self.parts for x in expr.outputs):
                    self._pass_on(expr)
            return self._gradients()
        finally:
            recording.current.reset(token)

    def _seed(self, of: str, seed: str | None) -> Handle:
        if seed is not None:
            return self.scribe.handle(seed)
        y = self.scribe.handle(of)
        one: Handle = self.scribe.record("full_like", (y, 1), {"dtype": y.dtype})
        return one

    # -- selection -------------------------------------------------------------------------------

    def _check_rules(self) -> None:
        path = self.path
        for expr in self.exprs:
            passed = path.intersection(expr.outputs)
            if not passed or path.isdisjoint(expr.reads):
                continue
            values = [self.recorder.values[x] for x in (*expr.reads, *expr.outputs) if x in path]
            if expr.op not in COMPLEX and any(x.dtype.is_complex for x in values):
                raise DefinitionError(
                    f"%{min(passed)} = {expr.op}(...) of complex numbers has no gradient",
                    where=[*self.site.where, expr.source.quote() if expr.source else ""],
                    because=f"the rule for {expr.op} is one for real numbers",
                    hint="compute it of real and imaginary parts: view_as_real",
                )
            if expr.op not in RULES:
                raise DefinitionError(
                    f"%{min(passed)} = {expr.op}(...) has no gradient",
                    where=[*self.site.where, expr.source.quote() if expr.source else ""],
                    because=f"there is no rule for {expr.op}",
                    hint="detach what it reads, or compute it by other operations",
                )

    # -- backward --------------------------------------------------------------------------------

    def _pass_on(self, expr: Expr) -> None:
        """Hand the cotangent of an expression's result on to its operands."""
        applied = _Expression(self, expr)
        if not any(map(applied.wants, range(applied.count))):
            return
        self.scribe.line = Derived(_backward(expr.source))
        cts = [self._total(x) if x in self.parts else None for x in expr.outputs]
        cotangents = RULES[expr.op](applied, cts[0] if len(cts) == 1 else cts)
        for x, part in zip(expr.inputs, cotangents, strict=True):
            if part is not None and isinstance(x, str) and x in self.path:
                if not isinstance(part, Window):  # a Window has the operand's shape and dtype
                    part = self._fitted(part, self.recorder.values[x])
                self.parts.setdefault(x, []).append(part)

    def _total(self, name: str) -> Handle:
        """Return the sum of a value's cotangents, in the order of its readers."""
        if name not in self.totals:
            total, *others = joined(self.parts[name][::-1])
            for part in others:
                total = total + part
            self.totals[name] = total
        return self.totals[name]

    def _fitted(self, part: Handle, x: Value) -> Handle:
        """Return a cotangent in the operand's shape and dtype, summed over broadcast dims."""
        skip = part.ndim - len(x.shape)
        new = tuple(range(skip))
        repeated = tuple(
            d for d, n in enumerate(part.shape) if d >= skip and _grows(x.shape[d - skip], n)
        )
        if new or repeated:
            is_mixed = bool(new) and bool(repeated)
            part = self.scribe.record(
                "sum",
                (part,),
                {"dims": (*new, *repeated), "keepdim": bool(repeated), "dtype": None},
            )
            part = self.scribe.record("squeeze", (part,), {"dims": new}) if is_mixed else part
        if part.dtype.is_complex and not x.dtype.is_complex:
            part = self.scribe.record("real", (part,))
        if part.dtype != x.dtype:
            part = self.scribe.record("cast", (part,), {"dtype": x.dtype})
        return part

    def again_of(self, name: str) -> str:
        """Return a value as the backward reads it: recomputed if it is in a `recompute` block."""
        block, line = self._block(name), self.scribe.line
        if block is None:
            return name
        if block not in self.again:
            made_by = {x: e for x, e in self._in_blocks[block] if self._block(x) == block}
            self.again[block] = Recomputation(made_by, self._record_again)
        new = str(self.again[block](name))
        self.scribe.line = line
        return new

    @cached_property
    def _in_blocks(self) -> dict[int | None, list[tuple[str, Expr]]]:
        """Block -> the values that were ever in it, with their expressions."""
        blocks = defaultdict[int | None, list[tuple[str, Expr]]](list)
        for e in self.exprs:
            for x in e.outputs:
                blocks[self._block(x)].append((x, e))
        return blocks

    def _block(self, name: str) -> int | None:
        """Return the `recompute` block that a value is defined in."""
        return self.recorder.recomputed.block(self.scribe.ids[name])

    def _record_again(self, expr: Expr, inputs: Sequence[Operand]) -> list[str]:
        """Record an expression of a block anew, with the laws of its results."""
        self.scribe.line = Derived(_noted(expr.source, RECOMPUTED))
        operands = [self.scribe.handle(x) if isinstance(x, str) else x for x in inputs]
        recomputed = self.scribe.record(expr.op, operands, expr.kwargs)
        values, names = self.recorder.values, list[str]()
        results = [recomputed] if len(expr.outputs) == 1 else recomputed
        for old, new in zip(map(values.__getitem__, expr.outputs), results, strict=True):
            law = {"layout": old.layout, "is_law": old.is_law, "like": old.like}
            values[new.name] = replace(values[new.name], **law)  # type: ignore[arg-type]
            names.append(new.name)
        return names

    def returned(self, ct: Handle, expr: Expr) -> Handle:
        """Return the cotangent of a set's operand, with its layout; splits by name stay."""
        out = self.recorder.values[expr.output]
        if out.layout is None and out.like is None:
            return ct
        back: Handle = self.scribe.record("set", (ct,))
        splits = [x for x in out.like.but if isinstance(x[1], Shard)] if out.like else []
        self._place(back, Like(expr.reads[0], past=expr.output, but=tuple(splits)))
        return back

    def _place(self, x: Handle, like: Like) -> None:
        name = self.recorder.names[x.id]
        self.recorder.values[name] = replace(self.recorder.values[name], like=like)

    # -- results ---------------------------------------------------------------------------------

    def _gradients(self) -> Made:
        """Return the gradients, each a separate named value; those of inputs have a law."""
        names = self.site.names(len(self.wrt))
        wanted: dict[str, str] = {}
        for x, name in zip(self.wrt, names, strict=True):
            wanted.setdefault(x, name or f"{x}.grad")
        totals = {x: self._total(x) for x in wanted if x in self.parts}
        shared = Counter(total.id for total in totals.values())
        gradients: dict[str, Handle] = {}
        renamed: dict[int, str] = {}
        for x, name in wanted.items():
            self.scribe.line = Derived(self.site.source, name)
            if x not in totals:
                zeros = {"dtype": self.recorder.values[x].dtype}
                gradients[x] = self.scribe.record("full_like", (self.scribe.handle(x), 0), zeros)
            elif shared[totals[x].id] == 1 and self._is_free(totals[x], x):
                gradients[x] = totals[x]
                renamed[gradients[x].id] = name
            else:
                gradients[x] = self.scribe.record("set", (totals[x],))
            if self.recorder.is_placed(x):
                self._place(gradients[x], Like(x))
        self.recorder.rename(renamed)
        lacks = [x for x in wanted if x not in totals]
        leading = _leading(self.recorder, [*self.of]) if lacks else {*wanted}
        facts = {x: replace(y.fact, is_missing=x not in leading) for x, y in gradients.items()}
        return tuple((gradients[x].id, facts[x]) for x in self.wrt)

    def _is_free(self, total: Handle, of: str) -> bool:
        """Return whether a value is new, unread and without another layout."""
        name = self.recorder.names[total.id]
        like = self.recorder.values[name].like
        is_placed = like is not None and like.of != of
        return total.id >= self.first and not is_placed and not self.recorder.is_used(name)


class _Expression:
    """An expression, as a rule sees it (`vjps.Applied`)."""

    def __init__(self, backward: _Backward, expr: Expr) -> None:
        self.expr = expr
        self.attrs = expr.kwargs
        self.count = len(expr.inputs)
        self.is_square = expr.inputs[1:] == expr.inputs[:1]
        self._backward = backward

    @property
    def y(self) -> Handle:
        y: Handle = self[self.expr.output]
        return y

    @property
    def results(self) -> Sequence[Handle]:
        return [self[name] for name in self.expr.outputs]

    def __getitem__(self, key: int | str) -> Any:
        x = self.expr.inputs[key] if isinstance(key, int) else key
        if not isinstance(x, str):
            return x
        return self._backward.scribe.handle(self._backward.again_of(x))

    def wants(self, position: int) -> bool:
        x = self.expr.inputs[position]
        return isinstance(x, str) and x in self._backward.path

    def shape(self, position: int) -> tuple[int, ...]:
        x = self.expr.inputs[position]
        assert isinstance(x, str)
        return self._backward.recorder.values[x].shape

    def returned(self, ct: Handle) -> Handle:
        return self._backward.returned(ct, self.expr)


def _is_differentiable(x: Value) -> bool:
    return x.dtype.is_floating_point or x.dtype.is_complex


def _grows(before: int, after: int) -> bool:
    """Return whether an operand's dim is broadcast in the result; it avoids needless guards."""
    if are_same(before, after):
        return False
    return (type(before) is int and before == 1) or before != after


def _noted(source: Source | None, note: str) -> Source | None:
    return None if source is None else replace(source, note=note)


def _backward(source: Source | None) -> Source | None:
    return _noted(source, BACKWARD)
