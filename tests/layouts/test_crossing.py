"""What exchanges take from host to host, beside what the parts of all ranks say."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from layouts.test_exchange import drawn, held
from mdfuse import Replicate
from mdfuse.communication import Communication
from mdfuse.layouts.boxes import box_size
from mdfuse.layouts.crossing import crossing
from mdfuse.layouts.exchange import Exchange
from mdfuse.layouts.side import Side


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_what_arrives_at_hosts(first: int) -> None:
    for seed in range(first, first + 50):
        source, goal, shape = drawn(seed, hosts=True)
        if 0 in shape:
            continue
        found = crossing(Exchange(Side(source, shape), Side(goal, shape)))
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
        lacks = [
            held(goal, shape, r).difference(
                *(held(source, shape, s) for s in source.mesh.ranks if host[s] == host[r])
            )
            for r in goal.mesh.ranks
        ]
        where = (seed, source, goal, shape)
        assert found.least == max(map(len, lacks)), where
        assert found.busiest >= max((0, *into.values())), where
        if Replicate() not in source.placements:  # nobody has a choice of who sends
            assert found.busiest == max((0, *into.values(), *out.values())), where
        assert found.messages >= most, where
