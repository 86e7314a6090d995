"""Parts of losses: differences, and reductions."""

from __future__ import annotations

from typing import Any

import torch

from mdfuse.errors import DefinitionError
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops.recording import as_dtype
from mdfuse.frontend.ops.reductions import mean, sum


def alike(x: Handle, target: Handle) -> list[Handle]:
    """Return two values in one dtype and shape, as torch expands them."""
    dtype = torch.promote_types(x.dtype, target.dtype)
    return [y if y.dtype == dtype else as_dtype(y, dtype) for y in (x, target)]


def distance(x: Handle, target: Handle) -> Handle:
    """Return the differences of two such values."""
    first, second = alike(x, target)
    return first - second


def class_numbers(target: Handle) -> Handle:
    """Return class indices in a dtype that holds all classes and ignored numbers.

    In 8 bits class 256 would be class 0 again, and -100 would be 156.
    """
    return target if target.dtype in (torch.int64, torch.int32) else as_dtype(target, torch.int64)


def reduced(x: Handle, reduction: str) -> Handle:
    known: dict[str, Any] = {"none": lambda x: x, "mean": mean, "sum": sum}
    if reduction not in known:
        raise DefinitionError(
            f"reduction={reduction!r}",
            because="a loss is reduced to one number or not at all",
            hint=" or ".join(map(repr, known)),
        )
    result: Handle = known[reduction](x)
    return result
