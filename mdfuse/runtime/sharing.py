"""What plans get from backends that copy what a program computes from where it lies."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from mdfuse.backends.base import Poster
from mdfuse.layouts.call import Call

if TYPE_CHECKING:
    from mdfuse.runtime.communicator import Communicator


def posters(communicator: Communicator, run: int) -> Callable[[Call], Poster]:
    """Return what prepares the calls of a plan, in program order; see `Sharing`."""
    sharing = {name: x.posters(run) for name, x in communicator.sharing().items()}

    def poster(call: Call) -> Poster:
        return sharing.get(call.backend or communicator.backend, communicator.poster)(call)

    return poster


def arena(communicator: Communicator, size: int) -> Tensor | None:
    """Return memory for buffers of a program that others see; None where none is needed."""
    return next((x.arena(size) for x in communicator.sharing().values()), None)
