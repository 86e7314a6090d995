"""Every spelling of torch that a handle takes, with many arguments: torch's result or an error.

What torch refuses may mean something here; what both take is the same, tuples and dtypes included.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.oracle import is_close
from torch import Tensor

import mdfuse as mf
from mdfuse import FusionDefinition, MdfuseError
from mdfuse.errors import PACKAGE
from mdfuse.frontend import ops as frontend
from mdfuse.frontend.handle import Handle
from mdfuse.passes import drop_unread

#: The operand: ties, signs, a dim of one element; no two dims alike.
INPUTS = {
    "floats": torch.tensor([[[0.5, -1.0, 2.0, 2.0]] * 3, [[-3.0, 0.25, 0.75, -1.0]] * 3]),
    "integers": torch.tensor([[3, -1, 2], [3, 2, 0]]),
    "flat": torch.tensor([1.5, -0.5, 2.0]),
    "bools": torch.tensor([[True], [False]]),
}

#: Further arguments. "y" is the operand plus one, "i" integers of its shape, "m" a mask.
ARGUMENTS: tuple[tuple[Any, ...], ...] = (
    (), (0,), (1,), (-1,), (2,), (0, True), (-1, True), ((0, 1),), ([0],), (0, 1), (1, 0), (0.5,),
    (True,), (False,), (None,), (1, 1), ([1, 2],), ([1, 1], 1), (0, 0, 1), (-1, 0, 1), ("y",),
    ("y", 0.5), ("y", "y"), ("m", 2), ("i",), ((2, -1),), (-1, 2), (torch.float64,),
    (torch.bool,), ((),), (3,),
)  # fmt: skip
KEYWORDS: tuple[dict[str, Any], ...] = (
    {"dim": 0}, {"dim": -1, "keepdim": True}, {"dim": (0, 1)}, {"dim": None}, {"keepdim": True},
    {"dtype": torch.float64}, {"dim": 0, "dtype": torch.float64}, {"dim": 1, "unbiased": False},
    {"correction": 0}, {"min": 0}, {"max": 1, "min": 0}, {"p": 1, "dim": 0}, {"dim": 0, "index": 1},
)  # fmt: skip


def spellings() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Functions of torch, and methods, that have an operation or a method here."""
    for space in (torch, F):
        for name in frontend.BY_NAME:
            function = getattr(space, name, None)
            if callable(function) and not (space is F and function is getattr(torch, name, None)):
                yield f"{space.__name__}.{name}", function
    for name in dir(Handle):
        if not name.startswith("_") and callable(getattr(Tensor, name, None)):
            yield f"Tensor.{name}", lambda x, *a, n=name, **k: getattr(x, n)(*a, **k)


SPELLINGS = dict(spellings())


def attempt(function: Callable[..., Any], x: Any, args: Any, kwargs: Any) -> Any:
    """What a call gives; None where it is refused."""
    values = {"y": lambda: x + 1, "i": lambda: (x > 0).long() + 1, "m": lambda: x > 0}
    args = [values[a]() if isinstance(a, str) else a for a in args]
    if isinstance(x, Handle):
        try:
            return function(x, *args, **kwargs)
        except MdfuseError:
            return None
        except (
            TypeError,
            AttributeError,
            ValueError,
        ) as error:  # torch's, before it asks the handle
            if any(PACKAGE in f.filename for f in traceback.extract_tb(error.__traceback__)):
                raise
            return None
    try:
        return function(x, *args, **kwargs)
    except (
        RuntimeError,
        TypeError,
        IndexError,
        ValueError,
        NotImplementedError,
        KeyError,
        AttributeError,  # torch.nn.functional asks a number for what tensors have,
        AssertionError,  # and asserts,
        ZeroDivisionError,  # and divides
    ):
        return None


def flat(x: Any) -> list[Any]:
    """Results one by one, with what holds them."""
    if isinstance(x, tuple | list) and any(isinstance(y, Tensor | Handle) for y in x):
        return [len(x), *(y for part in x for y in flat(part))]
    return [x]


def compare(name: str, kind: str, tried: Any) -> list[str]:
    function, x = SPELLINGS[name], INPUTS[kind]
    wanted: list[tuple[Any, list[Any], list[Any]]] = []
    with FusionDefinition() as fd:
        h = fd.define_tensor(x.shape, x.dtype, name="x")
        for args, kwargs in tried:
            want = attempt(function, x.clone(), args, kwargs)
            got = attempt(function, h, args, kwargs)
            if want is not None and got is not None:
                wanted.append(((args, kwargs), flat(want), flat(got)))
        outputs = [g for _, _, got in wanted for g in got if isinstance(g, Handle)]
        for g in outputs:
            fd.add_output(g * 1 if g is h else g)
    results = dict(
        zip(map(id, outputs), mf.reference(drop_unread.run(fd.fusion), [x]), strict=True)
    )
    wrong = []
    for said, want, got in wanted:
        found = [results.get(id(g), g) for g in got]
        if len(found) != len(want) or not all(map(is_same, found, want)):
            wrong.append(f"{name}(x, {said}) of {kind}: {found}, torch: {want}")
    return wrong


def is_same(found: Any, want: Any) -> bool:
    if isinstance(want, Tensor):
        is_tensor = isinstance(found, Tensor) and found.shape == want.shape
        return is_tensor and found.dtype == want.dtype and is_close(found, want)
    return bool(found == want)


#: Where torch leaves the result open: what is not in order is searched, what is not written is
#: read, and equal elements have some order.
OPEN = ("searchsorted", "bucketize", "empty_like", "new_empty", "kthvalue")


@pytest.mark.parametrize("name", [n for n in SPELLINGS if n.split(".")[-1] not in OPEN])
def test_what_both_take_is_the_same(name: str) -> None:
    tried = [(args, {}) for args in ARGUMENTS] + [((), kwargs) for kwargs in KEYWORDS]
    wrong = [line for kind in INPUTS for line in compare(name, kind, tried)]
    assert not wrong, "\n".join(wrong)


def test_most_spellings_are_taken() -> None:
    """The comparison above compares something."""
    assert len(SPELLINGS) > 250
    assert inspect.isfunction(SPELLINGS["Tensor.max"])
