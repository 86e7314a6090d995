"""Values that are computed again where they are read, instead of being kept till then."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mdfuse.ir.graph import Expr, Operand


class Recomputation:
    """Computes values again, each once, with all that leads to them from values that are kept.

    Args:
        made_by: value that is computed again -> its expression, in program order; all others are
            kept.
        write: writes an expression with these operands, and returns the names of its results.

    >>> from mdfuse.ir.again import Recomputation
    >>> from mdfuse.ir.graph import Expr
    >>> exp = Expr(op="exp", inputs=("x",), outputs=("y",))
    >>> add = Expr(op="add", inputs=("y", 1), outputs=("z",))
    >>> def write(expr, inputs):
    ...     print(expr.op, inputs)
    ...     return [f"{expr.output}'"]
    >>> again = Recomputation({"y": exp, "z": add}, write)
    >>> again("z"), again("x"), again("y")
    exp ('x',)
    add ("y'", 1)
    ("z'", 'x', "y'")
    """

    def __init__(
        self,
        made_by: Mapping[str, Expr],
        write: Callable[[Expr, tuple[Operand, ...]], Sequence[str]],
    ) -> None:
        self._made_by, self._write = made_by, write
        self._at = {x: n for n, x in enumerate(made_by)}
        self._new: dict[str, str] = {}

    def __call__(self, x: Operand) -> Operand:
        """Return an operand as it is read: a value that is computed again by its new name."""
        if not isinstance(x, str) or x not in self._made_by:
            return x
        needed, left = set[str](), [x]
        while left:
            name = left.pop()
            if name in self._made_by and name not in self._new and name not in needed:
                needed.add(name)
                left += self._made_by[name].reads
        for name in sorted(needed, key=self._at.__getitem__):
            if name not in self._new:
                expr = self._made_by[name]
                inputs = tuple(
                    self._new.get(r, r) if isinstance(r, str) else r for r in expr.inputs
                )
                self._new |= zip(expr.outputs, self._write(expr, inputs), strict=True)
        return self._new[x]
