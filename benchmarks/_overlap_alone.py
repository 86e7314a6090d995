"""One GPU that stands for a rank: products beside copies from the host, in mdfuse's programs.

They are those of the backend symmetric, whose ranks copy out of each other's memory.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from _graphs import HandGraph
from _measure import Contender, Row, device_time, eagerly, host_time, interleave
from _overlap_by_hand import ByHand, Cut, cuts
from _overlap_copies import SYMMETRIC, Copies, lane, pinned, stand_in
from _overlap_shapes import FORMS, Parts, Shape, compare, definition, figures, run_of
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh

#: Calls of a turn, and clock cycles, about four milliseconds, in which the host queues them.
_FOLLOWING, _AHEAD = 4, 8_000_000

#: Bytes by which the rate of copies from the host is measured.
_PROBE = 256 << 20

#: Runs after which a program has measured both of its forms, and replays the one that it keeps.
_TRIED = 18

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
        by_hand: shape -> the quickest of the cuts by hand, likewise.
        by_itself: shape -> what mdfuse says of what it chose, likewise.
    """

    device: torch.device
    size: int
    rounds: int
    link: float
    eager: list[str] = field(default_factory=list)
    by_hand: dict[str, str] = field(default_factory=dict)
    by_itself: dict[str, list[str]] = field(default_factory=dict)

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
        """The stored facts about the machine."""
        return {
            "ranks": 1,
            "stands for rank 0 of": self.size,
            "device": str(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "link, bytes per second": self.link,
            "copies from the host, bytes per second": self.host_rate,
            "eager": self.eager,
            "by hand": self.by_hand,
            "by itself": self.by_itself,
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
        calls["by itself"] = self._chosen(shape, mine, right, incoming, most)
        by_hand = self._cut(shape, mine, right, incoming, most) if self.size == 2 else {}
        calls.update({f"by hand: {cut}": call for cut, call in by_hand.items()})
        calls["product"] = self._steady(self._product(shape, parts))
        calls["copies"] = self._steady(self._moved(shape, incoming, mine))
        times = interleave(
            {name: Contender(call=call) for name, call in calls.items()},
            rounds=self.rounds,
            batch=_FOLLOWING if self.is_gpu else 1,
            settle=self.settle,
            stopwatch=partial(device_time, ahead=_AHEAD) if self.is_gpu else host_time,
        )
        tried = {cut: times.pop(f"by hand: {cut}") for cut in by_hand}
        if tried:
            best = min(tried, key=lambda cut: statistics.median(tried[cut]))
            self.by_hand[str(shape)], times["by hand"] = str(best), tried[best]
        yield from figures(shape, times, "copies", has_limit=self.is_gpu)

    def _chosen(
        self, shape: Shape, mine: Parts, right: Tensor, incoming: dict[int, Tensor], most: int
    ) -> _Call:
        """The program in the form that mdfuse keeps, of that which it chooses and the plain one."""
        calls: list[_Call] = []
        for name, share in (("checked", 1.0), ("timed", self.share)):
            self.copies.expect(incoming, share, most)
            program = self._program(shape, 0, f"by itself, {name}", "measure")
            calls.append(run_of(program, mine))
            for _ in range(_TRIED):
                result = calls[-1]()
            if name == "checked":
                compare(f"{shape}, by itself", result, right)
        lines = map(str.strip, program.explain().splitlines())
        self.by_itself[str(shape)] = [line for line in lines if line.startswith("overlap: ")]
        return calls[-1]

    def _cut(
        self, shape: Shape, mine: Parts, right: Tensor, incoming: dict[int, Tensor], most: int
    ) -> dict[Cut, _Call]:
        """The cuts by hand, whose values are compared first."""
        calls: dict[Cut, _Call] = {}
        copies = Copies(self.device)
        hand = ByHand(shape, mine, copies)
        for cut in cuts(shape):
            call = hand.call(cut)
            copies.expect(incoming, 1.0, most)
            for _ in range(2):  # the second time what is left of the first would show
                hand.poison()
                compare(f"{shape}, by hand: {cut}", call(), right)
            copies.expect(incoming, self.share, most)
            calls[cut] = self._steady(call)
        return calls

    def _program(
        self,
        shape: Shape,
        pieces: int | tuple[int, ...],
        name: str,
        overlap: Literal["never", "measure"] = "never",
    ) -> mf.Program:
        options = mf.Options(
            backend=SYMMETRIC,
            graph="always" if self.is_gpu else "never",
            compile="never",
            overlap=overlap,
            costs="h100",
        )
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
        """Return the timed function: on a GPU a graph, whose buffers are the call's."""
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
