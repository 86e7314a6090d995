"""Random numbers: the same on any mesh, since they depend on a seed and the global index only."""

from __future__ import annotations

from typing import Any

import torch

from mdfuse.errors import DefinitionError
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops.recording import Integers, Operand, definition_of, record, sequence


def uniform(
    shape: Integers,
    low: float = 0.0,
    high: float = 1.0,
    dtype: torch.dtype = torch.float32,
    seed: Operand = 0,
) -> Handle:
    """Uniform random numbers in [low, high) that depend on seed and global index, on no mesh.

    Args:
        shape: global shape.
        low: lower bound.
        high: upper bound.
        dtype: a floating dtype.
        seed: an integer, or a scalar input for new numbers in each run.
    """
    if dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        raise DefinitionError(
            f"uniform of {dtype}",
            because="f64, f32, f16 and bf16 are drawn",
            hint="draw torch.float32 and cast it",
        )
    _check_seed(seed)
    definition = definition_of(seed)
    attrs = {"shape": sequence(shape, ()), "dtype": dtype, "low": low, "high": high}
    attrs["stream"] = definition.next_stream()
    return definition.record("uniform", (seed,), attrs)


def dropout(x: Handle, p: float = 0.5, seed: Operand = 0, training: bool = True) -> Handle:
    """Each element zero with probability p, the others times 1 / (1 - p); the same on any mesh.

    Args:
        x: a floating tensor.
        p: probability in [0, 1].
        seed: an integer, or a scalar input for a new mask in each run.
        training: without it x itself.
    """
    if not 0.0 <= p <= 1.0:
        raise DefinitionError(
            f"dropout with p={p}", because="p is a probability", hint="a number from 0 to 1"
        )
    _check_seed(seed)
    if not training or p == 0.0:
        return record("set", x)
    return record("dropout", x, seed, p=p, stream=definition_of(x).next_stream())


def _check_seed(seed: Any) -> None:
    is_number = isinstance(seed, int)
    if isinstance(seed, Handle):
        is_number = not seed.is_tensor and not seed.dtype.is_floating_point
    if not is_number:
        raise DefinitionError(
            f"seed={seed!r}",
            because="a seed is an integer, or an integer scalar",
            hint="define_scalar(dtype=int) makes it an input of each run",
        )
