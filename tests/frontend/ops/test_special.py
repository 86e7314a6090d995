"""Operations made of several, of complex numbers and of the largest integers: as torch has them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Shard

MESH = DeviceMesh.arange(tp=2)


def simulated(function: Callable[..., Any], *given: Tensor) -> Tensor:
    """The result of a function of tensors split along dim 0."""
    with mf.FusionDefinition() as fd:
        layouts = ({"tp": Shard(0)} if x.ndim else {} for x in given)
        pairs = list(zip(given, layouts, strict=True))
        handles = [fd.define_tensor([*x.shape], x.dtype, MESH, layout) for x, layout in pairs]
        fd.add_output(function(*handles))
    (result,) = mf.simulate(mf.compile(fd), list(given)).outputs
    assert isinstance(result, Tensor)
    return result


def drawn(dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(5, 3, dtype=dtype, generator=torch.Generator().manual_seed(seed))


OF_ONE: dict[str, Callable[[Any], Any]] = {
    "var": lambda x: x.var(0),
    "var of all": lambda x: torch.var(x, correction=0),
    "std": lambda x: x.std(1, keepdim=True),
    "var_mean": lambda x: torch.var_mean(x, 0)[0],
    "its mean": lambda x: torch.var_mean(x, 0)[1],
    "std_mean": lambda x: torch.std_mean(x, 1)[0],
    "norm": lambda x: x.norm(),
    "norm 0": lambda x: x.norm(0, 1),
    "norm 1": lambda x: torch.linalg.vector_norm(x, 1, 0),
    "norm 3": lambda x: torch.linalg.vector_norm(x, 3, 1),
    "norm inf": lambda x: torch.linalg.vector_norm(x, math.inf, 0),
    "norm in f64": lambda x: torch.linalg.vector_norm(x, 2, 0, dtype=torch.complex128),
    "matrix norm": lambda x: torch.linalg.matrix_norm(x),
    "matrix norm 1": lambda x: torch.linalg.matrix_norm(x, 1),
    "logsumexp": lambda x: x.logsumexp(0),
    "logsumexp of large ones": lambda x: (x * 200).logsumexp(1),
    "normalize": lambda x: F.normalize(x, dim=0),
    "nan_to_num": lambda x: torch.nan_to_num(x / (x - x), nan=2.0),
    "masked_fill": lambda x: x.masked_fill(abs(x) > 1, 0.5),
}


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("name", OF_ONE)
def test_of_complex_numbers(name: str, dtype: torch.dtype) -> None:
    x = drawn(dtype, 0)
    torch.testing.assert_close(simulated(OF_ONE[name], x), OF_ONE[name](x))


OF_TWO: dict[str, Callable[[Any, Any], Any]] = {
    "vdot": lambda x, y: torch.vdot(x[:, 0], y[:, 0]),
    "isclose": lambda x, y: torch.isclose(x, y, atol=1.0),
    "isclose of nan": lambda x, y: torch.isclose(x / (x - x), y / (y - y), equal_nan=True),
    "cdist": lambda x, y: (x - y).norm(2, -1),
    "addmm": lambda x, y: torch.addmm(x[:3], y[:3, :3], y[:3], alpha=0.5, beta=1.5),
    "add": lambda x, y: torch.add(x, (y.real if isinstance(y, Tensor) else y.real()) > 0, alpha=2),
}


@pytest.mark.parametrize("name", OF_TWO)
def test_of_two(name: str) -> None:
    x, y = drawn(torch.complex128, 1), drawn(torch.complex128, 2)
    torch.testing.assert_close(simulated(OF_TWO[name], x, y), OF_TWO[name](x, y))


REAL: dict[str, Callable[[Any], Any]] = {
    "deg2rad": torch.deg2rad,
    "rad2deg": torch.rad2deg,
    "logit": torch.logit,
    "cosine_similarity": lambda x: F.cosine_similarity(x, x),
    "nansum": torch.nansum,
    "nanmean": torch.nanmean,
}


@pytest.mark.parametrize("name", REAL)
def test_what_is_of_real_numbers(name: str) -> None:
    """Torch refuses the same."""
    x = drawn(torch.complex64, 3)
    with pytest.raises(RuntimeError):
        REAL[name](x)
    with pytest.raises(mf.DefinitionError, match="real numbers") as caught:
        simulated(REAL[name], x)
    assert caught.value.what == f"{name} of %in: complex64[5,3]"


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64], ids=str
)
def test_integers_whose_difference_is_none_of_theirs(dtype: torch.dtype) -> None:
    ends = torch.iinfo(dtype)
    x, y = torch.tensor([[ends.max, ends.min, 5, 0], [ends.min, ends.max, 4, 1]], dtype=dtype)
    for how in ({}, {"rtol": 0.0, "atol": 1.0}, {"rtol": 0.5}):
        assert torch.equal(
            simulated(lambda a, b, how=how: torch.isclose(a, b, **how), x, y),
            torch.isclose(x, y, **how),
        )


@pytest.mark.parametrize(
    ("one", "other", "dim"),
    [((1, 6), (1, 1), 1), ((3, 4), (4,), 1), ((2, 1, 5), (3, 1), -1), ((3, 1), (1, 4), 0)],
)
def test_cosines_of_repeated_vectors(
    one: tuple[int, ...], other: tuple[int, ...], dim: int
) -> None:
    """A vector that is repeated along the dim has the norm of the repeated one, as in torch."""
    mesh = mf.DeviceMesh.arange(x=2)
    with mf.FusionDefinition("cosines") as fd:
        x = fd.define_tensor(list(one), torch.float64, mesh, {"x": mf.Shard(0)})
        y = fd.define_tensor(list(other), torch.float64, mesh)
        fd.add_output(torch.cosine_similarity(x, y, dim))
    given = [torch.randn(shape, dtype=torch.float64) for shape in (one, other)]
    (cosines,) = mf.simulate(mf.compile(fd), given).outputs
    torch.testing.assert_close(cosines, torch.cosine_similarity(*given, dim=dim))
