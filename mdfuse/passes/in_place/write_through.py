"""Write into an input itself where a program writes into a view of it, and takes that back.

    %f = reshape(%c, shape=[8,4])                   %i0 = floor_divide(%at, 4)
    %w = index_copy(%at, %s, %f, along=0)    ->     %i1 = remainder(%at, 4)
    %n = reshape(%w, shape=[2,4,4])                 %n = index_put(%i0, %i1, %s, %c, dims=[0,1])
    return %n (into %c)                             return %n (into %c)

A write into a view is the write into what it shows, and the view of the result. Chains of views
that lead back to the whole vanish, and so does a slice that is put back where it was taken. So the
instruction can write into the buffer of the input; every reader of a part reads it there.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from mdfuse.ir.graph import Expr, Fusion, Value, leading_to
from mdfuse.passes.in_place.chains import ViewStep, are_alike, extended, starts_with, step_of
from mdfuse.passes.in_place.moved import WRITES, Appender, emitted, through, write_of
from mdfuse.passes.rewriting import Maker

name = "write_through"

Chain = tuple[ViewStep, ...]


def run(fusion: Fusion) -> Fusion:
    """Return the fusion with writes into inputs that outputs reuse, in the place of their views."""
    wanted = _writes_behind(fusion)
    if not wanted:
        return fusion
    pushed = _Pushed(fusion, wanted)
    for expr in fusion.exprs:
        pushed.add(expr)
    return pushed.result()


def _writes_behind(fusion: Fusion) -> set[str]:
    """Return the results of writes that lead to outputs which reuse inputs, through views alone."""
    names, writes, seen = [*fusion.reuse], set[str](), set[str]()
    while names:
        expr = fusion.producers.get(name := names.pop())
        if expr is None or name in seen:
            continue
        seen.add(name)
        if expr.op in WRITES:
            writes.add(name)
            names += expr.reads[-1:] if expr.op != "slice_scatter" else expr.reads
        elif step_of(expr, fusion.values) is not None:
            names += expr.reads
    return writes


@dataclass
class _Pushed:
    """The fusion under construction; it lives inside one call of `run`.

    Attributes:
        fusion: the one before.
        wanted: results of writes that lead to outputs.
        place: value -> (base, the views of the base that show it).
        prior: written value -> (what it is written over, the views through which it was written).
        instead: value -> the value that takes its place.
        known: emitted expressions; see `Appender`.
        shown: views of written values, which may be left out.
    """

    fusion: Fusion
    wanted: set[str]
    maker: Maker = field(init=False)
    place: dict[str, tuple[str, Chain]] = field(default_factory=dict)
    prior: dict[str, tuple[str, Chain]] = field(default_factory=dict)
    instead: dict[str, str] = field(default_factory=dict)
    known: dict[object, str] = field(default_factory=dict)
    shown: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.maker = Maker(dict(self.fusion.values))

    def add(self, expr: Expr) -> None:
        """Append an expression, or what takes its place."""
        expr = expr.reading(self.instead)
        if not (self._is_write_through(expr) or self._is_put_back(expr) or self._is_base(expr)):
            self.maker.exprs.append(expr)

    def _at(self, name: str) -> tuple[str, Chain]:
        return self.place.get(name, (name, ()))

    def _is_write_through(self, expr: Expr) -> bool:
        """Write into the base of a view instead, where an output wants it."""
        if expr.outputs[0] not in self.wanted:
            return False
        base, chain = self._at(expr.reads[-1])
        if not self._is_of_reused(base) or self.maker.values[expr.output].is_law:
            return False
        if expr.op == "slice_scatter" and self._at(expr.reads[0])[0] in self.prior:
            return False
        if not chain:
            self.prior[expr.output] = base, ()
            self.maker.exprs.append(replace(expr, inputs=(*expr.inputs[:-1], base)))
            return True
        emit = Appender(self.maker, expr, self.known)
        before = len(self.maker.exprs)
        write = write_of(expr, emit)
        for step in reversed(chain):
            moved = through(write, step, emit)
            if moved is None:
                del self.maker.exprs[before:]
                self.known.clear()
                return False
            write = moved
        new = emitted(write, base, emit)
        self.prior[new], self.place[expr.output] = (base, chain), (new, chain)
        self._show(expr, new, chain)
        return True

    def _is_put_back(self, expr: Expr) -> bool:
        """Take a slice that is written and put back where it was taken as the write into all."""
        if expr.op != "slice_scatter":
            return False
        (base, chain), (new, views) = map(self._at, reversed(expr.reads))
        kind = self.maker.values
        starts, steps = (expr.kwargs[k] for k in ("starts", "steps"))
        window = ViewStep(
            op="slice",
            before=kind[expr.reads[1]].shape,
            after=kind[expr.reads[0]].shape,
            starts=starts,
            steps=steps,
        )
        region = (*chain, window)
        if len(views) != len(region) or not all(map(are_alike, views, region)):
            return False
        if not self._lies_as(kind[expr.output], base):
            return False
        now = new
        while now != base:
            if now not in self.prior or not starts_with(self.prior[now][1], region):
                return False
            now = self.prior[now][0]
        self._stand_for(expr, new, chain)
        return True

    def _is_base(self, expr: Expr) -> bool:
        """Follow a view; one that shows the whole of its base is left out."""
        step = step_of(expr, self.maker.values)
        if step is None:
            return False
        base, chain = self._at(expr.reads[0])
        value = self.maker.values[expr.output]
        is_followed = base in self.prior or self._is_of_reused(base)
        if not is_followed or not self._lies_as(value, base):
            return False
        chain = extended(chain, step)
        self.place[expr.output] = base, chain
        if chain or base not in self.prior:
            return False
        self._stand_for(expr, base, ())
        return True

    def _is_of_reused(self, base: str) -> bool:
        while base in self.prior:
            base = self.prior[base][0]
        return base in self.fusion.reuse.values()

    def _lies_as(self, value: Value, base: str) -> bool:
        """Return whether a value has no layout of its own, or that of the input."""
        while base in self.prior:
            base = self.prior[base][0]
        of = self.maker.values[base]
        is_free = value.stream is None and value.like is None
        is_free = is_free and (value.order_from != "user" or value.order == of.order)
        return is_free and (not value.is_law or value.layout == of.layout)

    def _show(self, expr: Expr, new: str, chain: Chain) -> None:
        """Append the views of a written value that show what an expression makes."""
        for step in chain[:-1]:
            new = _viewed(self.maker, expr, new, step, last=False)
        self.shown.add(_viewed(self.maker, expr, new, chain[-1], last=True))

    def _stand_for(self, expr: Expr, new: str, chain: Chain) -> None:
        if chain:
            self.place[expr.output] = new, chain
            self._show(expr, new, chain)
        else:
            self.instead[expr.output] = new
            self.place[expr.output] = new, ()

    def result(self) -> Fusion:
        """Return the fusion: a value that takes the place of an output has its name."""
        values, names = dict(self.maker.values), dict[str, str]()
        exprs = self.maker.exprs
        for output in dict.fromkeys(self.fusion.outputs):
            new = self.instead.get(output)
            if new is None:
                continue
            if new in names or new in self.fusion.outputs or new in self.fusion.inputs:
                source = values[output].source
                exprs.append(Expr(op="set", inputs=(new,), outputs=(output,), source=source))
                continue
            names[new] = output
        may_go = self.shown.union(values.keys() - self.fusion.values.keys())
        named = [_named(e, names) for e in exprs]
        live = leading_to(named, self.fusion.outputs, lambda e: not may_go.issuperset(e.outputs))
        return self.fusion.with_exprs(live, values)


def _viewed(maker: Maker, by: Expr, x: str, step: ViewStep, last: bool) -> str:
    """Append a view."""
    if step.op == "permute":
        return maker.op(by, "permute", x, dims=step.dims, last=last)
    if step.op == "reshape":
        return maker.op(by, "reshape", x, shape=step.after, last=last)
    ends = tuple(
        start + (n - 1) * by_ + 1
        for start, n, by_ in zip(step.starts, step.after, step.steps, strict=True)
    )
    return maker.op(by, "slice", x, starts=step.starts, ends=ends, steps=step.steps, last=last)


def _named(expr: Expr, names: dict[str, str]) -> Expr:
    """Return an expression with other names for some values."""
    return replace(expr.reading(names), outputs=tuple(names.get(x, x) for x in expr.outputs))
