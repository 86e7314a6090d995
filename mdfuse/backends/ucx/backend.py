"""Communications through UCX: ucxx moves messages, and collectives are composed of messages."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
from torch import Tensor

from mdfuse.backends.base import PostSite, Work, check_call
from mdfuse.backends.c10d.groups import PrefixStore, Store
from mdfuse.backends.staging import Staged
from mdfuse.backends.transfers import composer
from mdfuse.backends.ucx.engine import MOST_TEAMS, Channel, Engine
from mdfuse.backends.ucx.gate import Gate
from mdfuse.backends.ucx.library import load, why_not, why_staged
from mdfuse.backends.ucx.work import Buffers, ComposedWork
from mdfuse.backends.work import DONE, first_line
from mdfuse.errors import BackendError
from mdfuse.layouts.call import Call

_log = logging.getLogger("mdfuse.comm")

#: How many bytes may arrive in one step rather than in several. Each step costs time where ranks
#: outnumber cores (all-reduce of 128 KiB, 4 ranks on 2 cores: 1.2 ms in one step, 1.6 in four);
#: more steps let an all-reduce move fewer bytes, which pays from about 1 MiB on.
SMALL_BYTES = 512 * 1024


class UcxBackend:
    """A backend that sends messages through UCX; each team has tags of its own.

    Args:
        rank: this rank.
        device: where this rank's buffers are.
        store: shared by all ranks; nobody else uses its keys.
        timeout_s: seconds after which a communication that does not finish is an error.
        is_one_host: all ranks are on this host, so that UCX listens on its loopback only.

    Raises:
        BackendError: this process cannot use UCX.
    """

    name = "ucx"

    def __init__(
        self,
        *,
        rank: int,
        device: torch.device,
        store: Store,
        timeout_s: float,
        is_one_host: bool = False,
    ) -> None:
        refusal = why_not()
        if refusal:
            because, hint = refusal
            raise BackendError("backend 'ucx' cannot be used", because=because, hint=hint)
        self._rank = rank
        self._device = device
        self._store = PrefixStore("ucx", store)
        self._timeout_s = timeout_s
        # a device finishes its queue without an event of UCX, which would end the sleep
        can_sleep = device.type != "cuda"
        self._engine = Engine(load(), can_sleep=can_sleep, is_one_host=is_one_host)
        self._why_staged: str | None = None
        self._stream: torch.cuda.Stream | None = None  # for local work on a device
        if device.type == "cuda":
            self._why_staged = why_staged(self._engine.transports)
            if self._why_staged is None:
                self._stream = torch.cuda.Stream(device)
            elif rank == 0:
                _log.warning("backend ucx: all through pinned host memory: %s", self._why_staged)
        self._channels: dict[tuple[int, ...], Channel] = {}
        self._store.set(f"address/{rank}", self._engine.address.hex())

    def abort(self) -> bool:
        """End the waits of this rank with an error; see `Interruptible`."""
        self._engine.aborted += 1
        return True

    def prepare(self, teams: Iterable[tuple[int, ...]]) -> None:
        """Make the teams that this rank is in; ranks pass their teams in one global order.

        Teams that exist, have one member, or lack this rank are skipped. A member is contacted when
        this rank first sends to it or receives from it.

        Raises:
            BackendError: a member did not come in time, or there are too many teams.
        """
        for team in teams:
            if len(team) > 1 and self._rank in team and team not in self._channels:
                self._channels[team] = self._make(team)

    def bind(self, call: Call) -> UcxPoster | Staged:
        """Prepare a call that will be posted many times.

        Raises:
            CommunicationError: the kind is unknown, or its team was not prepared.
        """
        channel = self._channels.get(call.team)
        check_call(call, channel is not None)
        alone = Channel(0, self._rank)
        post = UcxPoster(call, channel or alone, self._engine, self._timeout_s, self._stream)
        return Staged(post, call, self._device) if self._why_staged else post

    def close(self) -> None:
        """Give up all connections."""
        self._channels.clear()
        self._engine.close()

    def _make(self, team: tuple[int, ...]) -> Channel:
        """Make a team: learn its number and its members' addresses from the store."""
        key = "team/" + hashlib.sha256(repr(team).encode()).hexdigest()[:32]
        if team[0] == self._rank:
            self._store.set(key, str(self._store.add("teams", 1)))
        unknown = self._engine.missing(r for r in team if r != self._rank)
        keys = [f"address/{r}" for r in unknown]
        try:
            self._store.wait([key, *keys], timedelta(seconds=self._timeout_s))
            number, *addresses = self._store.multi_get([key, *keys])
        except RuntimeError as error:
            raise BackendError(
                f"ucx cannot connect rank {self._rank} with the team {team}",
                because=first_line(error),
                hint="every member must prepare the team; check that their hosts reach each other",
            ) from error
        for rank, address in zip(unknown, addresses, strict=True):
            self._engine.introduce(rank, bytes.fromhex(address.decode()))
        return Channel(_checked(int(number)), self._rank)


def _checked(number: int) -> int:
    if number >= MOST_TEAMS:
        raise BackendError(
            f"ucx cannot make team {number} of this world",
            because=f"a tag has room for {MOST_TEAMS - 1} teams",
            hint="close the communicator and make a new one",
        )
    return number


class UcxPoster:
    """A call bound to its team, with one composition for each set of buffer sizes."""

    __slots__ = ("_call", "_channel", "_compose", "_engine", "_stream", "_timeout_s")

    def __init__(
        self,
        call: Call,
        channel: Channel,
        engine: Engine,
        timeout_s: float,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        self._call = call
        self._channel = channel
        self._engine = engine
        self._timeout_s = timeout_s
        self._stream = stream
        self._compose = composer(call, lambda composition, _: composition, SMALL_BYTES)

    def __call__(self, srcs: Sequence[Tensor], dsts: Sequence[Tensor]) -> Work:
        buffers = (*srcs, *dsts)
        if not buffers:
            return DONE
        composition = self._compose(srcs, dsts)
        if not composition.steps:
            return DONE
        first = buffers[0]
        scratch = torch.empty(composition.scratch, dtype=first.dtype, device=first.device)
        return ComposedWork(
            self._call,
            composition,
            Buffers(srcs, dsts, scratch),
            channel=self._channel,
            engine=self._engine,
            timeout_s=self._timeout_s,
            gate=None if self._stream is None else Gate(self._stream),
        )

    def prepare(self, srcs: Sequence[Tensor], dsts: Sequence[Tensor], place: PostSite) -> None:
        """Return None: no post is one call of the library's own functions."""
