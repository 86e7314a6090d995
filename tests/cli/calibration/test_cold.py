"""What is measured behind products that fill a cache, and with more weights than any has."""

from dataclasses import replace

import pytest

from mdfuse import DeviceMesh
from mdfuse.cli.calibration import cold
from mdfuse.cli.calibration.cold import KINDS
from mdfuse.cli.calibration.scales import CPU
from mdfuse.cli.calibration.subjects import TURNS
from mdfuse.hir.program import HostProgram
from mdfuse.hir.rank.pipelines import project
from mdfuse.hir.rank.unrolled import written_out
from mdfuse.seeing.amounts import buffer_bytes, is_work

MESH = DeviceMesh([0])

#: 64 KiB of weights stay in a cache; a product of 16 KiB fills that of a core.
SMALL = replace(CPU, cache=1 << 16, core=1 << 12, features=(16, 64))


def work(host: HostProgram) -> list[str]:
    return [i.fn for i in written_out(project(host, 0)).instructions if is_work(i)]


@pytest.mark.parametrize("kind", KINDS)
def test_work_comes_behind_products_that_fill_a_cache(kind: str) -> None:
    both, hot, fills = (
        cold.turns(SMALL, MESH, *given) for given in ((kind, True), (kind, False), (None, True))
    )
    (name,) = set(work(hot))
    assert work(hot) == [name] * TURNS and work(fills) == ["matmul"] * TURNS
    assert work(both) == ["matmul", name] * TURNS
    mine = written_out(project(fills, 0))
    read = {x for i in mine.instructions for x in i.reads if i.fn == "matmul"}
    weights = [buffer_bytes(mine, x) for x in read]
    assert sum(size >= SMALL.core for size in weights) == TURNS, "each product has its own"


def test_weights_of_more_bytes_than_a_cache() -> None:
    made = cold.streamed(SMALL, MESH, 4)
    for (size, host), total in zip(made, (1 << 16, 1 << 19), strict=True):
        mine = written_out(project(host, 0))
        read = {x for i in mine.instructions if i.fn == "linear" for x in i.inputs[1:]}
        assert sum(buffer_bytes(mine, str(x)) for x in read) == size == total


def test_what_is_left_is_what_caches_do_not_hold() -> None:
    """On a clock where a run takes 7, a product 5 and 0.5 of each byte of weights, other work 2,
    and 3 more behind a product, gelu 7; where weights are more than a cache, 0.75 of each byte by
    few rows, and 0.625 by 32."""

    def seconds(host: HostProgram) -> float:
        mine = written_out(project(host, 0))
        done = [i for i in mine.instructions if is_work(i)]
        fills = sum(i.fn == "matmul" for i in done)
        gelus = sum(i.fn == "gelu" for i in done)
        others = len(done) - fills
        if fills or done[0].fn != "linear" or len({i.inputs[1] for i in done}) == 1:
            return 7.0 + 5.0 * fills + 2.0 * others + (3.0 * others + 4.0 * gelus if fills else 0.0)
        size = sum(buffer_bytes(mine, str(i.inputs[1])) for i in done)
        many = 0.75 if mine.local_shape(str(done[0].inputs[0]))[0] == 4 else 0.625
        return 7.0 + (many if size > SMALL.cache else 0.5) * size

    found = cold.caches(SMALL, 1, lambda host: lambda: seconds(host), 7.0, 0.5)
    two = 3.0 - 2 * 0.5  # less what work takes more behind other work
    assert found.returns == pytest.approx(
        {**dict.fromkeys((*KINDS, "*"), 0.0), "gelu": 4.0, "any": two}
    )
    assert found.stale is not None
    assert [(at, pytest.approx(s)) for at, s in found.stale.points] == [(4.0, 0.25), (32.0, 0.125)]
    assert (found.core, found.shared) == (SMALL.core, SMALL.cache)
