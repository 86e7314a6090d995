"""Services for plans of backends that copy a program's values directly from its buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from mdfuse.backends.base import Poster
from mdfuse.layouts.call import Call

if TYPE_CHECKING:
    from mdfuse.runtime.communicator import Communicator


#: Makes, for each plan of a program, the function that prepares its calls, in program order.
Posters = Callable[[], Callable[[Call], Poster]]


def posters(communicator: Communicator, run: int) -> Posters:
    """Return the maker, for each plan of a program, of its preparing function; see `Sharing`."""
    sharing = {name: x.posters(run) for name, x in communicator.sharing().items()}

    def of_a_plan() -> Callable[[Call], Poster]:
        shared = {name: make() for name, make in sharing.items()}

        def poster(call: Call) -> Poster:
            return shared.get(call.backend or communicator.backend, communicator.poster)(call)

        return poster

    return of_a_plan


def arena(communicator: Communicator, size: int) -> Tensor | None:
    """Return memory that others see, for buffers of a program; None where none is needed."""
    return next((x.arena(size) for x in communicator.sharing().values()), None)


def carried(communicator: Communicator) -> Iterator[str]:
    """Yield a line for each team of this rank that is not carried by the requested backend."""
    for name, backend in communicator.sharing().items():
        for team, why in backend.carried.items():
            yield f"{name}: ranks {', '.join(map(str, team))} communicate by {why}"
