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
    """As `parametrize` with the product of some arguments' values, all within one test.

    Who calls the test may give some of these arguments, which then have no other value.
    """

    def decorated(test: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(test)

        def all_of_them(*args: Any, **named: Any) -> None:
            given = signature.bind_partial(*args, **named).arguments
            left = {name: of for name, of in values.items() if name not in given}
            for row in product(*left.values()):
                case = dict(zip(left, row, strict=True))
                with telling(case):
                    test(**given, **case)

        others = [p for name, p in signature.parameters.items() if name not in values]
        vars(all_of_them).update(vars(test), __signature__=signature.replace(parameters=others))
        all_of_them.__name__, all_of_them.__doc__ = test.__name__, test.__doc__
        return all_of_them

    return decorated
