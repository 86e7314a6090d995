"""Decide whether the ranks of a communicator post through nccl4py: all of them, or none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mdfuse.backends.base import Around, Sharing, Tracking
from mdfuse.backends.nccl import lane as nccl_lane
from mdfuse.backends.nccl import nccl_library as nccl_library
from mdfuse.backends.nccl.cuda_driver import CudaDevice
from mdfuse.backends.nccl.lane import NcclLane
from mdfuse.backends.post_notes import PostInfo, Track
from mdfuse.errors import BackendError
from mdfuse.runtime.agreement.rendezvous import Meetings
from mdfuse.runtime.watch.watch import Watch
from mdfuse.torch_private import Store

_log = logging.getLogger("mdfuse.comm")

#: How many posts of a graph a report lists.
_LISTED = 6

#: The first words of the text of a rank with fast_lane="always".
_ALWAYS = "always"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """The maker of all lanes of this rank, on one device and under one watch."""

    rank: int
    binding: Any
    device: CudaDevice
    watch: Watch

    def open(self, team: tuple[int, ...], store: Store) -> NcclLane:
        """Make a team's lane; all members call it, for their teams in one global order."""
        self.watch.start()
        return nccl_lane.open_lane(
            team,
            rank=self.rank,
            store=store,
            binding=self.binding,
            device=self.device,
            noter=self.watch,
        )

    def track(self, stream: int) -> Track:
        """Return a new track of posts on a stream."""
        return self.device.track(stream)

    def close(self) -> None:
        """Stop the watch; lanes are closed before."""
        self.watch.close()


def track_of(watch: Watch, stream: int, makers: Iterable[object]) -> Track | None:
    """Return the track of all replays on a stream, since its memory is never given back.

    One serves all programs: those that communicate run one after the other.

    Args:
        watch: keeps it.
        stream: on which graphs are replayed.
        makers: of tracks, the preferred one first.
    """
    if stream not in watch.tracks:
        tracks = [x.track(stream) for x in makers if isinstance(x, Tracking)]
        if (track := next(filter(None, tracks), None)) is None:
            return None
        watch.tracks[stream] = track
    return watch.tracks[stream]


class Replays:
    """The notes of a program's captured graphs, and of each replay.

    The watch sees a replay as one post. Marks inside the graph would tell which of its posts hangs,
    but each is a node that the device stops for, which would slow down small programs.

    Args:
        watch: takes the notes.
        track: of the stream on which graphs are replayed; see `track_of`.
        name: of a program, the same on all ranks that replay it, and used for it alone.
        team: the ranks that replay it, the same on all of them.
        sharing: backends that may have calls around each replay, too.
    """

    def __init__(
        self,
        watch: Watch,
        track: Track,
        name: str,
        team: tuple[int, ...],
        sharing: Iterable[Sharing] = (),
    ) -> None:
        self._watch, self._track, self._name, self._team = watch, track, name, team
        around = [x.around() for x in sharing]
        self._around = [x for x in around if x is not None]

    def begin(self) -> None:
        """Forget the posts captured before: a capture begins."""
        self._watch.captured.clear()

    def end(self, region: int) -> Around:
        """End the capture of a region; return the calls before and after each replay."""
        posts = tuple(self._watch.captured)
        listed = ", ".join(f"{post.kind} ({post.where})" for post in posts[:_LISTED])
        others = f" and {len(posts) - _LISTED} more" if len(posts) > _LISTED else ""
        name = f"{self._name}, region {region}"
        subject = PostInfo(
            kind="replay of a graph",
            team=self._team,
            bytes=sum(post.bytes for post in posts),
            where=f"{name}: {listed}{others}",
            family=f"replays of {name}",
        )
        noted = self._watch.prepare(subject, self._track)
        if not self._around:
            return noted
        before, behind = zip(*self._around, noted, strict=True)
        return partial(_all, before), partial(_all, behind[::-1])


def _all(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()


def agree_on_lanes(
    setting: str,
    *,
    rank: int,
    device: torch.device,
    watch: Watch,
    meetings: Meetings,
) -> Lanes | None:
    """Ask all ranks whether they can use fast lanes; None where one of them cannot.

    A post through a lane and one through a process group do not meet, so that all ranks must use
    the same. All ranks call it once, under backend nccl.

    Raises:
        BackendError: a rank says "always" and a rank cannot, or says "never". All ranks raise.
    """
    refusal = nccl_library.why_not() if setting != "never" else ("fast_lane='never'", "say 'auto'")
    said = (_ALWAYS if setting == "always" else "", *(refusal or ("", "")))
    texts = meetings.exchange("\n".join(said) if any(said) else None)
    answers = [(text or "\n\n").split("\n", 2) for text in texts]
    against = {
        other: (because, hint) for other, (_, because, hint) in enumerate(answers) if because
    }
    if not against:
        gpu = CudaDevice(device)
        return Lanes(rank=rank, binding=nccl_library.load(), device=gpu, watch=watch)
    first, (because, hint) = next(iter(against.items()))
    if any(insists == _ALWAYS for insists, _, _ in answers):
        raise BackendError(f"rank {first} has no fast lane", because=because, hint=hint)
    _log.info("rank %d: no fast lane: rank %d: %s", rank, first, because)
    return None
