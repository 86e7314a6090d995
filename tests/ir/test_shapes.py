"""The rows of the op table: each rule of shapes beside torch, on operands that fit and that do not.

Operands and attributes are drawn by what a row says of itself, so that a new one is drawn, too.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from helpers.drawn_rows import drawn_call, of_torch
from torch import Tensor

from mdfuse.ir import calls, dims, op_table, shapes
from mdfuse.ir.attributes import attr
from mdfuse.ir.infer import on_few_elements
from mdfuse.ir.ops import TABLE
from mdfuse.ir.out_forms import ANYHOW, DENSE

Shape = tuple[int, ...]


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
        made = shapes.known_shapes(row.shape, known, attrs)
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
    monkeypatch.setattr(op_table, "TABLE", dict(TABLE))
    with pytest.raises(TypeError, match=f"has the {field.strip()} "):
        op_table.row(**{**RIGHT, **WRONG[field]})
    op_table.row(**RIGHT)


@pytest.mark.parametrize("field", RIGHT)
def test_a_missing_entry_is_an_error_when_the_table_is_read(field: str) -> None:
    with pytest.raises(TypeError, match=f"missing 1 required positional argument: '{field}'"):
        op_table.row(**{k: v for k, v in RIGHT.items() if k != field})


def test_no_rule_is_a_choice() -> None:
    """It stands in the row; only views may say so of how they are written."""
    assert [name for name, row in TABLE.items() if row.shape is None] == []
    assert all(row.writes is ANYHOW for row in TABLE.values() if row.is_view)
