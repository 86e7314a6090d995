"""What exchanges take from host to host, beside what the parts of all ranks say."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from layouts.test_exchange import drawn
from mdfuse import Layout, Replicate
from mdfuse.communication import Communication
from mdfuse.layouts.boxes import box_size
from mdfuse.layouts.endpoints import Side
from mdfuse.layouts.exchange import Exchange
from mdfuse.layouts.inter_host_volume import (
    crossing,
    messages,
)


def in_turn(layout: Layout, ranks: int) -> Layout:
    """The same on hosts of as many ranks each, in the order of the mesh."""
    hosts = [i // ranks for i in range(layout.mesh.size)]
    return Layout(layout.mesh.with_hosts(hosts), layout.by_axis(), layout.order)


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_what_arrives_at_hosts(first: int) -> None:
    for seed in range(first, first + 50):
        source, goal, shape = drawn(seed, hosts=True)
        if 0 in shape:
            continue
        if seed % 2 and source.mesh == goal.mesh:
            source, goal = (in_turn(x, 1 + seed % 4) for x in (source, goal))
        exchange = Exchange(Side(source, shape), Side(goal, shape))
        busiest = crossing(exchange)
        comm = Communication(
            kind="Exchange", source=source, destination=goal, shape=shape, dtype=torch.float32
        )
        host = {
            r: h
            for m in (source.mesh, goal.mesh)
            for r, h in zip(m.ranks, m.hosts or (), strict=True)
        }
        into, out, most = Counter[int](), Counter[int](), 0
        for r in host:
            part = comm.part(r)
            for peer, box in zip(part.call.recvs if part.call else (), part.recvs, strict=True):
                if host[peer] != host[r]:
                    into[host[r]] += box_size(box)
                    out[host[peer]] += box_size(box)
            most = max(most, len(part.recvs))
        where = (seed, source, goal, shape)
        assert busiest >= max((0, *into.values())), where
        if Replicate() not in source.placements:  # nobody has a choice of who sends
            assert busiest == max((0, *into.values(), *out.values())), where
        assert messages(exchange) >= most, where
