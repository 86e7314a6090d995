"""Replace expressions of a fusion: a rule appends several in the place of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import torch

from mdfuse.ir.graph import Expr, Fusion, Operand, Value, fresh_name
from mdfuse.ir.infer import inferred
from mdfuse.ir.ops import TABLE
from mdfuse.passes.propagate_layouts import anew


@dataclass
class Maker:
    """The fusion under construction; it lives inside one call of `run`."""

    values: dict[str, Value]
    exprs: list[Expr] = field(default_factory=list)

    def op(self, by: Expr, op: str, *inputs: Operand, last: bool = False, **attrs: Any) -> str:
        """Append one of the expressions that replace `by`; the last one has its result."""
        output = by.outputs[-1]
        if not last:
            output = fresh_name(self.values, f"{by.outputs[0]}.{op}")
            (fields,) = inferred(TABLE[op], inputs, attrs, self.values, by.source)
            self.values[output] = Value(name=output, source=by.source, **fields)
        items = tuple(attrs.items())
        self.exprs.append(
            Expr(op=op, inputs=inputs, outputs=(output,), attrs=items, source=by.source)
        )
        return output

    def several(self, by: Expr, op: str, *inputs: Operand, first: str, **attrs: Any) -> str:
        """Append one with two results, the first of which has a name already; return the second."""
        row = TABLE[op]
        kinds = inferred(row, inputs, attrs, self.values, by.source)
        outputs = []
        for kind, name in zip(kinds, (first, ""), strict=True):
            output = name or fresh_name(self.values, f"{by.outputs[0]}.{op}")
            if output not in self.values:
                self.values[output] = Value(name=output, source=by.source, **kind)
            outputs.append(output)
        items = tuple(attrs.items())
        expr = Expr(op=op, inputs=inputs, outputs=(*outputs,), attrs=items, source=by.source)
        self.exprs.append(expr)
        return outputs[1]

    def wide(self, by: Expr, x: str) -> str:
        """Cast f16 and bf16 to f32, so that sums of them are rounded once."""
        is_narrow = self.values[x].dtype in (torch.float16, torch.bfloat16)
        return self.op(by, "cast", x, dtype=torch.float32) if is_narrow else x

    def result(self, by: Expr, op: str, *inputs: Operand) -> None:
        """Append the last expression, cast to the dtype that the result had."""
        dtypes = [self.values[x].dtype for x in inputs if isinstance(x, str)]
        dtype = self.values[by.output].dtype
        if reduce(torch.promote_types, dtypes) == dtype:
            self.op(by, op, *inputs, last=True)
        else:
            self.op(by, "cast", self.op(by, op, *inputs), last=True, dtype=dtype)

    def cast_as(self, by: Expr, x: str) -> None:
        """Append the first result as a value in the dtype that it had."""
        name = by.outputs[0]
        dtype = self.values[name].dtype
        is_same = self.values[x].dtype == dtype
        last = replace(by, op="set" if is_same else "cast", inputs=(x,), outputs=(name,))
        self.exprs.append(replace(last, attrs=() if is_same else (("dtype", dtype),)))

    def columns(self, by: Expr, x: str, start: int, end: int) -> str:
        """Append a slice of the last dim."""
        shape = self.values[x].shape
        starts, ends = (*(0 for _ in shape[1:]), start), (*shape[:-1], end)
        return self.op(by, "slice", x, starts=starts, ends=ends, steps=(1,) * len(shape))


#: It appends the expressions that replace one; the last of them have its results.
Rule = Callable[[Maker, Expr], None]


def rewritten(fusion: Fusion, rules: Mapping[str, Rule]) -> Fusion:
    """Return the fusion with some expressions replaced: first result -> rule."""
    maker = Maker(dict(fusion.values))
    for expr in fusion.exprs:
        rule = rules.get(expr.outputs[0], _append)
        rule(maker, expr)
    return replace(fusion, values=maker.values, exprs=tuple(maker.exprs))


def _append(maker: Maker, expr: Expr) -> None:
    maker.exprs.append(expr)


def laid_out(fusion: Fusion, rules: Mapping[str, Rule]) -> Fusion:
    """Return the fusion as `rewritten`, with the layouts of results without laws inferred anew."""
    if not rules:
        return fusion
    results = [name for e in fusion.exprs if e.outputs[0] in rules for name in e.outputs]
    fusion = rewritten(fusion, rules)
    free = (fusion.values[name] for name in results if not fusion.values[name].is_law)
    values = {**fusion.values, **{v.name: replace(v, layout=None) for v in free}}
    return anew(replace(fusion, values=values), results)
