"""The interface of a backend, which posts one rank's part of a communication.

A backend sees dense buffers and counts. It never sees layouts, meshes or fusions; what each rank
must pass for each kind is written once, for all backends, in `mdfuse.layouts.call`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from mdfuse.errors import BackendError, CommunicationError
from mdfuse.layouts.call import Call
from mdfuse.layouts.kinds import CARRIED, POINT_TO_POINT

if TYPE_CHECKING:
    from torch import Tensor

    from mdfuse.backends.post_notes import Track
    from mdfuse.hir.row_norms import RowNorm

    Buffers = Sequence[Tensor]


def check_usable(name: str, refusal: tuple[str, str] | None) -> None:
    """Raise BackendError where there is a reason, with a remedy, why a backend cannot be used."""
    if refusal is not None:
        because, hint = refusal
        raise BackendError(f"backend {name!r} cannot be used", because=because, hint=hint)


def check_call(call: Call, is_prepared: bool) -> None:
    """Raise CommunicationError unless a call is of a known kind, on a team that was prepared.

    A team of one needs no preparing.
    """
    if call.kind not in CARRIED:
        raise CommunicationError(
            f"{call.kind} is not a kind of communication",
            because=f"kinds are {', '.join(CARRIED)}",
        )
    if not is_prepared and len(call.team) > 1:
        raise CommunicationError(
            f"{call.kind} on team {call.team}, which rank {call.rank} has not prepared",
            because="teams are made before programs run, in one order on all ranks",
            hint="pass the team to prepare() on each of its members first",
        )


def check_dtypes(call: Call, buffers: Sequence[Tensor]) -> None:
    """Raise CommunicationError unless buffers have one dtype, where a call asks for one."""
    if call.kind not in POINT_TO_POINT and len({x.dtype for x in buffers}) > 1:
        raise CommunicationError(
            f"{call.kind} on team {call.team}: dtypes {', '.join(str(x.dtype) for x in buffers)}",
            because="the buffers of a communication have one dtype",
        )


def root_index(call: Call) -> int:
    """Return the index of a call's root in its team.

    Raises:
        CommunicationError: the call has no root, or one outside the team.
    """
    if call.root is None or call.root not in call.team:
        raise CommunicationError(
            f"{call.kind} on team {call.team} has root {call.root}",
            because="its root is one of the team",
        )
    return call.team.index(call.root)


def flat(tensor: Tensor) -> Tensor:
    """Return a view of a dense tensor's elements in memory order, of one dim.

    Its stride is 1 also where there is one element, whose stride means nothing: torch shows bytes
    of no others.
    """
    return tensor.detach().as_strided((tensor.numel(),), (1,))


class Work(Protocol):
    """A posted communication, to wait for.

    A class whose works may be waited for again, on another stream, says so: `waits_again = True`.
    """

    def wait(self) -> None:
        """Return once the buffers may be used (on GPUs: by work queued on the current stream)."""


class Divided(Work, Protocol):
    """A work whose halves, the sends and the receives, can be waited for one by one."""

    sent: Work
    received: Work


@dataclass(frozen=True, slots=True)
class Buffer:
    """A placeholder for a buffer of a post among the arguments of a prepared call.

    Attributes:
        side: "src": sent; "dst": received.
        index: which one of its side.
        form: the tensor itself, its elements in a row (`x.view(-1)`), or its address (an int).
    """

    side: Literal["src", "dst"]
    index: int = 0
    form: Literal["tensor", "flat", "pointer"] = "tensor"


#: The sides of a post, in the order in which calls take them.
SIDES: tuple[Literal["src", "dst"], ...] = ("src", "dst")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call with nothing left to decide: `run(*args)`.

    Attributes:
        run: the function to call; a text names a method of the first argument.
        args: constants, `Buffer`s, and lists of these.
        in_place: the call may write into the memory that it reads, if nothing reads that memory
            afterwards.
    """

    run: Callable[..., Any] | str
    args: tuple[Any, ...]
    in_place: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Posting:
    """A post and its wait, as prepared calls of the library's own functions.

    Attributes:
        post: called in order; the last one returns the handle.
        wait: called where the program waits; None: the handle's own `wait()`.
        explain: turns an error of the library into one that names the post.
    """

    post: tuple[Prepared, ...]
    wait: tuple[Prepared, ...] | None = None
    explain: Callable[[Exception], Exception] | None = None


class Poster(Protocol):
    """A `Call` bound to its team, which posts any buffers that fit it."""

    def __call__(self, srcs: Buffers, dsts: Buffers) -> Work: ...

    def prepare(self, srcs: Buffers, dsts: Buffers, place: PostSite) -> Posting | None:
        """Return the post as calls of the library's own functions, for dense buffers like these.

        Args:
            srcs: the sources, as tensors on the meta device.
            dsts: the destinations, likewise.
            place: the position of the post in a program.

        Returns:
            None where the post needs more than the library's own calls.
        """


@runtime_checkable
class Grouping(Protocol):
    """A poster whose library starts several collectives of one team at once."""

    def together(
        self, calls: Sequence[Call], srcs: Buffers, dsts: Buffers, place: PostSite
    ) -> Posting | None:
        """Return a group of posts as one; see `Poster.prepare`.

        Args:
            calls: of this poster's team; each has one source and one destination.
            srcs: the sources, in the order of the calls.
            dsts: the destinations, likewise.
            place: the position of the group in a program.

        Returns:
            None where the posts are to be made one by one.
        """


@runtime_checkable
class Joining(Protocol):
    """A poster of sums that may compute a norm of the sum's rows in the same kernel."""

    def joined(self, norm: RowNorm, rows: int) -> Callable[..., Work] | None:
        """Return the function that posts both; None, alike on all members, where none does.

        Its arguments are dense: the operand of the sum, the residual, the weight, the total and the
        result, or None for those that there are not. Results share memory with no operand.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class PostSite:
    """The position of a post in a program.

    Attributes:
        where: the user's line.
        stream: the handle of the CUDA stream that is current there; 0 without a GPU.
        at_once: the wait follows the post at once, on the same stream.
    """

    where: str
    stream: int = 0
    at_once: bool = False


class Backend(Protocol):
    """A library that carries communications between the ranks."""

    name: str

    def prepare(self, teams: Iterable[tuple[int, ...]]) -> None:
        """Make the teams that this rank is in; ranks pass their teams in one global order.

        Raises:
            BackendError: a member did not come in time; the backend has no room for more teams.
        """

    def bind(self, call: Call) -> Poster:
        """Prepare a call that will be posted many times.

        Raises:
            CommunicationError: the kind is unknown, or its team was not prepared.
        """

    def close(self) -> None:
        """Close the connections between the ranks."""


@runtime_checkable
class Interruptible(Protocol):
    """A backend whose waits another thread can end.

    A wait of any backend raises BackendError by itself once it has taken `timeout_s`. Where another
    rank has refused the run, it need not take that long.
    """

    def abort(self) -> bool:
        """Make the waits of this rank raise BackendError; return whether that was possible."""


@runtime_checkable
class Releasing(Protocol):
    """A backend whose posts on a device another thread can end.

    The device then goes on, with garbage in the buffers of these posts.
    """

    def release(self, all_know: bool) -> None:
        """End all posts of this rank that are under way; later ones raise BackendError.

        Args:
            all_know: all ranks that live have noted their results, and wait for no new ones.

        Raises:
            BackendError: others may take garbage from this rank for results, and do not know.
        """


class Resettable(Protocol):
    """A user of a communicator's groups that gives them up in `reset`."""

    def reset(self) -> None: ...


@runtime_checkable
class Tracking(Protocol):
    """A poster to GPUs whose communications only mdfuse's own watchdog sees."""

    def track(self, stream: int) -> Track | None:
        """Return a new track of the work queued on a stream; None where nothing is queued."""


#: The functions called before and behind a replay.
Around = tuple[Callable[[], None], Callable[[], None]]


@runtime_checkable
class Sharing(Protocol):
    """A backend that copies a program's values directly from its buffers.

    Attributes:
        carried: team whose members do not see each other -> which backend carries it, and why.
    """

    carried: dict[tuple[int, ...], str]

    def posters(self, run: int) -> Callable[[], Callable[[Call], Poster]]:
        """Return the maker, for each plan of a program, of the function that prepares its calls.

        Calls come in program order; see `Backend.bind`. It also holds the addresses that ranks
        exchange for a program's posts.

        Args:
            run: the number of the program, alike on all ranks.
        """

    def arena(self, size: int) -> Tensor | None:
        """Return shared memory, in bytes, for buffers of a program; None: they need none."""

    def around(self) -> Around | None:
        """Return the calls around each replay of a graph with posts, on its stream, or None."""
