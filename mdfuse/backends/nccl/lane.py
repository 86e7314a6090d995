"""The fast lane: posts on NVIDIA GPUs through nccl4py, beside torch's process groups.

A lane is an NCCL communicator of a team. `prepare` checks a post once, so that each run only calls
NCCL's own functions with addresses and numbers: 10 us on the host where the process group takes 27
(all-gather of 4 KiB on two H200). torch's watchdog does not see these posts, so each is noted for
mdfuse's own (`runtime/watch/watch.py`).

Order. A lane has a stream of its own, and a post that is waited for at once goes to the compute
stream instead, without events. One communicator may be used from several streams: NCCL lets each of
its kernels wait for the one before (`ncclLaunchPrepare`: the launch stream waits for the
communicator's device stream), in eager launches and in graphs alike, so that the order on the
device is the order of the host's calls. That order is the program's, which is the same on all
ranks. So the only requirement is that one thread posts to a lane. Two lanes are two communicators:
as with torch's process groups, the order between them is the host's too, which NCCL enforces on the
device where NCCL_LAUNCH_ORDER_IMPLICIT=1 says so.

Buffers. A post on the lane's own stream is unknown to torch's allocator: the plan must hold its
buffers until it has queued the wait, and memory that is freed then is reused behind that wait.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from torch import OutOfMemoryError, Tensor

from mdfuse.backends.base import Buffer, Posting, PostSite, Prepared, Work
from mdfuse.backends.nccl import nccl_posts as nccl_posts
from mdfuse.backends.nccl.cuda_driver import CudaDevice
from mdfuse.backends.nccl.nccl_posts import Port
from mdfuse.backends.post_notes import PostInfo, PostLog, Track
from mdfuse.backends.work import failure, first_line
from mdfuse.errors import BackendError, MdfuseError
from mdfuse.interpreter import threads
from mdfuse.layouts.call import Call
from mdfuse.torch_private import Store

_log = logging.getLogger("mdfuse.comm")

#: How long an orderly end of a communicator may take, and then an abort, seconds.
_CLOSE_S = 10.0
ABORT_S = 2.0

#: How many prepared posts are kept for buffers that plans did not know before.
_KEPT = 256

#: ncclResult_t (nccl.h): results that are no error.
_WELL = (0, 7)  # success, in progress


class LaneOpener(Protocol):
    """A maker of the lanes of teams."""

    def open(self, team: tuple[int, ...], store: Store) -> NcclLane:
        """Make a team's lane; all members call it, for their teams in one global order."""

    def close(self) -> None:
        """Release the resources that lanes share; the lanes are closed before."""


@dataclass(kw_only=True, eq=False)
class NcclLane:
    """A team's own communicator, which `binding` takes, and the posts that are prepared on it."""

    team: tuple[int, ...]
    rank: int
    binding: Any
    comm: Any
    device: CudaDevice
    noter: PostLog
    _tracks: dict[int, Track] = field(default_factory=dict)
    _posts: dict[Any, tuple[tuple[Prepared, ...], Any] | None] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _ending: threads.Job | None = None

    def __post_init__(self) -> None:
        self.stream = self.device.new_stream()
        self._track(self.stream)  # the first one allocates, which must not happen in a capture
        self.noter.on_error(self.team, self.failure)

    def prepare(
        self, call: Call, srcs: Sequence[Tensor], dsts: Sequence[Tensor], place: PostSite
    ) -> Posting | None:
        """Check a post, and reduce it to calls that take nothing but new addresses.

        A post that is waited for at once goes to the stream of `place`. Any other goes to the
        lane's own stream: an event orders it behind the stream of `place`, and the wait orders the
        stream that is then current behind it.

        Returns:
            None where this rank has nothing to post, or the post needs torch.distributed.

        Raises:
            CommunicationError: the buffers do not fit the call.
        """
        stream = place.stream if place.at_once else self.stream
        prepared = self._noted([call], srcs, dsts, stream, place.where)
        if prepared is None:
            return None
        calls, mark = prepared
        explain = partial(_explained, call)
        if place.at_once:
            return Posting(post=(*calls, mark), wait=(), explain=explain)
        post, done = self._forked(calls, mark, place.stream)
        return Posting(post=post, wait=(Prepared(self._join, (done,)),), explain=explain)

    def together(
        self,
        calls: Sequence[Call],
        srcs: Sequence[Tensor],
        dsts: Sequence[Tensor],
        place: PostSite,
    ) -> Posting | None:
        """Return a group of posts as one, on the lane's own stream; see `Grouping.together`."""
        prepared = self._noted(calls, srcs, dsts, self.stream, place.where)
        if prepared is None:
            return None
        post, done = self._forked(*prepared, place.stream)
        wait = (Prepared(self._join, (done,)),)
        return Posting(post=post, wait=wait, explain=partial(_explained, calls[0]))

    def post(
        self, call: Call, srcs: Sequence[Tensor], dsts: Sequence[Tensor], where: str = ""
    ) -> Work | None:
        """Post buffers that were not known before, on the lane's own stream.

        Members of a team meet only on one communicator: a member that cannot prepare a post uses
        the lane by this method, not the process group.

        Returns:
            the work; None for the posts for which `prepare` returns None.
        """
        current = self.device.current_stream()
        looks = tuple((x.dtype, x.shape, x.stride()) for x in (*srcs, *dsts))
        key = (call, where, current, len(srcs), looks)
        if key not in self._posts:
            if len(self._posts) == _KEPT:
                self._posts.clear()
            prepared = self._noted([call], srcs, dsts, self.stream, where)
            self._posts[key] = None if prepared is None else self._forked(*prepared, current)
        known = self._posts[key]
        if known is None:
            return None
        calls, done = known
        try:
            _carry_out(calls, srcs, dsts)
        except Exception as error:
            raise _explained(call, error) from error
        return _InFlight(partial(self._join, done), (srcs, dsts))

    def _noted(
        self,
        group: Sequence[Call],
        srcs: Sequence[Tensor],
        dsts: Sequence[Tensor],
        stream: int,
        where: str,
    ) -> tuple[tuple[Prepared, ...], Prepared] | None:
        """Return the calls of a post, with a note in front of them, and the mark behind them.

        A group of posts is one, with one note.
        """
        call = group[0]
        if self.comm is None:
            raise BackendError(
                f"{call.kind} on team {call.team}: rank {self.rank} has closed its fast lane",
                because="close() gave up the communicator, or the watchdog ended its posts",
                hint="call mdfuse.init() again, on all ranks, and compile the program again; "
                "survivors of a lost rank call mdfuse.rebuild(error)",
            )
        port = Port(binding=self.binding, comm=self.comm, stream=stream)
        if len(group) > 1:
            calls = nccl_posts.prepare_together(port, group, srcs, dsts)
        elif nccl_posts.is_carried(call, (*srcs, *dsts)):
            calls = nccl_posts.prepare(port, call, srcs, dsts)
        else:
            return None
        if not calls and call.kind != "AllToAll":  # others may have elements there
            return None
        subject = nccl_posts.subject(call, srcs, dsts, where)
        before, behind = self.noter.prepare(subject, self._track(stream))
        return (Prepared(before, ()), *calls), Prepared(behind, ())

    def _forked(
        self, calls: tuple[Prepared, ...], mark: Prepared, stream: int
    ) -> tuple[tuple[Prepared, ...], Any]:
        """Move the calls of a post to the lane's own stream, ordered behind `stream`.

        Where `stream` is being captured into a CUDA graph, so are the calls. The mark comes last,
        and a wait does not include it.

        Returns:
            the calls, and the event to wait for. Each post records this event again: a wait that
            comes late also waits for a later post, which the host has queued before it.
        """
        device = self.device
        lane_stream, current = device.stream(self.stream), device.stream(stream)
        fork, done = device.event(), device.event()
        post = (
            Prepared(device.record, (fork, current)),
            Prepared(device.wait, (lane_stream, fork, 0)),
            *calls,
            Prepared(device.record, (done, lane_stream)),
            mark,
        )
        return post, done

    def _join(self, done: Any) -> None:
        """Let the stream that is current now wait for a post made on this or another stream."""
        device = self.device
        device.wait(device.stream(device.current_stream()), done, 0)

    def failure(self) -> str | None:
        """Return the communicator's error in NCCL's words; None if it has none."""
        with self._lock:
            if self.comm is None:
                return None
            result = int(self.binding.comm_get_async_error(self.comm))
            if result in _WELL:
                return None
            words = self.binding.get_error_string(result)
            return f"{words}: {self.binding.get_last_error(self.comm)}"

    def release(self) -> None:
        """End posts under way by an abort of the communicator; see `Releasing`.

        Their kernels end at once. The abort itself ends once no graph uses the communicator.
        """
        self.noter.forget(self.failure)
        comm = self._take()
        if comm is not None:
            abort = partial(self.binding.comm_abort, comm)
            self._ending = threads.start(abort, f"mdfuse-abort of rank {self.rank}")

    def close(self) -> None:
        """Destroy the communicator; a second close does nothing.

        Never hangs. Where posts do not finish, the communicator is aborted. Where its destruction
        does not return, since a graph uses it that was not destroyed before (see
        `Communicator.hold`), the communicator is left alone: an abort would wait for the graph too,
        and then free everything a second time.
        """
        self.noter.forget(self.failure)
        comm, ending = self._take(), self._ending
        if ending is not None and not ending.join(ABORT_S):
            _log.warning("rank %d: the abort of %s goes on", self.rank, self.team)
        if comm is None:
            return
        binding, rank = self.binding, self.rank
        if not _is_done_within(_CLOSE_S, self._finish, rank):
            _log.warning("rank %d: posts to %s do not finish: aborting them", rank, self.team)
            _is_done_within(ABORT_S, lambda: binding.comm_abort(comm), rank)
        # it finalizes, too: ncclCommFinalize is for communicators that do not block
        elif not _is_done_within(_CLOSE_S, lambda: binding.comm_destroy(comm), rank):
            _log.warning("rank %d: the communicator of %s is still in use", rank, self.team)

    def _finish(self) -> None:
        self.device.enter()
        self.device.synchronize()

    def _take(self) -> Any:
        """Take the communicator away from the lane, to end it; None for all later callers."""
        with self._lock:
            comm, self.comm = self.comm, None
        return comm

    def _track(self, stream: int) -> Track:
        """Return this lane's track on a stream; the first call for a stream makes it.

        Marks of several streams could overtake each other, and several threads may post to several
        lanes: so each lane has a track per stream.
        """
        track = self._tracks.get(stream)
        if track is None:
            track = self._tracks[stream] = self.device.track(stream)
        return track


def open_lane(
    team: tuple[int, ...],
    *,
    rank: int,
    store: Store,
    binding: Any,
    device: CudaDevice,
    noter: PostLog,
) -> NcclLane:
    """Make a team's lane; all members call it, for their teams in one global order.

    Raises:
        BackendError: NCCL cannot connect the members.
    """
    index, finished, what = team.index(rank), _Finished(), "connecting a communicator"
    subject = PostInfo(kind=what, team=team, bytes=0, where="prepare()", family="connections")
    before, behind = noter.prepare(subject, finished)
    device.enter()
    before()
    try:
        if index == 0:
            store.set("id", bytes(binding.get_unique_id()).hex())
        unique = bytearray.fromhex(store.get("id").decode())
        comm = binding.comm_init_rank(len(team), unique, index)
    except Exception as error:  # nccl4py's own errors have no common base
        raise BackendError(
            f"nccl4py cannot connect rank {rank} with the team {team}",
            because=first_line(error),
            hint="NCCL_DEBUG=WARN says more; fast_lane='never' does without",
        ) from error
    finally:
        behind()
    return NcclLane(team=team, rank=rank, binding=binding, comm=comm, device=device, noter=noter)


def _explained(call: Call, error: Exception) -> Exception:
    """Return an error as a failure of the call, except for mdfuse's own and out of memory.

    nccl4py's own errors have no common base.
    """
    if isinstance(error, MdfuseError | OutOfMemoryError):
        return error
    return failure(call, error)


class _InFlight:
    """A post that holds its buffers until it is waited for."""

    __slots__ = ("_join", "_kept")

    def __init__(self, join: Callable[[], None], alive: object) -> None:
        self._join = join
        self._kept = alive

    def wait(self) -> None:
        """Let the current stream wait; further calls do no harm."""
        self._join()
        self._kept = None


def _carry_out(calls: Sequence[Prepared], srcs: Sequence[Tensor], dsts: Sequence[Tensor]) -> None:
    """Make prepared calls of a lane, with the addresses of these buffers."""

    def given(argument: Any) -> Any:
        if isinstance(argument, Buffer):
            return (srcs if argument.side == "src" else dsts)[argument.index].data_ptr()
        return [given(x) for x in argument] if isinstance(argument, list) else argument

    for call in calls:
        call.run(*map(given, call.args))  # type: ignore[operator]  # never the name of a method


class _Finished:
    """A track of work that the host does itself, done as soon as it is marked."""

    def __init__(self) -> None:
        self._number = 0

    def mark(self, number: int) -> None:
        self._number = number

    def is_done(self, number: int) -> bool:
        return self._number >= number


def _is_done_within(seconds: float, work: Callable[[], object], rank: int) -> bool:
    """Run `work` in a thread; return whether it ended in time, else leave the thread behind."""
    try:
        return threads.start(work, f"mdfuse-close of rank {rank}").join(seconds)
    except RuntimeError:  # Python exits, and all threads are stuck
        return False
