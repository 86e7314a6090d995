"""Communications through torch.distributed's libraries: gloo, NCCL and UCC."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from datetime import timedelta

import torch
from torch import Tensor

from mdfuse.backends.base import Poster, Posting, PostSite, Work, check_call, check_usable
from mdfuse.backends.c10d.c10d_posts import Team, build_post, prepared, prepared_together
from mdfuse.backends.c10d.group_openers import LIBRARIES
from mdfuse.backends.c10d.sockets import Sockets, opened, shut_down
from mdfuse.backends.nccl.cuda_driver import CudaDevice
from mdfuse.backends.nccl.lane import ABORT_S, LaneOpener, NcclLane
from mdfuse.backends.post_notes import Track
from mdfuse.backends.teams import new_teams, not_connected, team_key
from mdfuse.backends.transfers import Post
from mdfuse.backends.work import DONE, explained
from mdfuse.interpreter import threads
from mdfuse.layouts.call import Call
from mdfuse.torch_private import Group, PrefixStore, Store


@dataclass(eq=False)
class C10dBackend:
    """A backend that posts through one of torch.distributed's libraries, with one group per team.

    Attributes:
        name: "gloo", "nccl" or "ucc".
        rank: this rank.
        device: where this rank's buffers are.
        store: shared by all ranks; nobody else uses its keys.
        timeout_s: seconds after which a communication that does not finish is an error.
        network: arguments of gloo's network devices; empty: gloo chooses.
        lanes: opens a fast lane beside each team's group; None: there are no fast lanes.

    Raises:
        BackendError: this process cannot use the library.
    """

    name: str
    _: KW_ONLY
    rank: int
    device: torch.device
    store: Store
    timeout_s: float
    network: Sequence[dict[str, str]] = ()
    lanes: LaneOpener | None = None
    _lanes: dict[tuple[int, ...], NcclLane] = field(default_factory=dict, init=False)
    _open: Callable[[Store, int, int], Group] | None = field(default=None, init=False)
    _teams: dict[tuple[int, ...], Team] = field(default_factory=dict, init=False)
    _sockets: list[Sockets] = field(default_factory=list, init=False)
    _gpu: CudaDevice | None = field(default=None, init=False)
    _ending: list[threads.Job] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._library = LIBRARIES[self.name]
        check_usable(self.name, self._library.why_not())

    def prepare(self, teams: Iterable[tuple[int, ...]]) -> None:
        """Make the teams that this rank is in, waiting for members; see `Backend.prepare`."""
        for team in new_teams(teams, self.rank, self._teams):
            self._teams[team] = self._make(team)
            if self.lanes is not None:  # once the group shows that all members are there
                self._lanes[team] = self.lanes.open(team, self._store_of(team, "lane"))

    def bind(self, call: Call) -> Poster:
        """Prepare a call that will be posted many times; see `Backend.bind`."""
        team = self._teams.get(call.team)
        check_call(call, team is not None)
        alone = Team(library=self._library, ranks=call.team, group=None)
        return BoundCall(call, team or alone, self.lane(call.team))

    def lane(self, team: tuple[int, ...]) -> NcclLane | None:
        """Return the fast lane beside a team's group, or None."""
        return self._lanes.get(team)

    def abort(self) -> bool:
        """End the waits of this rank with an error, as all later posts; see `Interruptible`."""
        ended = [shut_down(sockets) for sockets in self._sockets]  # any() alone would stop early
        return any(ended)

    def release(self, all_know: bool) -> None:
        """End posts on the device; see `Releasing`. Libraries whose posts are the host's have none.

        The others get nothing from this rank any more. An abort ends once no graph uses the group.
        """
        if self._library.on_current:
            for lane in [*self._lanes.values()]:  # the program may make a team meanwhile
                lane.release()
            for team in [*self._teams.values()]:
                name = f"mdfuse-abort of rank {self.rank}"
                self._ending.append(threads.start(team.group.abort, name))
            self._teams.clear()

    def track(self, stream: int) -> Track | None:
        """Return a new track of the work queued on a stream; see `Tracking`.

        Torch's own watchdog does not see posts that a graph holds.
        """
        if self.device.type != "cuda":
            return None
        self._gpu = self._gpu or CudaDevice(self.device)
        return self._gpu.track(stream)

    def close(self) -> None:
        """Close all lanes, then all groups."""
        for lane in self._lanes.values():
            lane.close()
        self._lanes.clear()
        if self.lanes is not None:
            self.lanes.close()
        for team in self._teams.values():
            team.group.shutdown()
        for ending in self._ending:
            ending.join(ABORT_S)
        self._teams.clear()
        self._sockets.clear()
        self._open = None

    def _make(self, team: tuple[int, ...]) -> Team:
        timeout = timedelta(seconds=self.timeout_s)
        self._open = self._open or self._library.opener(self.device, timeout, self.network)
        store, index, make = self._store_of(team, "team"), team.index(self.rank), self._open
        try:
            group, sockets = opened(lambda: make(store, index, len(team)))
        except (RuntimeError, ValueError) as error:
            raise not_connected(self.name, self.rank, team, error) from error
        if self._library.is_interruptible:
            self._sockets.append(sockets)
        return Team(library=self._library, ranks=team, group=group)

    def _store_of(self, team: tuple[int, ...], purpose: str) -> Store:
        """Return a store whose keys only this team uses, for this purpose."""
        return PrefixStore(f"{purpose}/{team_key(team)}", self.store)


# -- calls that are bound to a team ----------------------------------------------------------------


@dataclass(slots=True, eq=False)
class BoundCall:
    """A call bound to its team, with one posting function per dtype."""

    call: Call
    team: Team
    lane: NcclLane | None = None
    posts: dict[torch.dtype, Post] = field(default_factory=dict, init=False)

    def __call__(self, srcs: Sequence[Tensor], dsts: Sequence[Tensor]) -> Work:
        buffers = srcs or dsts
        if not buffers:
            return DONE
        if self.lane is not None:  # on all ranks, or on none: see NcclLane
            work = self.lane.post(self.call, srcs, dsts)
            if work is not None:
                return work
        dtype = buffers[0].dtype
        post = self.posts.get(dtype)
        if post is None:
            post = self.posts[dtype] = build_post(self.team, self.call, dtype)
        try:
            return post(srcs, dsts)
        except (RuntimeError, ValueError) as error:
            raise explained(self.call, error) from error

    def prepare(
        self, srcs: Sequence[Tensor], dsts: Sequence[Tensor], place: PostSite
    ) -> Posting | None:
        """Return the post as calls of the library's own functions, for dense buffers like these."""
        if self.lane is not None:
            posting = self.lane.prepare(self.call, srcs, dsts, place)
            if posting is not None:
                return posting
        return prepared(self.team, self.call, srcs, dsts, place)

    def together(
        self,
        calls: Sequence[Call],
        srcs: Sequence[Tensor],
        dsts: Sequence[Tensor],
        place: PostSite,
    ) -> Posting | None:
        """Return a group of posts as one of the library; see `Grouping.together`."""
        if self.lane is not None:
            return self.lane.together(calls, srcs, dsts, place)
        return prepared_together(self.team, calls, srcs, dsts)
