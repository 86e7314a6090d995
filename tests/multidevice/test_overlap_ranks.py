"""Communications hidden behind products on real ranks; what all ranks keep after a trial."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
import test_streams_ranks as streams
import torch
from helpers.oracle import is_close, local_part, shares
from helpers.overlaps import CASES, Case, in_forms, prepared
from helpers.overlaps import program as in_chunks
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Options
from mdfuse.backends.symmetric import host_team

#: A table by which overlap pays, and all ranks read the same.
PAYS = {"flops": 1e5, "links": {"*": {"latency_s": 0.0, "bandwidth": 4e4}}}
LINE, GRID = DeviceMesh.arange(tp=4), DeviceMesh.arange(dp=2, tp=2)


@pytest.fixture
def pays(tmp_path: Path) -> str:
    path = tmp_path / "even.json"
    path.write_text(json.dumps(PAYS))
    return str(path)


def run_and_check(program: mf.Program, case: Case, seed: int, comm: mf.Communicator) -> None:
    """Run on this rank's parts, and compare its outputs with its parts of what torch gives."""
    inputs = case.inputs(program.fusion, seed)
    got = program.run(*mine(program, inputs, comm))
    for name, y, whole in zip(program.fusion.outputs, got, case.expected(inputs), strict=True):
        part = local_part(whole, program.fusion.layout(name), comm.rank)
        assert is_close(y.cpu(), part, exact=True), f"%{name}:\n{y}\nexpected\n{part}"


def mine(program: mf.Program, inputs: list[Tensor], comm: mf.Communicator) -> list[Any]:
    layouts = map(program.fusion.layout, program.fusion.inputs)
    parts = (shares(x, layout)[comm.rank] for x, layout in zip(inputs, layouts, strict=True))
    return [part.to(comm.device, copy=True) for part in parts]


def runs(comm: mf.Communicator) -> int:
    """Enough for graphs, which the second run on GPUs captures and the next ones replay."""
    return 4 if comm.device.type == "cuda" else 2


def captured(comm: mf.Communicator, **more: Any) -> Options:
    """Options by which all that can be captured on these ranks has to be."""
    is_captured = comm.device.type == "cuda" and comm.backend == "symmetric"
    return Options(backend=comm.backend, graph="always" if is_captured else "auto", **more)


def check_chosen(name: str, mesh: DeviceMesh, rows: int, costs: str, comm: mf.Communicator) -> None:
    case, options = CASES[name], captured(comm, overlap="auto", costs=costs)
    program = mf.compile(case.definition(mesh, rows), options)
    assert "for %i in" in str(program)
    for seed in range(runs(comm)):
        run_and_check(program, case, seed, comm)


def check_kept(name: str, costs: str, comm: mf.Communicator) -> None:
    case = CASES[name]
    program = mf.compile(case.definition(GRID, 14), Options(overlap="measure", costs=costs))
    for seed in range(15):
        assert ("measured: " in program.explain()) == (seed >= 12)
        run_and_check(program, case, seed, comm)
        assert program.plans.info().size == (2 if 0 < seed < 11 else 1)  # that of the other goes
    (told,) = [line for line in program.explain().splitlines() if "measured: " in line]
    assert {*comm.all_ok(told)} == {told}


@pytest.mark.world(4)
@pytest.mark.parametrize("name", ["gather", "three", "reduce", "experts", "mlp"])
def test_chosen_forms_in_a_grid(name: str, pays: str, comm: mf.Communicator) -> None:
    """Along two of the ranks, of which one may have fewer rows."""
    check_chosen(name, GRID, 13, pays, comm)


@pytest.mark.world(4)
@pytest.mark.parametrize("name", ["gather", "scatter"])
def test_chosen_forms_along_all_ranks(name: str, pays: str, comm: mf.Communicator) -> None:
    check_chosen(name, LINE, 16, pays, comm)


@pytest.mark.world(4)
@pytest.mark.parametrize("name", ["gather", "reduce"])
def test_all_ranks_keep_the_same_after_a_trial(name: str, pays: str, comm: mf.Communicator) -> None:
    """Values are right in each run of the trial, and in those of what is kept."""
    check_kept(name, pays, comm)


@pytest.mark.world(4)
@pytest.mark.backend("symmetric")
@pytest.mark.parametrize("name", ["gather", "scatter"])
def test_symmetric_chosen_forms(name: str, pays: str, comm: mf.Communicator) -> None:
    assert comm.backend == "symmetric"
    check_chosen(name, LINE, 16, pays, comm)


@pytest.mark.world(4)
@pytest.mark.backend("symmetric")
def test_symmetric_trial(pays: str, comm: mf.Communicator) -> None:
    check_kept("reduce", pays, comm)


@pytest.mark.world(4)
def test_gradients_of_torch(pays: str, comm: mf.Communicator, monkeypatch: Any) -> None:
    """Forwards and backwards are computed in chunks; gradients are those of torch."""
    made: list[mf.Program] = []
    run = mf.Program.run
    monkeypatch.setattr(mf.Program, "run", lambda p, *x, **k: (made.append(p), run(p, *x, **k))[1])
    case = CASES["mlp"]
    fd = case.definition(LINE, 16)
    # without room to post ahead, which would gain more in the backward
    f = mf.differentiable(fd, Options(overlap="auto", costs=pays, prefetch_bytes=1))
    wholes = [x.double().requires_grad_() for x in case.inputs(mf.compile(fd).fusion, 3)]
    (want,) = case.expected(wholes)
    want.square().sum().backward()
    layouts = [v.layout for v in map(fd.fusion.values.get, fd.fusion.inputs)]
    parts = zip(wholes, layouts, strict=True)
    leaves = [local_part(x.detach().float(), y, comm.rank).to(comm.device) for x, y in parts]
    for x in leaves:
        x.requires_grad_()
    (y,) = f(*leaves)
    y.square().sum().backward()
    for x, whole, layout in zip(leaves, wholes, layouts, strict=True):
        assert x.grad is not None and whole.grad is not None
        assert torch.equal(x.grad.cpu().double(), local_part(whole.grad, layout, comm.rank))
    assert ["for %i in" in str(p) for p in made] == [True, True]


#: case -> how many forms it has of 13 rows, along all ranks and along two of them.
FORMS = {
    "gather": (5, 3), "three": (6, 4), "scatter": (3, 2), "reduce": (3, 2), "experts": (6, 6),
    "mlp": (11, 7), "computed": (5, 3), "fused": (11, 7), "sum of blocks": (3, 2),
    "experts in blocks": (3, 3),
}  # fmt: skip


def check_forms(name: str, comm: mf.Communicator) -> None:
    """Each way to compute a case in chunks, of uneven shards, several runs each."""
    case = CASES[name]
    for mesh, count in zip((LINE, GRID), FORMS[name], strict=True):
        found = list(in_forms(prepared(case, mesh, 13)))
        assert len(found) == count
        for _, _, streamed in found:
            program = in_chunks(streamed, captured(comm, verify=False))
            for seed in range(runs(comm)):
                run_and_check(program, case, seed, comm)


def check_delays(name: str, comm: mf.Communicator) -> None:
    """Fifty runs of the last form, in which each rank stops anywhere for a while."""
    case, draw = CASES[name], random.Random(comm.rank)
    *_, (_, _, streamed) = in_forms(prepared(case, GRID, 13))
    program = in_chunks(streamed, Options(backend=comm.backend))
    is_gpu = comm.device.type == "cuda"
    inputs = case.inputs(program.fusion, 7)
    arguments, wholes = mine(program, inputs, comm), case.expected(inputs)
    sleep = torch.cuda._sleep if is_gpu else lambda cycles: time.sleep(cycles / 1e9)
    delays, like = streams.Delays(sleep, draw), program.run(*(x.clone() for x in arguments))
    for got in streams.runs(program.host, arguments, like, delays, comm):
        for name_, y, whole in zip(program.fusion.outputs, got, wholes, strict=True):
            part = local_part(whole, program.fusion.layout(name_), comm.rank)
            assert is_close(y.cpu(), part, exact=True), f"%{name_}:\n{y}\nexpected\n{part}"
    assert delays.count > streams.RUNS


@pytest.mark.world(4)
@pytest.mark.parametrize("name", FORMS)
def test_every_form(name: str, comm: mf.Communicator) -> None:
    check_forms(name, comm)


@pytest.mark.world(4)
@pytest.mark.backend("symmetric")
@pytest.mark.parametrize("name", FORMS)
def test_symmetric_every_form(
    name: str, comm: mf.Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_team, "FEW_CHUNKS", 0)
    check_forms(name, comm)


@pytest.mark.world(4)
@pytest.mark.parametrize("name", FORMS)
def test_forms_with_random_delays(name: str, comm: mf.Communicator) -> None:
    check_delays(name, comm)


@pytest.mark.world(4)
@pytest.mark.backend("symmetric")
@pytest.mark.parametrize("name", FORMS)
def test_symmetric_forms_with_random_delays(
    name: str, comm: mf.Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_team, "FEW_CHUNKS", 0)
    check_delays(name, comm)


@pytest.mark.world(4)
def test_a_ring_by_the_backend_of_its_axis(comm: mf.Communicator) -> None:
    """Pairs along tp see each other's memory; sums along dp go by the usual backend."""
    around = mf.Stream(0, 2, rotate="tp")
    with mf.FusionDefinition("two_backends") as fd:
        x = fd.define_tensor([7, 8], mesh=GRID, layout={"tp": mf.Shard(0), "dp": mf.Shard(1)})
        w = fd.define_tensor([8, 6], mesh=GRID, layout={"dp": mf.Shard(0)})
        whole = fd.ops.set(x).on(GRID, {"dp": mf.Shard(1)}, stream=around)
        y = fd.ops.matmul(whole, w)
        fd.add_output(fd.ops.set(y).on(GRID, {}))
    program = mf.compile(fd, Options(backend=f"{comm.backend}, tp=symmetric"))
    assert {i.kwargs["backend"] for i in program.host.walk() if i.op == "recv"} == {"symmetric"}
    for seed in range(3):
        run_and_check(program, Case(lambda *_: None, torch.matmul), seed, comm)
