"""Every op that writes into a given buffer writes the bits that it would have returned."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import permutations
from typing import Any

import pytest
import torch
from helpers.drawn_rows import drawn_attr
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mdfuse.ir import writes
from mdfuse.ir.ops import TABLE, Op

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int8, torch.uint8, torch.bool,
]  # fmt: skip
SHAPES = [(7,), (3, 5, 7), (8, 64)]

Operands = tuple[Any, ...]
Attrs = dict[str, Any]


def draw(dtype: torch.dtype, *shape: int) -> Tensor:
    """Numbers of both signs; integers without 0, by which nothing divides."""
    x = torch.randn(shape) * 4
    if dtype == torch.bool:
        return x > 0
    return x.to(dtype) if dtype.is_floating_point else (x.abs().round() + 1).to(dtype)


def bits(x: Tensor) -> Tensor:
    return x.new_empty(x.numel()).copy_(x.reshape(-1)).view(torch.uint8)


def binary(dtype: torch.dtype) -> Iterator[tuple[Operands, Attrs]]:
    for shape in SHAPES:
        x, y = draw(dtype, *shape), draw(dtype, *shape)
        yield (x, y), {}
        yield (x, y[..., :1]), {}
        yield (x, draw(torch.float32, *shape)), {}
        yield (x.mT.contiguous().mT if x.ndim > 1 else x, y), {}
        for number in (2, 2.3, True):
            yield (x, number), {}


def unary(dtype: torch.dtype) -> Iterator[tuple[Operands, Attrs]]:
    for shape in SHAPES:
        x = draw(dtype, *shape)
        for operand in (x, x.transpose(0, -1), x.expand(2, *shape), x[..., ::2]):
            yield (operand,), {}


def reductions(dtype: torch.dtype) -> Iterator[tuple[Operands, Attrs]]:
    for shape in SHAPES:
        x = draw(dtype, *shape)
        for dims in (None, (0,), (-1,), *([(0, -1), (1,)] if x.ndim > 1 else [])):
            for keepdim in (False, True):
                yield (x,), {"dims": dims, "keepdim": keepdim}
                yield (x.transpose(0, -1),), {"dims": dims, "keepdim": keepdim}
    yield (draw(dtype),), {"dims": ()}


def matmuls(dtype: torch.dtype) -> Iterator[tuple[Operands, Attrs]]:
    sizes = [
        ((5, 7), (7, 3)), ((64, 128), (128, 32)), ((33, 257), (257, 65)), ((1, 256), (256, 64)),
        ((7,), (7,)), ((5, 7), (7,)), ((7,), (7, 3)), ((4, 5, 7), (7, 3)), ((4, 5, 7), (4, 7, 3)),
        ((2, 4, 5, 7), (4, 7, 3)),
    ]  # fmt: skip
    for a, b in sizes:
        yield (draw(dtype, *a), draw(dtype, *b)), {}
        if len(b) == 2:
            yield (draw(dtype, *a), draw(dtype, *b[::-1]).T), {}


def linears(dtype: torch.dtype) -> Iterator[tuple[Operands, Attrs]]:
    for shape in [(7,), (1, 7), (5, 7), (64, 7), (4, 5, 7), (2, 3, 4, 7)]:
        for n in (3, 65):
            x, w, b = draw(dtype, *shape), draw(dtype, n, 7), draw(dtype, n)
            yield (x, w), {}
            yield (x, w, b), {}
            if len(shape) > 2:
                yield (x.transpose(0, 1), w, b), {}


def wheres(dtype: torch.dtype) -> Iterator[tuple[Operands, Attrs]]:
    for shape in SHAPES:
        condition, x, y = draw(torch.bool, *shape), draw(dtype, *shape), draw(dtype, *shape)
        yield (condition, x, y), {}
        yield (condition, x, 1.5), {}
        yield (condition, 2, 3), {}


def threes(*numbers: float) -> Any:
    """Three tensors, of which the second or the last repeats; behind them numbers, if any."""

    def cases(dtype: torch.dtype) -> Iterator[tuple[Operands, Attrs]]:
        for shape in SHAPES:
            x, y, z = (draw(dtype, *shape) for _ in range(3))
            yield (x, y, z, *numbers), {}
            yield (x, y[:1] if shape else y, z[-1:] if shape else z, *numbers), {}

    return cases


def copies(dtype: torch.dtype) -> Iterator[tuple[Operands, Attrs]]:
    """Rows into some places of a tensor, one of them twice: then the last counts."""
    for shape in SHAPES:
        for along, extent in enumerate(shape):
            for count in (0, 1, 3):
                at, rows = torch.randint(extent, (count,)), [*shape]
                rows[along] = count
                yield (at, draw(dtype, *rows), draw(dtype, *shape)), {"along": along}


def elements(dtype: torch.dtype) -> Iterator[tuple[Operands, Attrs]]:
    for shape in SHAPES:
        for along, extent in enumerate(shape):
            few = [3 if d == along else max(n - 1, 1) for d, n in enumerate(shape)]
            at = torch.randint(extent, few)
            yield (at, draw(dtype, *few), draw(dtype, *shape)), {"along": along}


def puts(dtype: torch.dtype) -> Iterator[tuple[Operands, Attrs]]:
    for shape in SHAPES:
        for dims in ((0,), (len(shape) - 1,), (0, len(shape) - 1)[: len(shape)]):
            if len({*dims}) == len(dims):
                for n in (0, 1, 3):
                    at = [torch.randint(-shape[d], shape[d], (n,)) for d in dims]
                    source = draw(dtype, n, *(m for d, m in enumerate(shape) if d not in dims))
                    for accumulate in (False, True):
                        how = {"dims": dims, "accumulate": accumulate}
                        yield (*at, source, draw(dtype, *shape)), how


def windows(dtype: torch.dtype) -> Iterator[tuple[Operands, Attrs]]:
    for shape in SHAPES:
        few, starts = [-(-n // 2) for n in shape], tuple(1 - n % 2 for n in shape)
        how = {"starts": starts, "steps": (2,) * len(shape)}
        yield (draw(dtype, *few), draw(dtype, *shape)), how


def with_attrs(*choices: Attrs) -> Any:
    def cases(dtype: torch.dtype) -> Iterator[tuple[Operands, Attrs]]:
        for operands, _ in unary(dtype):
            for attrs in choices:
                yield operands, attrs

    return cases


def slopes(*choices: Attrs) -> Any:
    def cases(dtype: torch.dtype) -> Iterator[tuple[Operands, Attrs]]:
        for operands, _ in binary(dtype):
            for attrs in choices:
                yield operands, attrs

    return cases


def joins(dtype: torch.dtype) -> Iterator[tuple[Operands, Attrs]]:
    for shape in SHAPES:
        yield (draw(dtype, *shape), draw(dtype, *shape)), {"dim": 0}
        yield (draw(dtype, *shape), draw(torch.float32, *shape)), {"dim": -1}


def drawn(row: Op) -> Any:
    """Attributes as the row has them, for each operand."""

    def cases(dtype: torch.dtype) -> Iterator[tuple[Operands, Attrs]]:
        draw = random.Random(row.name)
        for (x,), _ in unary(dtype):
            for _ in range(2):
                yield (x,), {a.name: drawn_attr(draw, a, tuple(x.shape)) for a in row.attrs}

    return cases


#: The operands of an op, by its name, else by the host instruction that runs it.
CASES: dict[str, Any] = {
    "clamp": with_attrs({"min": -1, "max": 1.5}, {"min": 2}),
    "hardtanh": with_attrs({"min": -1, "max": 1.5}),
    "gelu": with_attrs({"approximate": "none"}, {"approximate": "tanh"}),
    "cast": with_attrs(*({"dtype": d} for d in DTYPES)),
    "widen": with_attrs({"dtype": torch.float64}),
    "round_terms": with_attrs({"dtype": torch.bfloat16}),
    "polygamma": with_attrs({"n": 1}, {"n": 3}),
    "leaky_relu": with_attrs({}, {"negative_slope": 0.2}),
    "hardtanh_grad": slopes({"min": -1, "max": 1.5}),
    "gelu_grad": slopes({"approximate": "none"}, {"approximate": "tanh"}),
    "softplus_grad": slopes({}, {"beta": 2.0, "threshold": 3.0}),
    "where": wheres,
    "addcmul": threes(3),
    "addcdiv": threes(0.3),
    "ternary": threes(),
    "huber_loss": slopes({"delta": 0.5}),
    "smooth_l1_loss": slopes({"beta": 2.0}),
    "elu": with_attrs({}, {"alpha": 0.5, "scale": 2.0, "input_scale": 3.0}),
    "elu_grad": slopes({}, {"alpha": 0.5, "scale": 2.0, "input_scale": 3.0}),
    "logit": with_attrs({}, {"eps": 0.25}),
    "cat": joins,
    "index_copy": copies,
    "scatter": elements,
    "index_put": puts,
    "slice_scatter": windows,
    "matmul": matmuls,
    "linear": linears,
    "binary": binary,
    "unary": unary,
    "reduce": reductions,
}


def buffers(like: Tensor) -> dict[str, Tensor]:
    """Dense; a run of rows and of columns of a larger one; in another memory order.

    One row of the last has a stride of 1, too, with which cuBLAS cannot do.
    """
    shape, dtype = like.shape, like.dtype
    first, last = (shape[0], shape[-1]) if shape else (1, 1)
    rows = torch.empty((first + 2, *shape[1:]), dtype=dtype).narrow(0, 1, first)
    columns = torch.empty((*shape[:-1], last + 3), dtype=dtype).narrow(-1, 1, last)
    return {
        "dense": torch.empty(shape, dtype=dtype),
        "rows": rows.reshape(shape) if shape else rows[0],
        "columns": columns if shape else columns[0],
        "transposed": torch.empty(shape[::-1], dtype=dtype).permute([*range(len(shape))][::-1]),
    }


def given(name: str, dtype: torch.dtype) -> Iterator[tuple[Operands, Attrs, Tensor]]:
    """What torch takes, with what it then returns."""
    row = TABLE[name]
    for operands, attrs in (CASES.get(name) or CASES.get(row.host) or drawn(row))(dtype):
        try:
            yield operands, attrs, row.call(*operands, **attrs)
        except (RuntimeError, TypeError, ValueError):
            continue


@pytest.mark.parametrize("name", [name for name, row in TABLE.items() if row.writes.form])
def test_the_bits_are_those_of_the_plain_op(name: str) -> None:
    torch.manual_seed(0)
    write = writes.write_of(TABLE[name])
    assert write is not None
    cases = 0
    for dtype in DTYPES:
        for operands, attrs, expected in given(name, dtype):
            for kind, out in buffers(expected).items():
                place = out.data_ptr()
                write(*operands, out=out, **attrs)
                assert torch.equal(bits(out), bits(expected)), (dtype, kind, operands, attrs)
                assert (out.data_ptr(), out.shape) == (place, expected.shape)
                cases += 1
    assert cases


@pytest.mark.parametrize(
    "name",
    sorted(n for n, row in TABLE.items() if row.writes.form and row.host in ("unary", "binary")),
)
def test_in_place_of_an_operand(name: str) -> None:
    """Element by element, so that the result may take the operand's place."""
    torch.manual_seed(0)
    write = writes.write_of(TABLE[name])
    assert write is not None
    for operands, attrs, expected in given(name, torch.float32):
        x = operands[0]
        if (expected.dtype, expected.shape) == (x.dtype, x.shape) and x.is_contiguous():
            write(*operands, out=x, **attrs)
            assert torch.equal(bits(x), bits(expected))


@pytest.mark.parametrize("name", ["max", "min"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_empty_part_of_an_extreme(name: str, dtype: torch.dtype) -> None:
    """An empty shard gives the identity, in a buffer too."""
    attrs = {"dims": (0,), "identity": True}
    expected = TABLE[name].call(torch.empty(0, 3, dtype=dtype), **attrs)
    out = torch.zeros(3, dtype=dtype)
    write = writes.write_of(TABLE[name])
    assert write is not None
    write(torch.empty(0, 3, dtype=dtype), out=out, **attrs)
    assert torch.equal(out, expected)


def test_what_is_written_in_place() -> None:
    """The ops of the contract."""
    for name in ("add", "sub", "mul", "div", "sum", "max", "min", "matmul", "linear"):
        assert writes.write_of(TABLE[name]) is not None


@pytest.mark.parametrize("name", ["add", "sum", "matmul", "sigmoid"])
def test_a_dense_buffer_takes_no_copy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even torch's own copy is called."""
    x = torch.rand(8, 8)
    operands = (x, x) if name in ("add", "matmul") else (x,)
    attrs = {"dims": (1,)} if name == "sum" else {}
    expected = TABLE[name].call(*operands, **attrs)
    out = torch.empty_like(expected)

    def refused(*_: object) -> None:
        raise AssertionError("copied")

    monkeypatch.setattr(Tensor, "copy_", refused)
    write = writes.write_of(TABLE[name])
    assert write is not None
    write(*operands, out=out, **attrs)
    assert torch.equal(out, expected)


# -- new buffers in another memory order ---------------------------------------------------------


def orders(rank: int) -> list[tuple[int, ...]]:
    """All but the plain one."""
    return list(permutations(range(rank)))[1:]


def dense_in(order: tuple[int, ...], like: Tensor) -> Tensor:
    new = torch.empty([like.shape[d] for d in order], dtype=like.dtype)
    return new.permute([order.index(d) for d in range(like.ndim)])


def facts(operands: Operands) -> list[Tensor]:
    return [x.to("meta") for x in operands if isinstance(x, Tensor)]


@pytest.mark.parametrize(
    "name",
    [n for n, row in TABLE.items() if row.writes.form and writes.has_orders(row, (1, 0), (4, 4))],
)
def test_another_order_has_the_same_bits(name: str) -> None:
    torch.manual_seed(0)
    row, cases = TABLE[name], 0
    for dtype in DTYPES:
        for operands, attrs, expected in given(name, dtype):
            if not isinstance(operands[0], Tensor) or expected.ndim > 3:
                continue
            for order in orders(expected.ndim):
                write, out = (
                    writes.ordered_write(row, order, facts(operands)),
                    dense_in(order, expected),
                )
                assert write is not None
                place = out.data_ptr()
                write(*operands, out=out, **attrs)
                assert out.data_ptr() == place
                if name in ("sum", "prod") and expected.dtype.is_floating_point:
                    tolerance = 1e-6 if expected.dtype in DTYPES[:2] else 1e-2
                    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance * 10)
                else:
                    assert torch.equal(bits(out), bits(expected)), (dtype, order, operands, attrs)
                for buffer in buffers(expected).values():
                    writes.in_order(order, write)(*operands, out=buffer, **attrs)
                    assert torch.equal(bits(buffer), bits(out)), (dtype, order, operands, attrs)
                cases += 1
    assert cases


#: Op, shapes of the operands, order of the result.
PRODUCTS: list[tuple[str, list[tuple[int, ...]], tuple[int, ...]]] = [
    ("matmul", [(33, 64), (64, 65)], (1, 0)),
    ("linear", [(33, 64), (65, 64)], (1, 0)),
    ("linear", [(33, 64), (65, 64), (65,)], (1, 0)),
    ("linear", [(4, 9, 64), (65, 64)], (2, 0, 1)),
    ("matmul", [(4, 9, 64), (64, 65)], (1, 0, 2)),
    ("linear", [(4, 9, 64), (65, 64)], (1, 0, 2)),
    ("linear", [(4, 9, 64), (65, 64), (65,)], (1, 0, 2)),
    ("matmul", [(4, 9, 64), (4, 64, 65)], (1, 0, 2)),
    ("matmul", [(4, 9, 64), (4, 64, 65)], (2, 0, 1)),
    ("matmul", [(4, 9, 64), (4, 64, 65)], (0, 2, 1)),
]


@pytest.mark.parametrize("dtype", DTYPES[:4], ids=str)
@pytest.mark.parametrize(("name", "shapes", "order"), PRODUCTS)
def test_a_product_in_another_order(
    name: str,
    shapes: list[tuple[int, ...]],
    order: tuple[int, ...],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same numbers, the same bits in whatever buffer, and nothing is copied."""
    torch.manual_seed(0)
    operands = tuple(torch.randn(shape).to(dtype) for shape in shapes)
    row = TABLE[name]
    exact = row.call(*(x.double() for x in operands))
    write = writes.ordered_write(row, order, facts(operands))
    assert write is not None and writes.has_orders(row, order, [len(s) for s in shapes])
    out = dense_in(order, exact.to(dtype))
    place = out.data_ptr()

    def refused(*_: object) -> None:
        raise AssertionError("copied")

    with monkeypatch.context() as patched:
        patched.setattr(Tensor, "copy_", refused)
        patched.setattr(Tensor, "contiguous", refused)
        write(*operands, out=out)
    assert out.data_ptr() == place
    for buffer in buffers(out).values():
        writes.in_order(order, write)(*operands, out=buffer)
        assert torch.equal(bits(buffer), bits(out))
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-4}.get(dtype, 0.3)
    torch.testing.assert_close(out.double(), exact, atol=tolerance, rtol=tolerance)


#: Op, shapes of the operands, order in which the rows of the first lie.
ROWS: list[tuple[str, list[tuple[int, ...]], tuple[int, ...]]] = [
    ("matmul", [(4, 9, 64), (64, 65)], (1, 0, 2)),
    ("linear", [(4, 9, 64), (65, 64)], (1, 0, 2)),
    ("linear", [(4, 9, 64), (65, 64), (65,)], (1, 0, 2)),
    ("linear", [(3, 4, 5, 8), (7, 8)], (2, 0, 1, 3)),
    ("linear", [(3, 4, 5, 8), (7, 8), (7,)], (1, 0, 2, 3)),
    ("matmul", [(2, 0, 8), (8, 3)], (1, 0, 2)),
]


@pytest.mark.parametrize("dtype", DTYPES[:4], ids=str)
@pytest.mark.parametrize(("name", "shapes", "order"), ROWS)
def test_a_product_lies_as_its_rows_do(
    name: str, shapes: list[tuple[int, ...]], order: tuple[int, ...], dtype: torch.dtype
) -> None:
    """One product of two matrices, as of rows that lie plainly; nothing is copied."""
    torch.manual_seed(0)
    row = TABLE[name]
    x, *others = (torch.randn(shape).to(dtype) for shape in shapes)
    exact = row.call(*(t.double() for t in (x, *others)))
    operands = (dense_in(order, x).copy_(x), *others)
    known = [torch.empty_strided(t.shape, t.stride(), device="meta") for t in operands]
    if not x.numel():
        assert writes.rows_of(row, known) is None
        return
    assert writes.rows_of(row, known) == order
    assert (
        writes.rows_of(row, [None, *known[1:]]) is writes.rows_of(row, facts((x, *others))) is None
    )
    write, out = writes.ordered_write(row, order, known), dense_in(order, exact.to(dtype))
    assert write is not None
    with Copies() as copies:
        write(*operands, out=out)
        made = writes.by_rows(row, order, *operands)
    assert not copies.made
    assert made.stride() == out.stride() and torch.equal(bits(made), bits(out))
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-4}.get(dtype, 0.3)
    torch.testing.assert_close(out.double(), exact, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0), (0, 2, 1)])
@pytest.mark.parametrize("other", [(0, 1, 2), (1, 0, 2)])
def test_contractions_sum_as_their_operands_lie(
    order: tuple[int, ...], other: tuple[int, ...]
) -> None:
    """Gradients of weights of rows in two dims: operands that lie alike are not copied."""
    torch.manual_seed(0)
    a, b = torch.randn(3, 5, 4, dtype=torch.float64), torch.randn(3, 5, 6, dtype=torch.float64)
    x, y = dense_in(order, a).copy_(a), dense_in(other, b).copy_(b)
    attrs: dict[str, Any] = {"left": (0, 1, 2), "right": (0, 1, 3), "kept": (2, 3)}
    with Copies() as copies:
        product = TABLE["contract"].call(x, y, **attrs)
    torch.testing.assert_close(product, a.flatten(0, 1).T @ b.flatten(0, 1))
    if order == other:
        assert not copies.made
    scaled = TABLE["contract"].call(x, y, left=(9, 7, 3), right=(9, 7, 5), kept=(5, 9, 3))
    torch.testing.assert_close(scaled, torch.einsum("abc,abd->dac", a, b))


class Copies(TorchDispatchMode):
    """Counts the copies that torch makes."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        self.made += [name] if "clone" in name or "copy" in name else []
        return func(*args, **kwargs or {})


def test_products_that_would_copy_are_not_written_so() -> None:
    """Four dims; a batch that is broadcast; what is not known; an operand that is not dense."""
    x, w = torch.empty(4, 9, 8, device="meta"), torch.empty(8, 5, device="meta")
    many = torch.empty(2, 4, 9, 8, device="meta")
    assert not writes.has_orders(TABLE["matmul"], (1, 0, 2, 3), [4, 2])
    assert writes.ordered_write(TABLE["matmul"], (1, 0, 2, 3), [many, w]) is None
    assert writes.ordered_write(TABLE["matmul"], (1, 0, 2), [x[:2], x.mT]) is None
    assert writes.ordered_write(TABLE["matmul"], (1, 2, 0), [x, x.mT]) is None
    assert writes.ordered_write(TABLE["matmul"], (1, 0, 2), [x, None]) is None
    assert writes.ordered_write(TABLE["matmul"], (2, 0, 1), [x.mT.contiguous().mT, w]) is None


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64])
def test_a_result_has_memory_of_its_own(dtype: torch.dtype) -> None:
    """Unless the row says that it is a view: later instructions may write over the operand."""
    x, checked = torch.ones(4, 4).to(dtype), 0
    for op in TABLE.values():
        is_plain = op.host == "unary" and not op.is_view and not any(a.required for a in op.attrs)
        try:
            result = op.call(x) if is_plain else None
        except (RuntimeError, NotImplementedError, TypeError):  # not of this dtype
            continue
        if isinstance(result, Tensor):
            checked += 1
            assert result.untyped_storage().data_ptr() != x.untyped_storage().data_ptr(), op.name
    assert checked > 3
