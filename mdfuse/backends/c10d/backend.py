"""Communications through torch.distributed's libraries: gloo, NCCL and UCC."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta

import torch

from mdfuse.backends.base import Poster, check_call
from mdfuse.backends.c10d.bound import BoundCall
from mdfuse.backends.c10d.groups import LIBRARIES, Group, PrefixStore, Store
from mdfuse.backends.c10d.posts import Team
from mdfuse.backends.c10d.sockets import Sockets, opened, shut_down
from mdfuse.backends.nccl.lane import LaneOpener, NcclLane
from mdfuse.backends.work import first_line
from mdfuse.errors import BackendError
from mdfuse.layouts.call import Call


class C10dBackend:
    """A backend that posts through one of torch.distributed's libraries, with one group per team.

    Args:
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

    def __init__(
        self,
        name: str,
        *,
        rank: int,
        device: torch.device,
        store: Store,
        timeout_s: float,
        network: Sequence[dict[str, str]] = (),
        lanes: LaneOpener | None = None,
    ) -> None:
        self.name = name
        self._library = LIBRARIES[name]
        refusal = self._library.why_not()
        if refusal:
            because, hint = refusal
            raise BackendError(f"backend {name!r} cannot be used", because=because, hint=hint)
        self._rank = rank
        self._device = device
        self._store = store
        self._timeout = timedelta(seconds=timeout_s)
        self._network = network
        self._opener = lanes
        self._lanes: dict[tuple[int, ...], NcclLane] = {}
        self._open: Callable[[Store, int, int], Group] | None = None
        self._teams: dict[tuple[int, ...], Team] = {}
        self._sockets: list[Sockets] = []

    def prepare(self, teams: Iterable[tuple[int, ...]]) -> None:
        """Make the teams that this rank is in; ranks pass their teams in one global order.

        Teams that exist, have one member, or lack this rank are skipped. Blocks until every member
        has come.

        Raises:
            BackendError: a member did not come in time.
        """
        for team in teams:
            if len(team) > 1 and self._rank in team and team not in self._teams:
                self._teams[team] = self._make(team)
                if self._opener is not None:  # once the group shows that all members are there
                    self._lanes[team] = self._opener.open(team, self._store_of(team, "lane"))

    def bind(self, call: Call) -> Poster:
        """Prepare a call that will be posted many times.

        Raises:
            CommunicationError: the kind is unknown, or its team was not prepared.
        """
        team = self._teams.get(call.team)
        check_call(call, team is not None)
        alone = Team(library=self._library, ranks=call.team, group=None)
        return BoundCall(call, team or alone, self.lane(call.team))

    def lane(self, team: tuple[int, ...]) -> NcclLane | None:
        """Return the fast lane beside a team's group, or None."""
        return self._lanes.get(team)

    def abort(self) -> bool:
        """Break off the waits of this rank, from another thread; return whether that was possible.

        The waits raise BackendError, and so do all later posts.
        """
        ended = [shut_down(sockets) for sockets in self._sockets]  # any() alone would stop early
        return any(ended)

    def close(self) -> None:
        """Close all lanes, then all groups."""
        for lane in self._lanes.values():
            lane.close()
        self._lanes.clear()
        if self._opener is not None:
            self._opener.close()
        for team in self._teams.values():
            team.group.shutdown()
        self._teams.clear()
        self._sockets.clear()
        self._open = None

    def _make(self, team: tuple[int, ...]) -> Team:
        self._open = self._open or self._library.opener(self._device, self._timeout, self._network)
        store, index, make = self._store_of(team, "team"), team.index(self._rank), self._open
        try:
            group, sockets = opened(lambda: make(store, index, len(team)))
        except (RuntimeError, ValueError) as error:
            raise BackendError(
                f"{self.name} cannot connect rank {self._rank} with the team {team}",
                because=first_line(error),
                hint="every member must prepare the team; check that their hosts reach each other",
            ) from error
        if self._library.is_interruptible:
            self._sockets.append(sockets)
        return Team(library=self._library, ranks=team, group=group)

    def _store_of(self, team: tuple[int, ...], purpose: str) -> Store:
        """Return a store whose keys only this team uses, for this purpose."""
        name = hashlib.sha256(repr(team).encode()).hexdigest()[:32]
        return PrefixStore(f"{purpose}/{name}", self._store)
