"""Peaks of pipelines to the byte, by a ledger of what each call brings and takes, kept by hand."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import pytest
from helpers.pipelines import batch_of, meshes, sines

import mdfuse as mf
from mdfuse.seeing.rank_classes import rank_classes
from mdfuse.seeing.rank_groups import rank_groups

ROWS, WIDTH = 6, 5
#: Bytes of an activation of a microbatch, of a weight or its gradient, of a number.
A, W, ONE = ROWS * WIDTH * 8, WIDTH * WIDTH * 8, 8
CALL = re.compile(r"  call ([FBIWT])(\d+)\((\d+)\)")


@dataclass
class Ledger:
    """What a rank holds, in bytes.

    A forward of a stage `y = sin(h w)` leaves z = h w for `cos`, beside h, which came from the
    stage before it; of the first stage, h is a part of x, and takes nothing by itself.
    """

    held: int
    peak: int = 0
    #: what was sent, and is waited for before the next one is
    sent: int = 0
    log: list[int] = field(default_factory=list)

    def move(self, *changes: int) -> None:
        """Take up or give back, one after the other."""
        for change in changes:
            self.held += change
            self.peak = max(self.peak, self.held)

    def send(self) -> None:
        self.move(-self.sent)
        self.sent = A


def by_hand(calls: list[tuple[str, int, int]], places: list[int], group: int, count: int) -> int:
    """The peak of a rank group: weights, sums, what is live, posted ahead, kept for W, sent."""
    last, own = len(places) - 1, [s for s, g in enumerate(places) if g == group]
    ledger = Ledger(held=len(own) * 2 * W)
    ledger.move(*(n for n, has in ((count * A, 0 in own), (count * A, last in own)) if has))
    ledger.move(*[ONE] * (2 * (last in own)))  # the loss, and the 1 that its gradient begins with
    for phase, stage, to in calls:
        is_first, is_last = stage == 0, stage == last
        if phase == "T" and places[stage] == places[to]:
            continue  # it stays where it is
        if phase == "T":
            if places[to] == group:
                ledger.move(A)
            if places[stage] == group:
                ledger.send()
        elif stage in own and phase == "F":
            ledger.move(A, A)  # z, y
            if is_last:
                ledger.move(A, -A, ONE, -A, -ONE)  # y t, its sum
        elif stage in own:
            if phase != "W" or is_first:  # the first stage has no I
                ledger.move(A * is_last, A, -A, A, -2 * A)  # dy, cos, less z, dz, less cos and dy
                ledger.move(A * (not is_first))  # dh
            if phase != "I":
                ledger.move(W, -W, -A, -A * (not is_first))  # dw, less dz and h
    return ledger.peak


CASES = {
    "gpipe": [0, 1, 2],
    "1f1b": [0, 1, 2, 3],
    "zb1p": [0, 1, 2, 3],
    "interleaved": [0, 1, 0, 1],
    "zbv": [0, 1, 1, 0],
    "dualpipev": [0, 1, 1, 0],
}


@pytest.mark.parametrize("count", [1, 4, 8])
@pytest.mark.parametrize("name", CASES)
def test_the_peak_of_each_rank_group(name: str, count: int) -> None:
    places = CASES[name]
    count = max(count, 4) if name == "dualpipev" else count
    every = meshes(1 + max(places))
    net = sines([every[n] for n in places], batch=count * ROWS, width=WIDTH)
    step = mf.pipeline(net.definition, microbatches=count, batch=batch_of(net), schedule=name)
    assert step.schedule is not None
    calls = []
    for phase, stages, _ in CALL.findall(str(step)):
        stage, *to = map(int, stages)
        calls.append((phase, stage, *(to or [-1])))
    wanted = [by_hand(calls, places, g, count) for g in range(len(every))]
    groups = rank_groups(step.host, step.schedule, rank_classes(step.host))
    assert [g.peak for g in groups] == wanted
    assert list(mf.simulate(step, [x.clone() for x in net.inputs]).peak_bytes) == wanted
