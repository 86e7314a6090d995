"""Backend "null", for measuring: this process stands for one rank, and no others exist."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mdfuse.bootstrap import Launch, detect
from mdfuse.errors import BackendError, shown

#: The backend that contacts nobody.
NULL = "null"


def null_launch(
    environment: Mapping[str, str],
    default_group: tuple[int, int] | None,
    rank: int | None,
    size: int | None,
) -> Launch:
    """Return the launch in which this process stands for one rank.

    Args:
        environment: the process's environment variables.
        default_group: (rank, size) of torch's default process group where one exists.
        rank: overrides the launcher's rank; by default 0 where there is a `size`.
        size: overrides the launcher's size.

    Raises:
        BackendError: the rank does not fit the size.

    >>> null_launch({"RANK": "5", "WORLD_SIZE": "8"}, None, None, None).rank
    5
    """
    if rank is None and size is None:
        return _launched(environment, default_group)
    if size is None:
        size = _launched(environment, default_group).size
    rank = rank or 0
    if not 0 <= rank < size:
        raise BackendError(
            f"rank {rank} does not fit size {size}",
            because="a rank is not negative, and smaller than the number of ranks",
            hint='init(backend="null", rank=0, size=8) stands for the first of 8 ranks',
        )
    return Launch(name="null", rank=rank, size=size, local_rank=rank, why="init() was told so")


def null_device(device: torch.device | str | None) -> torch.device:
    """Return the device of buffers: by default the CPU; "cuda" is the current GPU.

    Raises:
        BackendError: the device is of another type, or there is no GPU.
    """
    try:
        chosen = torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise BackendError(
            f"init() got device={shown(device)}",
            because="torch knows no such device",
            hint='device="cpu" or device="cuda"',
        ) from error
    if chosen.type not in ("cpu", "cuda"):
        raise BackendError(
            f"backend 'null' cannot be used on {chosen}", hint='device="cpu" or device="cuda"'
        )
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise BackendError(
            "backend 'null' cannot be used on cuda",
            because="torch sees no CUDA device",
            hint="leave device= out",
        )
    if str(chosen) == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return chosen


def null_arguments(backend: str, arguments: Mapping[str, Any]) -> torch.device | None:
    """Refuse `rank`, `size` and `device` for a backend that detects them by itself.

    Returns:
        The device, where one is given.

    Raises:
        BackendError: one is given, and the backend is not "null"; a rank that is no integer; a
            device that cannot be used.
    """
    given = [name for name, value in arguments.items() if value is not None]
    if given and backend != NULL:
        raise BackendError(
            f"init() got {', '.join(given)} for backend {backend!r}",
            because="only backend 'null' stands for a rank that nobody started",
            hint=f'init(backend="null", ...), or leave {", ".join(given)} to the launcher',
        )
    for name in ("rank", "size"):
        value = arguments.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise BackendError(
                f"init() got {name}={shown(value)}",
                because="ranks are counted by integers",
                hint='init(backend="null", rank=0, size=8) stands for the first of 8 ranks',
            )
    device = arguments.get("device")
    return None if device is None else null_device(device)


def _launched(environment: Mapping[str, str], default_group: tuple[int, int] | None) -> Launch:
    """Return the launcher's rank and size; RANK and WORLD_SIZE suffice, as no rank is contacted."""
    return detect({"MASTER_ADDR": "", "MASTER_PORT": "", **environment}, default_group)
