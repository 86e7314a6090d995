"""Device memory under UCX, which knows nothing of streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Gate:
    """Tells when UCX may use the buffers of one post.

    Closed while something is under way that was queued before the post, or that the post's own
    local work queued. That work has a stream of its own: it is done when any wait makes the post
    progress, where another stream may be current, with much in its queue.

    Args:
        stream: for local work.
    """

    __slots__ = ("_last", "_stream")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._last = torch.cuda.current_stream(stream.device).record_event()

    def is_open(self) -> bool:
        """Whether all of it is done; the host has seen it, so that every stream sees the result."""
        is_done: bool = self._last.query()
        return is_done

    @contextmanager
    def local_work(self) -> Iterator[None]:
        """Queue local work of the post; closed until it is done."""
        with torch.cuda.stream(self._stream):
            yield
            self._last = self._stream.record_event()
