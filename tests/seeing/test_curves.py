"""Curves and grids: measured points are met, and what is between and beyond follows from them."""

import math

import numpy as np
import pytest

import mdfuse as mf
from mdfuse.seeing.curves import Curve, Grid

POINTS = ((1e3, 2e-6), (1e5, 2e-5), (1e6, 3e-4))


@pytest.mark.parametrize("size", [1, 1e3, 7e3, 1e5, 3e5, 1e6])
def test_a_curve_is_straight_between_points(size: float) -> None:
    sizes, seconds = np.array(POINTS).T
    assert math.isclose(Curve(POINTS).seconds(size), np.interp(size, sizes, seconds))


def test_beyond_the_last_point_its_speed_counts() -> None:
    assert math.isclose(Curve(POINTS).seconds(4e6), 12e-4)
    assert math.isclose(Curve(((8.0, 1.0),)).seconds(24), 3.0)
    assert Curve(((8.0, 1.0),)).seconds(1) == 1.0


def test_times_never_fall() -> None:
    assert Curve.of({16: 1.0, 4: 2.0, 8: 1.5, 32: 3.0}).points == (
        (4.0, 2.0), (8.0, 2.0), (16.0, 2.0), (32.0, 3.0),
    )  # fmt: skip


def product(m: float, n: float, k: float) -> float:
    """Straight in each: what straight lines meet everywhere."""
    return 1e-9 * (30 + m) * n * (100 + k / 2)


def test_a_grid_is_straight_between_points() -> None:
    axes = (1.0, 32.0, 512.0), (64.0, 4096.0), (64.0, 256.0, 1024.0)
    times = tuple(product(m, n, k) for m in axes[0] for n in axes[1] for k in axes[2])
    grid = Grid(axes, times)
    for sizes in ((1, 64, 64), (7, 300, 100), (512, 4096, 1024), (100, 64, 999)):
        assert math.isclose(grid.seconds(*sizes), product(*sizes))
    assert math.isclose(grid.seconds(1024, 8192, 64), 4 * product(512, 4096, 64))
    assert math.isclose(grid.seconds(7, 1, 64), product(7, 64, 64)), "not less than the least"


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: Curve(()), "sizes of a curve"),
        (lambda: Curve(((2.0, 1.0), (1.0, 1.0))), "sizes of a curve"),
        (lambda: Curve(((0.0, 1.0),)), "sizes of a curve"),
        (lambda: Curve(((1.0, -1.0),)), "a time of -1.0"),
        (lambda: Curve(((1.0, math.nan),)), "a time of nan"),
        (lambda: Grid(((1.0,), (1.0,), (1.0,)), (1.0, 1.0)), "a grid of 2 times"),
        (lambda: Grid(((1.0,), (1.0,)), (1.0,)), "a grid of 1 times"),
        (lambda: Grid(((2.0, 1.0), (1.0,), (1.0,)), (1.0, 1.0)), "an axis of a grid"),
        (lambda: Grid(((1.0,), (1.0,), (1.0,)), (math.inf,)), "a time of inf"),
    ],
)
def test_points_that_mean_nothing_are_refused(make: object, what: str) -> None:
    with pytest.raises(mf.ProgramError, match=what):
        make()  # type: ignore[operator]
