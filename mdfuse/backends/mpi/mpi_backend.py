"""Communications through MPI, with mpi4py."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from mdfuse.backends.base import Posting, PostSite, Work, check_call
from mdfuse.backends.mpi import mpi_library as mpi_library
from mdfuse.backends.mpi.mpi_posts import MpiTeam, build_post, check_sizes
from mdfuse.backends.mpi.pending_requests import Waiting
from mdfuse.backends.staging import Staged, after_the_stream
from mdfuse.backends.teams import new_teams, no_more_posts, not_connected, team_key
from mdfuse.backends.transfers import Post
from mdfuse.backends.work import DONE, explained
from mdfuse.errors import BackendError
from mdfuse.layouts.call import Call
from mdfuse.layouts.kinds import CARRIED, POINT_TO_POINT
from mdfuse.torch_private import PrefixStore, Store

_log = logging.getLogger("mdfuse.comm")


class MpiBackend:
    """A backend that posts through MPI, with communicators for each team of this rank.

    Raises:
        BackendError: mpi4py, or the MPI that it was built for, cannot be loaded.
    """

    name = "mpi"

    def __init__(self, *, rank: int, device: torch.device, store: Store, timeout_s: float) -> None:
        self._mpi = mpi_library.library()
        self._rank = rank
        self._device = device
        self._store = store
        self._waiting = Waiting(timeout_s=timeout_s)
        self._teams: dict[tuple[int, ...], MpiTeam] = {}
        self._is_threaded = self._mpi.Query_thread() == self._mpi.THREAD_MULTIPLE
        self._why_staged: str | None = None
        if device.type == "cuda":
            self._why_staged = mpi_library.why_staged(self._mpi, os.environ)
            if rank == 0:
                why = self._why_staged or "MPI's collectives that do not block lack device memory"
                what = "all" if self._why_staged else "collectives"
                _log.warning("backend mpi: %s through pinned host memory: %s", what, why)

    def abort(self) -> bool:
        """End the waits of this rank with an error; see `Interruptible`."""
        self._waiting.aborted += 1
        return True

    def prepare(self, teams: Iterable[tuple[int, ...]]) -> None:
        """Make the teams that this rank is in, waiting for members; see `Backend.prepare`."""
        for team in new_teams(teams, self._rank, self._teams):
            self._teams[team] = self._make(team)

    def bind(self, call: Call) -> MpiBoundCall:
        """Prepare a call that will be posted many times; see `Backend.bind`."""
        team = self._teams.get(call.team)
        check_call(call, team is not None)
        alone = self._team(call.team, dict.fromkeys(CARRIED, self._mpi.COMM_SELF))
        return MpiBoundCall(call, team or alone, self)

    def build(self, team: MpiTeam, call: Call, dtype: torch.dtype) -> Post:
        """Return a function that posts a call on buffers of one dtype on this rank's device."""
        post = build_post(team, call, dtype)
        if self._device.type != "cuda":
            return post
        if self._why_staged is None and call.kind in POINT_TO_POINT:
            return after_the_stream(post, self._device)
        return Staged(post, call, self._device)

    def check_usable(self, team: MpiTeam, call: Call) -> None:
        """Refuse a post on a team that failed before, or from a thread that MPI does not serve.

        Raises:
            BackendError: it is refused.
        """
        if team.state.is_broken:
            raise no_more_posts(call)
        if not self._is_threaded and not self._mpi.Is_thread_main():
            raise BackendError(
                f"rank {call.rank} posts {call.kind} from a thread that did not start MPI",
                where=f"team {call.team}",
                because="this MPI was started for calls from one thread",
                hint="run programs on the main thread, or start MPI with THREAD_MULTIPLE, as "
                "mpi4py does by default where MPI has it",
            )

    def close(self) -> None:
        """Free all communicators, without waiting for other ranks; MPI itself goes on.

        Communicators of a team with a failed post are not freed: MPI may still use them.
        """
        for team in self._teams.values():
            if not team.state.is_broken and not self._mpi.Is_finalized():
                for comm in team.comms.values():
                    comm.Free()
        self._teams.clear()

    def _team(self, ranks: tuple[int, ...], comms: Mapping[str, Any]) -> MpiTeam:
        return MpiTeam(mpi=self._mpi, ranks=ranks, comms=comms, waiting=self._waiting)

    def _make(self, team: tuple[int, ...]) -> MpiTeam:
        """Make a team's communicators, one per kind.

        The members meet in the store first, where waits have a deadline: MPI has none. A
        communicator takes 0.1 ms (4 ranks on 2 cores) and 9 KiB.
        """
        self._meet(team)
        world = self._mpi.COMM_WORLD.Get_group()
        group = world.Incl(team)
        comms = {kind: self._mpi.COMM_WORLD.Create_group(group) for kind in CARRIED}
        for comm in comms.values():
            comm.Set_errhandler(self._mpi.ERRORS_RETURN)
        group.Free()
        world.Free()
        return self._team(team, comms)

    def _meet(self, team: tuple[int, ...]) -> None:
        store = PrefixStore(f"mpi/{team_key(team)}", self._store)
        try:
            if store.add("in", 1) == len(team):
                store.set("go", "")
            store.wait(["go"], timedelta(seconds=self._waiting.timeout_s))
        except RuntimeError as error:
            raise not_connected("mpi", self._rank, team, error) from error


@dataclass(slots=True, eq=False)
class MpiBoundCall:
    """A call bound to its team, with one posting function per dtype."""

    call: Call
    team: MpiTeam
    backend: MpiBackend
    posts: dict[torch.dtype, Post] = field(default_factory=dict, init=False)

    def __call__(self, srcs: Sequence[Tensor], dsts: Sequence[Tensor]) -> Work:
        buffers = srcs or dsts
        if not buffers:
            return DONE
        self.backend.check_usable(self.team, self.call)
        dtype = buffers[0].dtype
        post = self.posts.get(dtype)
        if post is None:
            post = self.posts[dtype] = self.backend.build(self.team, self.call, dtype)
        try:
            return post(srcs, dsts)
        except (RuntimeError, ValueError) as error:
            check_sizes(self.call, (*srcs, *dsts))
            raise explained(self.call, error) from error

    def prepare(
        self, srcs: Sequence[Tensor], dsts: Sequence[Tensor], place: PostSite
    ) -> Posting | None:
        """Return None: a post reads the addresses of its buffers in each run."""
        return None
