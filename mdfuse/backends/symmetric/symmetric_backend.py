"""Communications through memory that the ranks of one host see: the backend `symmetric`."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import torch
from torch import Tensor

from mdfuse.backends.algorithms import Composition, Sizes
from mdfuse.backends.base import (
    Around,
    Backend,
    Interruptible,
    Poster,
    PostSite,
    Releasing,
    Work,
    check_call,
    check_dtypes,
    check_usable,
)
from mdfuse.backends.post_notes import PostLog, Track
from mdfuse.backends.symmetric.cuda_sites import PostNumbers, Sited, Tellings, numbering
from mdfuse.backends.symmetric.host_memory import Card, SharedMemory, why_not
from mdfuse.backends.symmetric.outbox_moves import Move, Shape, moves, pieces
from mdfuse.backends.symmetric.post_buffers import Buffers, bytes_of
from mdfuse.backends.symmetric.providers import PROVIDERS, PostFunction, ProviderArgs, SymmetricTeam
from mdfuse.backends.teams import new_teams, not_connected, team_key
from mdfuse.backends.transfers import change, composer
from mdfuse.backends.work import DONE, first_line
from mdfuse.errors import BackendError
from mdfuse.hir.row_norms import RowNorm
from mdfuse.layouts.call import Call
from mdfuse.torch_private import PrefixStore, Store

_log = logging.getLogger("mdfuse.comm")

#: The most bytes that an all-reduce brings a rank in one step; with more it takes two steps.
SMALL_BYTES = 64 * 1024


@dataclass(kw_only=True, eq=False)
class SymmetricBackend:
    """A backend whose teams have outboxes: memory that all members see.

    Attributes:
        rank: this rank.
        device: where this rank's buffers are.
        store: shared by all ranks; nobody else uses its keys.
        timeout_s: seconds after which a communication that does not finish is an error.
        noter: takes notes of the work queued on a GPU; None where there is no watch.
        instead: opens the backend of teams whose members do not see each other's memory; None: such
            a team is an error.
        carried: such a team -> which backend carries it, and why.

    Raises:
        BackendError: this process cannot share memory.
    """

    name = "symmetric"

    rank: int
    device: torch.device
    store: Store
    timeout_s: float
    noter: PostLog | None = None
    instead: Callable[[], Backend] | None = None
    carried: dict[tuple[int, ...], str] = field(default_factory=dict, init=False)
    _teams: dict[tuple[int, ...], SymmetricTeam] = field(default_factory=dict, init=False)
    _other: Backend | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        check_usable(self.name, why_not())
        place = ProviderArgs(
            rank=self.rank, device=self.device, timeout_s=self.timeout_s, noter=self.noter
        )
        self._provider = PROVIDERS[self.device.type](place)

    def abort(self) -> bool:
        """End the waits of this rank with an error; see `Interruptible`."""
        others = _ended(self._other)
        return self._provider.abort() or others

    def release(self, all_know: bool) -> None:
        """End posts on the device; see `Releasing`."""
        for carrier in (self._other, *self._teams.values()):
            _release(carrier, all_know)

    def track(self, stream: int) -> Track | None:
        """Return a new track of the work queued on a stream; see `Tracking`."""
        return self._provider.track(stream)

    def prepare(self, teams: Iterable[tuple[int, ...]]) -> None:
        """Make the teams that this rank is in; see `Backend.prepare`."""
        for team in new_teams(teams, self.rank, {*self._teams, *self.carried}):
            opened, refusals = self._make(team)
            if opened is not None:
                self._teams[team] = opened
            elif self.instead is None:
                raise _not_seen(self.rank, team, refusals)
            else:
                self._carry(team, refusals, self.instead)

    def _carry(
        self, team: tuple[int, ...], refusals: Mapping[int, str], opened: Callable[[], Backend]
    ) -> None:
        """Let another backend carry a team; all members do, since they know the same refusals."""
        self._other = self._other or opened()
        self._other.prepare([team])
        rank, because = next(iter(refusals.items()))
        why = f"on rank {rank} {first_line(OSError(because))}"
        self.carried[team] = f"{self._other.name}, as ranks do not see each other's memory: {why}"
        if self.rank == team[0]:
            _log.warning("ranks %s communicate by %s", team, self.carried[team])

    def bind(self, call: Call) -> Poster:
        """Prepare a call that will be posted many times; see `Backend.bind`."""
        return self._poster(call, None, {})

    def posters(self, run: int) -> Callable[[], Callable[[Call], Poster]]:
        """Return the maker of functions that prepare the calls of a plan; see `Sharing`."""
        tellings: Tellings = {}

        def of_a_plan() -> Callable[[Call], Poster]:
            number = numbering(run)
            return lambda call: self._poster(call, number(call), tellings)

        return of_a_plan

    def around(self) -> Around | None:
        """Return the calls before and behind replays of graphs; see `Sharing`."""
        return self._provider.around()

    def arena(self, size: int) -> Tensor | None:
        """Return memory for buffers of a program; see `Sharing`."""
        return self._provider.arena(size)

    def _poster(self, call: Call, site: PostNumbers | None, tellings: Tellings) -> Poster:
        if call.team in self.carried and self._other is not None:
            return self._other.bind(call)
        team = self._teams.get(call.team)
        check_call(call, team is not None)
        shape = Shape(members=len(call.team), slot=self._provider.slot)
        return SymmetricPoster(call, team, shape, site, tellings)

    def close(self) -> None:
        """Give up all outboxes."""
        for team in self._teams.values():
            team.close()
        self._teams.clear()
        self._provider.close()
        if self._other is not None:
            self._other.close()

    def _make(self, team: tuple[int, ...]) -> tuple[SymmetricTeam | None, dict[int, str]]:
        """Make an outbox, and open those of the other members.

        Returns:
            the team, None where a member could not open another's; and who could not, and why: the
            same on all members.
        """
        shape = Shape(members=len(team), slot=self._provider.slot)
        store = PrefixStore(f"symmetric/{team_key(team)}", self.store)
        with ExitStack() as files:  # not needed once all members have opened the memory
            memory, card = self._offered(team, shape)
            files.callback(memory.close)
            cards = [
                Card.of(json.loads(text))
                for text in self._exchange(store, "card", team, json.dumps(card.fields()))
            ]
            opened_team: SymmetricTeam | None = None
            try:
                _check_host(self.rank, team, cards)
                memories = self._opened(team, memory, cards, files)
                opened_team = self._provider.team(
                    team, team.index(self.rank), shape, memories, store
                )
                problem = ""
            except (BackendError, OSError) as error:
                problem = str(error)
            answers = self._exchange(store, "opened", team, problem)
        refusals = {rank: text for rank, text in zip(team, answers, strict=True) if text}
        if refusals and opened_team is not None:
            opened_team.close()
        return (None if refusals else opened_team), refusals

    def _offered(self, team: tuple[int, ...], shape: Shape) -> tuple[SharedMemory, Card]:
        try:
            return self._provider.offer(shape)
        except OSError as error:
            raise not_connected(self.name, self.rank, team, error) from error

    def _opened(
        self,
        team: tuple[int, ...],
        memory: SharedMemory,
        cards: Sequence[Card],
        files: ExitStack,
    ) -> list[tuple[SharedMemory, Card]]:
        """Open the memory of all members."""
        memories = []
        for rank, card in zip(team, cards, strict=True):
            opened = memory if rank == self.rank else SharedMemory.of(card, memory.size)
            files.callback(opened.close)
            memories.append((opened, card))
        return memories

    def _exchange(self, store: Store, what: str, team: tuple[int, ...], said: str) -> list[str]:
        """Return each member's text, in team order."""
        keys = [f"{what}/{rank}" for rank in team]
        try:
            store.set(f"{what}/{self.rank}", said)
            store.wait(keys, timedelta(seconds=self.timeout_s))
            return [text.decode() for text in store.multi_get(keys)]
        except RuntimeError as error:
            raise not_connected(self.name, self.rank, team, error) from error


def _release(carrier: object, all_know: bool) -> None:
    """End the posts of a backend or a team on a device, where it has any."""
    if isinstance(carrier, Releasing):
        carrier.release(all_know)


def _ended(backend: object) -> bool:
    """End the waits for a backend, where that is possible; return whether it is."""
    return isinstance(backend, Interruptible) and backend.abort()


def _check_host(rank: int, team: tuple[int, ...], cards: Sequence[Card]) -> None:
    hosts = [card.process.host for card in cards]
    others = [r for r, host in zip(team, hosts, strict=True) if host != hosts[team.index(rank)]]
    if others:
        raise OSError(f"rank {others[0]} is on another host, or cannot be seen from here")


def _not_seen(rank: int, team: tuple[int, ...], refusals: Mapping[int, str]) -> BackendError:
    """Return the error of every member, where some cannot see the memory of others."""
    first, because = next(iter(refusals.items()))
    return BackendError(
        f"backend 'symmetric' cannot connect rank {rank} with the team {team}",
        where=f"on rank {first}" + (f", and {len(refusals) - 1} more" if len(refusals) > 1 else ""),
        because=first_line(OSError(because)),
        hint="it carries what stays on one host, between processes of one user that see each "
        "other, and GPUs that reach each other; name it for such axes alone: "
        "Options(backend='nccl, tp=symmetric')",
    )


@dataclass(slots=True, eq=False)
class SymmetricPoster:
    """A call bound to its team, with its moves for each dtype and set of buffer sizes.

    A team of one has no outboxes: it receives its own sends, by local work.
    """

    call: Call
    team: SymmetricTeam | None
    shape: Shape
    site: PostNumbers | None
    tellings: Tellings
    _by_size: dict[int, Callable[[Sequence[Tensor], Sequence[Tensor]], _Bound]] = field(
        default_factory=dict, init=False
    )

    def __call__(self, srcs: Sequence[Tensor], dsts: Sequence[Tensor]) -> Work:
        buffers = (*srcs, *dsts)
        if not buffers:
            return DONE
        dtype, itemsize = buffers[0].dtype, buffers[0].itemsize
        if any(x.dtype != dtype for x in buffers):  # a group of sends and receives may mix them
            check_dtypes(self.call, buffers)
            srcs, dsts, itemsize = bytes_of(srcs), bytes_of(dsts), 1
        find = self._by_size.get(itemsize)
        if find is None:
            make = partial(self._bound, itemsize)
            small = SMALL_BYTES
            find = self._by_size[itemsize] = composer(self.call, make, small, is_open=True)
        return find(srcs, dsts)(srcs, dsts)

    def prepare(self, srcs: Sequence[Tensor], dsts: Sequence[Tensor], place: PostSite) -> None:
        """Return None: a post reads the addresses of its buffers in each run."""
        return None

    def joined(self, norm: RowNorm, rows: int) -> Callable[..., Work] | None:
        """Return the function that posts the sum and a norm of its rows; see `Joining`."""
        return None if self.team is None else self.team.joined(self.call, norm, rows)

    def _bound(self, itemsize: int, composition: Composition, sizes: Sizes) -> _Bound:
        largest = itemsize * max(sum(sizes.srcs), sum(sizes.dsts))
        bound_moves = moves(self.call, composition, itemsize, self.shape)
        post = None
        if self.team is not None:
            sited = self._sited(itemsize, composition)
            post = self.team.poster(self.call, largest, sited)
        return _Bound(self.call, bound_moves, composition.scratch, post)

    def _sited(self, itemsize: int, composition: Composition) -> Sited | None:
        if self.site is None:
            return None
        return Sited(
            call=self.call,
            site=self.site,
            tellings=self.tellings,
            pieces=pieces(self.call, composition, "sends"),
            remade=partial(moves, self.call, composition, itemsize, self.shape),
        )


@dataclass(slots=True, eq=False)
class _Bound:
    """The moves of a call for buffers of certain sizes."""

    call: Call
    moves: tuple[Move, ...]
    scratch: int
    post: PostFunction | None

    def __call__(self, srcs: Sequence[Tensor], dsts: Sequence[Tensor]) -> Work:
        if self.post is not None:
            return self.post(self.moves, srcs, dsts, self.scratch)
        buffers = Buffers.of(srcs, dsts, self.scratch)
        change(self.call, self.moves, buffers.elements)  # type: ignore[arg-type]
        return DONE
