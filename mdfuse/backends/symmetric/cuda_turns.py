"""Eager posts and replays of graphs take turns, in the order in which the host queues them.

A capture of a lane is replayed on another stream. So a lane's order alone would let eager posts and
replays use the same words at once, where neither the program nor its caller orders the two.
"""

from __future__ import annotations

from mdfuse.backends.nccl.cuda_driver import CudaDevice
from mdfuse.backends.symmetric.cuda_memory import CudaLane


class LaneOrder:
    """The order of all work queued on the lanes of one rank, and of replays.

    Args:
        device: its GPU.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device, self._replayed = device, device.event()
        #: the stream of the last replay; None: there was none
        self._stream: int | None = None
        #: the lanes that were posted to since then
        self._posted: set[CudaLane] = set()

    def post(self, lane: CudaLane) -> None:
        """Let a lane wait for the last replay, before an eager post."""
        if lane not in self._posted and lane.era() == 0:
            self._posted.add(lane)
            if self._stream is not None:
                lane.make(self._join)

    def before(self) -> None:
        """Let the current stream wait for all work queued before, ahead of a replay on it."""
        for lane in self._posted:
            lane.end()()
        self._posted.clear()
        if self._stream not in (None, self._device.current_stream()):
            self._join()

    def behind(self) -> None:
        """Note a replay on the current stream."""
        self._stream = self._device.current_stream()
        self._device.record(self._replayed, self._device.stream(self._stream))

    def _join(self) -> None:
        device = self._device
        device.wait(device.stream(device.current_stream()), self._replayed, 0)
