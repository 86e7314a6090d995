"""Work takes more where its code or its inputs are in no cache any more, and only there."""

from dataclasses import replace

import pytest
import torch

import mdfuse as mf
from mdfuse import DeviceMesh
from mdfuse.errors import ProgramError
from mdfuse.hir.program import HostProgram
from mdfuse.hir.rank.pipelines import as_run, project
from mdfuse.seeing.caches import Caches, Cold
from mdfuse.seeing.costs import Costs
from mdfuse.seeing.curves import Curve
from mdfuse.seeing.timeline import timeline

MESH = DeviceMesh([0])

#: 2,000 bytes go through a core's cache, 1 s for gelu and 0.25 s for all else that comes again.
CACHES = Caches(core=2000, returns={"gelu": 1.0, "*": 0.25}, shared=1 << 20)


def chain(*names: str, size: int = 100) -> HostProgram:
    """Return a program of pointwise ops, each on the result of the one before."""
    with mf.FusionDefinition("chain") as fd:
        x = fd.define_tensor([size], torch.float32, mesh=MESH)
        for name in names:
            x = getattr(fd.ops, name)(x)
        fd.add_output(x)
    return mf.compile(fd, mf.Options(compile="never")).host


def more(host: HostProgram, caches: Caches | None) -> list[float]:
    """Return what each op takes more."""
    mine = as_run(project(host, 0))
    cold = Cold(mine, caches)
    return [cold.seconds(i) for i in mine.instructions if i.fn]


def test_work_that_comes_again_behind_many_bytes() -> None:
    """Each op goes through 800 bytes; before the first one comes the last."""
    host = chain("gelu", "exp", "neg", "gelu", "gelu")  # exp and neg: 3,200 bytes behind themselves
    assert more(host, CACHES) == [0.0, 0.25, 0.25, 0.0, 0.0]
    host = chain("gelu", "exp", "neg", "exp", "exp", "exp")
    assert more(host, CACHES) == [1.0, 0.0, 0.25, 0.0, 0.0, 0.0]
    assert more(host, None) == [0.0] * 6
    assert more(host, replace(CACHES, core=1 << 20)) == [0.0] * 6


def test_work_behind_much_of_another_kind() -> None:
    """What hands work to a library is lost, too, but not for the same work once more."""
    host = chain("gelu", "exp", "exp", "neg")
    found = Caches(core=700, returns={"gelu": 1.0, "any": 0.5})
    assert more(host, found) == [1.5, 0.5, 0.0, 0.5]
    assert more(host, replace(found, core=800)) == [1.0, 0.0, 0.0, 0.0]


def test_inputs_of_a_program_with_many_come_from_memory() -> None:
    """Views of them, too; what is computed is in a cache."""
    with mf.FusionDefinition("sums") as fd:
        x, w = (fd.define_tensor([8, 4], torch.float32, mesh=MESH) for _ in range(2))
        y = fd.ops.permute(w, [1, 0])
        z = fd.ops.exp(y)
        fd.add_output(fd.ops.add(z, fd.ops.permute(x, [1, 0])))
        fd.add_output(fd.ops.neg(z))
    host = mf.compile(fd, mf.Options(compile="never")).host
    found = Caches(core=1 << 20, shared=255, stale=Curve(((4.0, 1e-3), (32.0, 5e-4))))
    mine = as_run(project(host, 0))
    cold = Cold(mine, found)
    rows = [(i.fn, cold.seconds(i)) for i in mine.instructions if i.fn in ("exp", "add", "neg")]
    assert dict(rows) == pytest.approx({"exp": 0.128, "add": 0.128, "neg": 0.0})
    assert sum(more(host, replace(found, shared=256))) == 0.0


@pytest.mark.parametrize(
    ("rows", "each"), [(1, 8e-6), (4, 8e-6), (18, 5e-6), (32, 2e-6), (99, 2e-6)]
)
def test_the_more_rows_a_product_has_the_less_it_waits_for_weights(rows: int, each: float) -> None:
    with mf.FusionDefinition("product") as fd:
        x = fd.define_tensor([rows, 4], torch.float32, mesh=MESH)
        w = fd.define_tensor([16, 4], torch.float32, mesh=MESH)
        fd.add_output(fd.ops.linear(fd.ops.neg(x), w))
    found = Caches(core=1 << 20, stale=Curve(((4.0, 8e-6), (32.0, 2e-6))))
    host = mf.compile(fd, mf.Options(compile="never")).host
    assert more(host, found) == pytest.approx([rows * 4 * 4 * 8e-6, 16 * 4 * 4 * each])
    assert sum(more(host, replace(found, stale=None))) == 0.0


def test_timelines_have_it() -> None:
    host = chain("gelu", "exp", "neg")
    costs = Costs(launch_s=3.0, is_fused=False)
    plain, cold = (timeline(host, replace(costs, caches=c)).seconds for c in (None, CACHES))
    assert (plain, cold) == (9.0, 9.0), "2,400 bytes in all, 1,600 behind themselves"
    small = replace(CACHES, core=1000)
    assert timeline(host, replace(costs, caches=small)).seconds == 9.0 + 1.5


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"core": -1}, "core=-1"),
        ({"shared": True}, "shared=True"),
        ({"returns": {"gelu": float("inf")}}, "returns['gelu']=inf"),
        ({"returns": {"gelu": "much"}}, "returns['gelu']='much'"),
    ],
)
def test_what_is_no_amount(wrong: dict[str, object], what: str) -> None:
    with pytest.raises(ProgramError, match="bytes that a cache holds, or seconds") as caught:
        Caches(**wrong)  # type: ignore[arg-type]
    assert caught.value.what == what
