"""The rows of the op table: each rule of shapes beside torch, on operands that fit and that do not.

Operands and attributes are drawn by what a row says of itself, so that a new one is drawn, too.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mdfuse.ir import calls, dims, ops, shapes
from mdfuse.ir.attributes import Attr, attr
from mdfuse.ir.infer import on_few_elements
from mdfuse.ir.ops import TABLE, Op
from mdfuse.ir.out_forms import ANYHOW, DENSE

Shape = tuple[int, ...]

#: What attributes may be beside lists of small numbers.
VALUES: tuple[Any, ...] = (
    0, 1, -1, 2, 3, 0.5, True, False, "none", "tanh", "sum", "bor", torch.float32, torch.int64,
)  # fmt: skip


def drawn_shape(drawn: random.Random, most: int = 4) -> Shape:
    return tuple(drawn.choice((1, 2, 3)) for _ in range(drawn.randrange(most + 1)))


def drawn_attr(drawn: random.Random, a: Attr, operand: Shape | None) -> Any:
    """One of the values that the attribute may have."""
    while True:
        x = drawn.choice(VALUES)
        if drawn.random() < 0.7:
            length = len(operand or ()) if drawn.random() < 0.7 else drawn.randrange(4)
            x = tuple(drawn.randrange(4) for _ in range(length))
        if operand and drawn.random() < 0.3:  # an end of the operand, or its dims in any order
            x = drawn.choice(
                (operand[-1:], operand[-2:], tuple(drawn.sample(operand, len(operand))))
            )
        more = len(x) if a.of == "result" and isinstance(x, tuple) else 0
        n = None if operand is None else len(operand) + more
        if a.holds(x, n) and not (isinstance(x, tuple) and a.is_shape and 0 in x):
            return x


def drawn_call(drawn: random.Random, row: Op) -> tuple[list[Any], dict[str, Any]]:
    """Operands and attributes; many of the operands have one shape, or the same last dims."""
    least, most = row.operands
    first, found = drawn_shape(drawn), []
    for at in range(drawn.randint(least, least + 2 if most is None else most)):
        kind = drawn.random()
        shape = first if kind < 0.4 else first[-2:] if kind < 0.6 else first[-1:]
        found.append(drawn_shape(drawn, 3) if kind > 0.7 and at else shape)
    whole = row.name.startswith("bitwise")
    tensors: list[Any] = [torch.ones(s, dtype=torch.int64 if whole else None) for s in found]
    if row.name == "where":
        tensors[0] = tensors[0].bool()
    if row.indexed is not None:
        tensors[0] = torch.zeros(found[0], dtype=torch.int64)
    if row.rule in (dims.creation, dims.likeness):
        tensors[row.rule is dims.likeness :] = [1.0] * (len(found) - (row.rule is dims.likeness))
    if row.name in ("uniform", "dropout"):  # seeds
        tensors[-1] = 1
    operand = found[0] if found else None
    given = (a for a in row.attrs if not a.is_local and (a.required or drawn.random() < 0.5))
    return tensors, {a.name: drawn_attr(drawn, a, operand) for a in given}


def of_torch(call: Callable[..., Any], *operands: Any, **attrs: Any) -> Shape | None:
    try:
        return tuple(call(*operands, **attrs).shape)
    except (RuntimeError, TypeError, ValueError, IndexError, AssertionError):
        return None


def sample(x: Any) -> Any:
    return (x.dtype, x.ndim) if isinstance(x, Tensor) else x


@pytest.mark.parametrize("name", TABLE)
def test_a_rule_says_what_torch_says(name: str) -> None:
    """Never another shape; of what torch takes, most. What has no elements is torch's to judge."""
    row, drawn, found = TABLE[name], random.Random(name), Counter[str]()
    for _ in range(600):
        operands, attrs = drawn_call(drawn, row)
        known = [tuple(x.shape) if isinstance(x, Tensor) else None for x in operands]
        want = of_torch(row.call, *operands, **attrs)
        made = shapes.known_shape(row.shape, known, attrs)
        if want is None and made is not None:  # then it is no matter of extents
            assert of_torch(on_few_elements, row, map(sample, operands), attrs) is None, known
        else:
            assert made in (want, None), (known, attrs)
        found["refused" if want is None else "taken" if made is not None else "asked"] += 1
    assert found["taken"] > max(20, found["asked"]), found
    if name in ("add", "where", "reshape", "expand", "matmul", "linear", "layer_norm", "cat"):
        assert found["refused"] > 20, found


# -- rows that are wrong -------------------------------------------------------------------------

RIGHT: dict[str, Any] = {
    "name": "twice", "call": torch.add, "rule": dims.pointwise, "shape": shapes.first,
    "writes": DENSE,
}  # fmt: skip
WRONG: dict[str, dict[str, Any]] = {
    "shape": {"shape": (4, 4)},
    "writes": {"writes": torch.add},
    "writes ": {"writes": DENSE, "is_view": True},
    "rule": {"rule": None},
    "call": {"call": "add"},
    "partial": {"partial": "some"},
    "localize": {"localize": "rows"},
    "globalize": {"globalize": calls.window},
    "attrs": {"attrs": (attr("dim", "dim"), attr("dim", "dims"))},
    "may_copy": {"may_copy": True},
    "name": {"name": "add"},
}


@pytest.mark.parametrize("field", WRONG)
def test_a_wrong_entry_is_an_error_when_the_table_is_read(
    field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "TABLE", dict(TABLE))
    with pytest.raises(TypeError, match=f"has the {field.strip()} "):
        ops._row(**{**RIGHT, **WRONG[field]})
    ops._row(**RIGHT)


@pytest.mark.parametrize("field", RIGHT)
def test_a_missing_entry_is_an_error_when_the_table_is_read(field: str) -> None:
    with pytest.raises(TypeError, match=f"missing 1 required positional argument: '{field}'"):
        ops._row(**{k: v for k, v in RIGHT.items() if k != field})


def test_no_rule_is_a_choice() -> None:
    """It stands in the row; only views may say so of how they are written."""
    assert [name for name, row in TABLE.items() if row.shape is None] == []
    assert all(row.writes is ANYHOW for row in TABLE.values() if row.is_view)
