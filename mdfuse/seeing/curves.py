"""Curves: measured seconds by size, with straight lines between the points.

Work takes a fixed time and a time per byte or operation: a straight line. Interpolation between
logarithms would lie above it.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mdfuse.errors import ProgramError


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by size, which never fall.

    Below the first point it is that point's time; beyond the last one the last point's speed.

    Attributes:
        points: (size, seconds), sizes rising.

    Raises:
        ProgramError: no points, sizes that do not rise, or times that are none.

    >>> curve = Curve(((1e3, 1e-6), (1e5, 1e-5)))
    >>> [f"{curve.seconds(size):.2g}" for size in (10, 1e3, 1e4, 1e5, 1e6)]
    ['1e-06', '1e-06', '1.8e-06', '1e-05', '0.0001']
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        _check_axis(sizes, "sizes of a curve")
        _check_times([seconds for _, seconds in self.points])

    def seconds(self, size: float) -> float:
        """Return the seconds of a size."""
        sizes = [s for s, _ in self.points]
        at, share, beyond = _place(sizes, size)
        if len(sizes) == 1:
            return self.points[0][1] * beyond
        low, high = self.points[at][1], self.points[at + 1][1]
        return ((1 - share) * low + share * high) * beyond

    @staticmethod
    def of(points: Mapping[float, float]) -> Curve:
        """Return the curve of measured times, made monotone.

        A time below that of a smaller size is noise, and counts as that one.
        """
        rising, least = [], 0.0
        for size, seconds in sorted(points.items()):
            least = max(least, seconds)
            rising.append((float(size), least))
        return Curve(tuple(rising))


@dataclass(frozen=True, slots=True)
class Grid:
    """Seconds by three sizes: of products [m, k] x [k, n] by m, n and k; of attention.

    Below the first of an axis it is that one's time; beyond the last one the last one's speed.

    Attributes:
        axes: the measured sizes of each, rising.
        times: seconds, for the last axis first.

    Raises:
        ProgramError: axes that do not rise, a number of times that does not fit, or no times.

    >>> grid = Grid(((1.0, 64.0), (64.0,), (64.0,)), (1e-6, 1e-5))
    >>> f"{grid.seconds(8, 64, 64):.2g} {grid.seconds(64, 128, 64):.2g}"
    '2e-06 2e-05'
    """

    axes: tuple[tuple[float, ...], ...]
    times: tuple[float, ...]

    def __post_init__(self) -> None:
        for axis in self.axes:
            _check_axis(axis, "an axis of a grid")
        _check_times(self.times)
        if len(self.axes) != 3 or len(self.times) != math.prod(map(len, self.axes)):
            raise _wrong(f"a grid of {len(self.times)} times", "m x n x k times, one for each")

    def seconds(self, m: float, n: float, k: float) -> float:
        """Return the seconds of a product, or of an attention of three sizes."""
        places = [_place(axis, x) for axis, x in zip(self.axes, (m, n, k), strict=True)]
        seconds = 0.0
        for corner in itertools.product((0, 1), repeat=3):
            weight, at = 1.0, 0
            for axis, (low, share, _), up in zip(self.axes, places, corner, strict=True):
                weight *= share if up else 1 - share
                at = at * len(axis) + min(low + up, len(axis) - 1)
            seconds += weight * self.times[at] if weight else 0.0
        return seconds * math.prod(beyond for *_, beyond in places)


def as_measured(count: float, axis: Sequence[float], at_once: int) -> float:
    """Return the nearest count of an axis with as many waves, or as far between two of them.

    Args:
        count: of blocks, which are computed in waves.
        axis: the measured counts, rising.
        at_once: the number of blocks of a wave.

    >>> [as_measured(n, (32, 128, 256, 512), 132) for n in (64, 132, 136, 264, 265, 396, 529)]
    [64, 128, 256, 256, 384.0, 384.0, 640.0]
    """
    turns = math.ceil(count / at_once)
    alike = [x for x in axis if math.ceil(x / at_once) == turns]
    if alike:
        return min(max(count, alike[0]), alike[-1])
    if count > axis[-1]:
        return axis[-1] * turns / math.ceil(axis[-1] / at_once)
    low = max((x for x in axis if x < count), default=axis[0])
    high = min(x for x in axis if x > count)
    before, behind = (math.ceil(x / at_once) for x in (low, high))
    return low + (high - low) * (turns - before) / max(1, behind - before)


def _place(axis: Sequence[float], x: float) -> tuple[int, float, float]:
    """Return the point below, the share of the way to the next one, and how many times the last
    point it is."""
    if len(axis) == 1 or x <= axis[0]:
        return 0, 0.0, max(1.0, x / axis[-1]) if len(axis) == 1 else 1.0
    at = min(bisect_right(axis, x) - 1, len(axis) - 2)
    share = (x - axis[at]) / (axis[at + 1] - axis[at])
    return at, min(share, 1.0), max(1.0, x / axis[-1])


def _check_axis(sizes: Sequence[float], what: str) -> None:
    is_rising = all(a < b for a, b in itertools.pairwise(sizes))
    if not sizes or not is_rising or not all(_is_amount(x) for x in sizes):
        raise _wrong(f"{what}: {[*sizes]}", "numbers above 0, rising")


def _check_times(times: Sequence[float]) -> None:
    wrong = [x for x in times if not _is_amount(x)]
    if wrong:
        raise _wrong(f"a time of {wrong[0]!r}", "seconds above 0")


def _is_amount(x: object) -> bool:
    is_number = isinstance(x, int | float) and not isinstance(x, bool)
    return is_number and math.isfinite(x) and x > 0  # type: ignore[arg-type, operator]


def _wrong(what: str, rule: str) -> ProgramError:
    return ProgramError(what, because=f"measured costs are {rule}", hint="run mdfuse calibrate")
