"""Order UCX's use of device memory with streams, which UCX does not know."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Gate:
    """A gate that is open when UCX may use the buffers of one post.

    The gate is closed while work is under way that was queued before the post, or that belongs to
    the post's own local work. Local work has a stream of its own: any wait may make the post
    progress, and the stream that is current there may have a long queue.
    """

    __slots__ = ("_last", "_stream")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._last = torch.cuda.current_stream(stream.device).record_event()

    def is_open(self) -> bool:
        """Return whether that work is done.

        The host sees its end here, so that work queued afterwards sees the result on any stream.
        """
        is_done: bool = self._last.query()
        return is_done

    @contextmanager
    def local_work(self) -> Iterator[None]:
        """Queue local work of the post in this context; the gate is closed until it is done."""
        with torch.cuda.stream(self._stream):
            yield
            self._last = self._stream.record_event()
