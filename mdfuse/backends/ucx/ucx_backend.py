"""Communications through UCX: ucxx moves messages, and collectives are composed of messages."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch import Tensor

from mdfuse.backends.algorithms import Composition
from mdfuse.backends.base import PostSite, Work, check_call, check_usable
from mdfuse.backends.staging import Staged
from mdfuse.backends.teams import new_teams, not_connected, team_key
from mdfuse.backends.transfers import composer
from mdfuse.backends.ucx.message_work import ComposedWork, Gate, UcxBuffers
from mdfuse.backends.ucx.ucx_engine import MOST_TEAMS, Channel, Engine
from mdfuse.backends.ucx.ucx_library import load, why_not, why_staged
from mdfuse.backends.work import DONE
from mdfuse.errors import BackendError
from mdfuse.layouts.call import Call
from mdfuse.torch_private import PrefixStore, Store

_log = logging.getLogger("mdfuse.comm")

#: The most bytes that may arrive in one step; larger communications take several. Each step costs
#: time where ranks outnumber cores (all-reduce of 128 KiB, 4 ranks on 2 cores: 1.2 ms in one step,
#: 1.6 in four); more steps let an all-reduce move fewer bytes, which pays from about 1 MiB on.
SMALL_BYTES = 512 * 1024


@dataclass(kw_only=True, eq=False)
class UcxBackend:
    """A backend that sends messages through UCX; each team has tags of its own.

    Attributes:
        rank: this rank.
        device: where this rank's buffers are.
        store: shared by all ranks; nobody else uses its keys.
        timeout_s: seconds after which a communication that does not finish is an error.
        is_one_host: all ranks are on this host, so that UCX listens on its loopback only.

    Raises:
        BackendError: this process cannot use UCX.
    """

    name = "ucx"

    rank: int
    device: torch.device
    store: Store
    timeout_s: float
    is_one_host: bool = False
    _channels: dict[tuple[int, ...], Channel] = field(default_factory=dict, init=False)
    _why_staged: str | None = field(default=None, init=False)
    _stream: torch.cuda.Stream | None = field(default=None, init=False)  # for local work

    def __post_init__(self) -> None:
        check_usable(self.name, why_not())
        self._store, device = PrefixStore("ucx", self.store), self.device
        # a device finishes its queue without an event of UCX, which would end the sleep
        can_sleep = device.type != "cuda"
        self._engine = Engine(load(), can_sleep=can_sleep, is_one_host=self.is_one_host)
        if device.type == "cuda":
            self._why_staged = why_staged(self._engine.transports)
            if self._why_staged is None:
                self._stream = torch.cuda.Stream(device)
            elif self.rank == 0:
                _log.warning("backend ucx: all through pinned host memory: %s", self._why_staged)
        self._store.set(f"address/{self.rank}", self._engine.address.hex())

    def abort(self) -> bool:
        """End the waits of this rank with an error; see `Interruptible`."""
        self._engine.aborted += 1
        return True

    def prepare(self, teams: Iterable[tuple[int, ...]]) -> None:
        """Make the teams that this rank is in; see `Backend.prepare`.

        A member is contacted when this rank first sends to it or receives from it.
        """
        for team in new_teams(teams, self.rank, self._channels):
            self._channels[team] = self._make(team)

    def bind(self, call: Call) -> UcxPoster | Staged:
        """Prepare a call that will be posted many times; see `Backend.bind`."""
        channel = self._channels.get(call.team)
        check_call(call, channel is not None)
        alone = Channel(0, self.rank)
        post = UcxPoster(call, channel or alone, self._engine, self.timeout_s, self._stream)
        return Staged(post, call, self.device) if self._why_staged else post

    def close(self) -> None:
        """Give up all connections."""
        self._channels.clear()
        self._engine.close()

    def _make(self, team: tuple[int, ...]) -> Channel:
        """Make a team: learn its number and its members' addresses from the store."""
        key = f"team/{team_key(team)}"
        if team[0] == self.rank:
            self._store.set(key, str(self._store.add("teams", 1)))
        unknown = self._engine.missing(r for r in team if r != self.rank)
        keys = [f"address/{r}" for r in unknown]
        try:
            self._store.wait([key, *keys], timedelta(seconds=self.timeout_s))
            number, *addresses = self._store.multi_get([key, *keys])
        except RuntimeError as error:
            raise not_connected("ucx", self.rank, team, error) from error
        for rank, address in zip(unknown, addresses, strict=True):
            self._engine.introduce(rank, bytes.fromhex(address.decode()))
        return Channel(_checked(int(number)), self.rank)


def _checked(number: int) -> int:
    if number >= MOST_TEAMS:
        raise BackendError(
            f"ucx cannot make team {number} of this world",
            because=f"a tag has room for {MOST_TEAMS - 1} teams",
            hint="close the communicator and make a new one",
        )
    return number


@dataclass(slots=True, eq=False)
class UcxPoster:
    """A call bound to its team, with one composition for each set of buffer sizes."""

    call: Call
    channel: Channel
    engine: Engine
    timeout_s: float
    stream: torch.cuda.Stream | None = None
    compose: Callable[[Sequence[Tensor], Sequence[Tensor]], Composition] = field(init=False)

    def __post_init__(self) -> None:
        self.compose = composer(self.call, lambda composition, _: composition, SMALL_BYTES)

    def __call__(self, srcs: Sequence[Tensor], dsts: Sequence[Tensor]) -> Work:
        buffers = (*srcs, *dsts)
        if not buffers:
            return DONE
        composition = self.compose(srcs, dsts)
        if not composition.steps:
            return DONE
        first = buffers[0]
        scratch = torch.empty(composition.scratch, dtype=first.dtype, device=first.device)
        return ComposedWork(
            self.call,
            composition,
            UcxBuffers(srcs, dsts, scratch),
            channel=self.channel,
            engine=self.engine,
            timeout_s=self.timeout_s,
            gate=None if self.stream is None else Gate(self.stream),
        )

    def prepare(self, srcs: Sequence[Tensor], dsts: Sequence[Tensor], place: PostSite) -> None:
        """Return None: no post is one call of the library's own functions."""
