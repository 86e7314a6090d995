"""Values by their places in a list, taken with as few calls as Python has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any


def picked(places: Sequence[int | None]) -> Callable[[Sequence[Any]], list[Any]]:
    """Return the function that takes the values at some places, and None where there is no place.

    >>> picked([2, 0, None])("abc")
    ['c', 'a', None]
    """
    if len(places) == 1 and (place := places[0]) is not None:
        return lambda values: [values[place]]
    if None in places or not places:
        return lambda values: [None if n is None else values[n] for n in places]
    taken = itemgetter(*places)
    return lambda values: [*taken(values)]
