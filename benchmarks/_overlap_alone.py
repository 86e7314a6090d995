"""One GPU that stands for a rank: products beside copies from the host, in mdfuse's programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from _graphs import HandGraph
from _measure import Contender, Row, device_time, eagerly, host_time, interleave
from _overlap_copies import Copies, lane, pinned, stand_in
from _overlap_shapes import FORMS, Parts, Shape, compare, definition, figures, run_of
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh

#: Calls of a turn, and clock cycles, about four milliseconds, in which the host queues them.
_FOLLOWING, _AHEAD = 4, 8_000_000

#: Bytes by which the rate of copies from the host is measured.
_PROBE = 256 << 20

_Call = Callable[[], Any]


@dataclass
class Alone:
    """The measurement on one device.

    Attributes:
        device: a GPU, or the CPU to see that it runs.
        size: how many ranks there would be.
        rounds: how many.
        link: bytes per second of the link that is stood in for.
        eager: what mdfuse ran eagerly, and why; filled while measuring.
    """

    device: torch.device
    size: int
    rounds: int
    link: float
    eager: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.comm, self.copies = stand_in(self.size, self.device)
        self.mesh = DeviceMesh.arange(tp=self.size)
        self.dtype = torch.bfloat16 if self.is_gpu else torch.float32
        self.host_rate = self._host_rate() if self.is_gpu else self.link
        self.share = min(1.0, self.host_rate / self.link)

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def where(self) -> dict[str, object]:
        """What is stored of the place."""
        return {
            "ranks": 1,
            "stands for rank 0 of": self.size,
            "device": str(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "link, bytes per second": self.link,
            "copies from the host, bytes per second": self.host_rate,
            "eager": self.eager,
        }

    def close(self) -> None:
        """Leave the world that it stood for."""
        self.comm.close()

    def settle(self) -> None:
        """Wait until nothing is under way."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def rows(self, shape: Shape) -> Iterator[Row]:
        """The figures of one shape: mdfuse's programs against the ideal, in chunks and plain."""
        parts = shape.parts(self.size, self.device, self.dtype)
        incoming = {r: pinned(x, self.device) for r, x in shape.incoming(parts).items()}
        right, mine = shape.right(parts), parts[0]
        most = shape.moved(self.size, mine.x.itemsize)
        calls: dict[str, _Call] = {}
        for name, pieces in FORMS.items():
            self.copies.expect(incoming, 1.0, most)
            check = run_of(self._program(shape, pieces, f"{name}, checked"), mine)
            for _ in range(3):  # eager, captured, replayed
                compare(f"{shape}, {name}", check(), right)
            self.copies.expect(incoming, self.share, most)
            program = self._program(shape, pieces, name)
            calls[name] = run_of(program, mine)
            for _ in range(3):
                calls[name]()
            self.eager.extend(f"{shape}, {name}: {line}" for line in eagerly(program))
        calls["product"] = self._steady(self._product(shape, parts))
        calls["copies"] = self._steady(self._moved(shape, incoming, mine))
        times = interleave(
            {name: Contender(call=call) for name, call in calls.items()},
            rounds=self.rounds,
            batch=_FOLLOWING if self.is_gpu else 1,
            settle=self.settle,
            stopwatch=partial(device_time, ahead=_AHEAD) if self.is_gpu else host_time,
        )
        yield from figures(shape, times, "copies", has_limit=self.is_gpu)

    def _program(self, shape: Shape, pieces: int, name: str) -> mf.Program:
        graph = "always" if self.is_gpu else "never"
        options = mf.Options(graph=graph, compile="never", overlap="never")
        fd = definition(shape, self.mesh, self.dtype, pieces, name)
        return mf.compile(fd, options)

    def _product(self, shape: Shape, parts: list[Parts]) -> _Call:
        """The product of a rank, all at once."""
        is_first = shape.kind == "AG+MM"
        x = torch.cat([shape.ready(p.x) for p in parts]) if is_first else parts[0].x
        y, w = x.new_empty(shape.rows, shape.columns), parts[0].w

        def compute() -> Tensor:
            shape.ready(parts[0].x)
            return torch.mm(x, w, out=y)

        return compute

    def _moved(self, shape: Shape, incoming: dict[int, Tensor], mine: Parts) -> _Call:
        """The copies of a rank into it and out of it, side by side."""
        copies = Copies(self.device)
        size = shape.moved(self.size, mine.x.itemsize) // len(incoming)
        copies.expect(incoming, self.share, size)
        into, out = (torch.empty(size, dtype=torch.uint8, device=self.device) for _ in "io")

        def move() -> Tensor:
            copies.begin()
            for peer in incoming:
                copies.send(out)
                copies.receive(peer, into)
            for join in copies.end():
                join()
            return into

        return move

    def _steady(self, call: _Call) -> _Call:
        """What is timed: on a GPU a graph, whose buffers are the call's."""
        if not self.is_gpu:
            return call
        graph = HandGraph(call, ()).graph

        def replay(_: _Call = call) -> None:
            graph.replay()

        return replay

    def _host_rate(self) -> float:
        """Bytes per second of a copy from pinned memory."""
        source = torch.empty(_PROBE, dtype=torch.uint8, pin_memory=True)
        into, queue = torch.empty(_PROBE, dtype=torch.uint8, device=self.device), lane(self.device)

        def copy() -> None:
            queue.begin()
            queue.copy(into.data_ptr(), source.data_ptr(), _PROBE)
            queue.end()()

        copy()
        return _PROBE / min(device_time(copy) for _ in range(5)) * 1e9
