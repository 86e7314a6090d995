"""A call bound to its team, posted directly or prepared once for buffers of one form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mdfuse.backends.base import Posting, PostSite, Work
from mdfuse.backends.c10d.c10d_posts import Team, build_post, prepared, prepared_together
from mdfuse.backends.nccl.lane import NcclLane
from mdfuse.backends.transfers import Post
from mdfuse.backends.work import DONE, explained
from mdfuse.layouts.call import Call


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
