"""Many small cases in one test: on real ranks each test costs an agreement of all of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any


@contextmanager
def telling(case: object) -> Iterator[None]:
    """Let an error say at which case it was raised."""
    try:
        yield
    except Exception as error:
        error.add_note(f"at {case}")
        raise


def in_turn(**values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As `parametrize` with the product of some arguments' values, all within one test."""
    combinations = [dict(zip(values, row, strict=True)) for row in product(*values.values())]

    def decorated(test: Callable[..., None]) -> Callable[..., None]:
        def all_of_them(**given: Any) -> None:
            for case in combinations:
                with telling(case):
                    test(**given, **case)

        signature = inspect.signature(test)
        left = [p for name, p in signature.parameters.items() if name not in values]
        vars(all_of_them).update(vars(test), __signature__=signature.replace(parameters=left))
        all_of_them.__name__, all_of_them.__doc__ = test.__name__, test.__doc__
        return all_of_them

    return decorated
