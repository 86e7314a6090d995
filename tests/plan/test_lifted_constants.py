"""Constants of functions that are compiled, saved and read again, beside the calls of torch."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mdfuse.plan import inductor
from mdfuse.plan.artefacts import Artefacts
from mdfuse.plan.compiled_functions import emptying
from mdfuse.plan.lifted_constants import decoded, encoded, lifted
from mdfuse.plan.tensor_meta import form_of

_MANY = [1 / (n + 1) for n in range(5000)]


def of_one(x: Tensor) -> list[Tensor]:
    return [x.sin() * torch.tensor(0.3, dtype=x.dtype)]


def of_few(x: Tensor) -> list[Tensor]:
    product = x.unsqueeze(-1) * torch.tensor([1.0, 0.1, -0.0, float("inf")])
    return [product.cos(), product + x.unsqueeze(-1)]


def of_many(x: Tensor) -> list[Tensor]:
    table = torch.tensor(_MANY)
    return [x.sum() * table, table + 1]


def of_several(x: Tensor) -> list[Tensor]:
    mask, rows = torch.tensor([True, False, True]), torch.tensor([2, 0, 2])
    half = torch.tensor([1.5, 2.0, 3.0], dtype=torch.bfloat16)
    return [torch.where(mask, x[rows, :3] * half, half.float()), x[rows] + rows[:, None]]


def of_none(x: Tensor) -> list[Tensor]:
    return [x + 1, torch.tensor([]) + 1]


FUNCTIONS = [of_one, of_few, of_many, of_several, of_none]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_functions_out_of_files_have_their_constants(
    function: Callable[[Tensor], list[Tensor]], tmp_path: Path
) -> None:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(3))
    traced, want = inductor.traced(lambda x: function(x), [form_of(x)]), function(x)
    compiled, folder = inductor.compiled(traced), Artefacts(tmp_path / "made")
    assert folder.save("a", compiled, traced.results) is None
    stored = folder.load("a")
    assert stored is not None
    for given in (compiled, stored[0]):
        for _ in range(2):
            torch.testing.assert_close(given(x), want, equal_nan=True)
        taking, operands = emptying(given), [x.clone()]
        assert taking is not None
        seen = weakref.ref(operands[0])
        torch.testing.assert_close([*taking(operands)], want, equal_nan=True)
        assert operands == [] and seen() is None


def test_a_function_without_operands_has_its_constants(tmp_path: Path) -> None:
    traced = inductor.traced(lambda: [torch.tensor([3.0, 4.0]).square()], [])
    compiled, folder = inductor.compiled(traced), Artefacts(tmp_path / "made")
    assert folder.save("a", compiled, traced.results) is None
    stored = folder.load("a")
    assert stored is not None
    for given in (compiled, stored[0]):
        torch.testing.assert_close(given(), [torch.tensor([9.0, 16.0])])


def test_functions_for_many_sizes_have_constants_of_one() -> None:
    table = [0.5, -2.0]

    def function(x: Any) -> list[Any]:
        return [(x * torch.tensor(table)).sin() + x.shape[0]]

    def forms(sizes: Any) -> list[Any]:
        return [((sizes[0], 2), (2, 1), torch.float32, torch.device("cpu"))]

    compiled = inductor.compiled(inductor.traced_with_sizes(lambda x: function(x), forms, [6]))
    for n in (2, 6, 9):
        x = torch.randn(n, 2, generator=torch.Generator().manual_seed(n))
        torch.testing.assert_close([*compiled(x)], function(x))


def test_a_constant_is_lifted_once_and_the_trace_stays() -> None:
    table = torch.tensor([1.0, 2.0])
    graph = torch.fx.Graph()
    x, first, again = graph.placeholder("x"), graph.get_attr("table"), graph.get_attr("table")
    graph.output(
        [graph.call_function(torch.add, (x, first)), graph.call_function(torch.mul, (x, again))]
    )
    module: Any = torch.fx.GraphModule({"table": table}, graph)
    before = str(module.graph)
    taking, constants = lifted(module, [])
    assert len(constants) == 1 and constants[0] is module.table and str(module.graph) == before
    assert [n.op for n in taking.graph.nodes].count("placeholder") == 2
    given = torch.tensor([5.0, 7.0])
    torch.testing.assert_close(taking(given, table), [given + table, given * table])
    assert lifted(taking, []) == (taking, [])


@pytest.mark.parametrize(
    "x",
    [
        torch.tensor(float("nan")), torch.tensor([]), torch.zeros(2, 0, 3), torch.tensor(True),
        torch.tensor([-0.0, float("inf")]), torch.tensor([1 + 2j]), torch.arange(6).view(2, 3).t(),
        torch.tensor([1.5, -3.0], dtype=torch.bfloat16), torch.tensor([2**63 - 1]),
    ],
    ids=str,
)  # fmt: skip
def test_constants_in_text_keep_their_bits(x: Tensor) -> None:
    (back,) = decoded(encoded([x]))
    assert back.dtype == x.dtype and back.shape == x.shape
    flat = (v.contiguous().reshape(-1).view(torch.uint8) for v in (back, x))
    assert torch.equal(*flat)
