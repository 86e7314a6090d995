"""Plans on real ranks: a second run makes the same calls on other data; on GPUs it is a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.oracle import is_close, local_part, shares
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Shard

RUNS = 6
GRAPHS = pytest.mark.parametrize("graph", ["auto", "never"])


def chain(mesh: DeviceMesh, steps: int, rows: int = 16, width: int = 32) -> mf.FusionDefinition:
    """All-gather, matmul, reduce-scatter, in a row."""
    with mf.FusionDefinition("chain") as fd:
        h = fd.define_tensor([rows, width], mesh=mesh, layout={"tp": Shard(0)})
        for _ in range(steps):
            w = fd.define_tensor([width, width], mesh=mesh, layout={"tp": Shard(0)})
            split = fd.ops.set(h).on(mesh, {"tp": Shard(1)})
            h = fd.ops.set(split @ w).on(mesh, {"tp": Shard(0)})
        fd.add_output(h)
    return fd


def many(mesh: DeviceMesh) -> mf.FusionDefinition:
    """Each kind of communication that a mesh of one axis has, and some outputs."""
    with mf.FusionDefinition("many") as fd:
        x = fd.define_tensor([16, 8], mesh=mesh, layout={"tp": Shard(0)})
        whole = fd.ops.set(x * 2.0).on(mesh, {})
        turned = fd.ops.set(x).on(mesh, {"tp": Shard(1)})
        total = fd.ops.sum(x, dims=[0])
        one = fd.ops.set(whole + 1.0).on(DeviceMesh([0]), {})
        back = fd.ops.set(one).on(mesh, {"tp": Shard(1)})
        fd.add_output(fd.ops.exp(turned) + back)
        fd.add_output(fd.ops.set(total).on(mesh, {}))
        fd.add_output(whole)
    return fd


def drawn(program: mf.Program, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = (program.fusion.values[n] for n in program.fusion.inputs)
    return [torch.randn(v.shape, generator=generator) / 8 for v in values]


def mine(program: mf.Program, wholes: list[Tensor], comm: mf.Communicator) -> list[Any]:
    found: list[Any] = []
    for name, x in zip(program.fusion.inputs, wholes, strict=True):
        part = shares(x, program.fusion.layout(name)).get(comm.rank)
        found.append(None if part is None else part.to(comm.device, copy=True))
    return found


def check(program: mf.Program, got: list[Any], wholes: list[Tensor], comm: mf.Communicator) -> None:
    wants = plain(program, wholes)
    for name, y, want in zip(program.fusion.outputs, got, wants, strict=True):
        layout = program.fusion.layout(name)
        if comm.rank in layout.mesh:
            assert is_close(y.cpu(), local_part(want, layout, comm.rank), exact=False)


def plain(program: mf.Program, wholes: list[Tensor]) -> list[Tensor]:
    """What the two programs compute, in plain torch."""
    if program.fusion.name == "many":
        (x,) = wholes
        return [torch.exp(x) + x * 2 + 1, x.sum(0), x * 2]
    h, *ws = wholes
    for w in ws:
        h = h @ w
    return [h]


def check_runs(fd: mf.FusionDefinition, comm: mf.Communicator, graph: str) -> None:
    """Every run has other data, weights stay for a while; no run writes into earlier outputs."""
    options = mf.Options(graph=graph, overlap="never")  # type: ignore[arg-type]
    program = mf.compile(fd, options)  # in one form, whose plan is counted
    kept, weights = [], None
    for n in range(RUNS):
        wholes = drawn(program, n)
        local = mine(program, wholes, comm)
        if weights is None or n == RUNS - 2:
            weights = (wholes[1:], local[1:])
        wholes[1:], local[1:] = weights
        kept.append((wholes, program.run(*local)))
    for wholes, got in kept:
        check(program, got, wholes, comm)
    info = program.plans.info()
    assert (info.misses, info.hits, info.size) == (1, RUNS - 1, 1)


@pytest.mark.world(2)
@GRAPHS
@pytest.mark.parametrize("steps", [1, 4])
def test_a_chain_of_two(steps: int, graph: str, comm: mf.Communicator) -> None:
    check_runs(chain(DeviceMesh.arange(tp=2), steps), comm, graph)


@pytest.mark.world(4)
@GRAPHS
@pytest.mark.parametrize("steps", [1, 4])
def test_a_chain_of_four(steps: int, graph: str, comm: mf.Communicator) -> None:
    check_runs(chain(DeviceMesh.arange(tp=4), steps), comm, graph)


@pytest.mark.world(2)
@GRAPHS
def test_many_kinds_of_two(graph: str, comm: mf.Communicator) -> None:
    check_runs(many(DeviceMesh.arange(tp=2)), comm, graph)


@pytest.mark.world(4)
@GRAPHS
def test_many_kinds_of_four(graph: str, comm: mf.Communicator) -> None:
    check_runs(many(DeviceMesh.arange(tp=4)), comm, graph)


@pytest.mark.world(2)
@pytest.mark.gpu
def test_a_number_runs_eagerly_between_graphs(comm: mf.Communicator) -> None:
    mesh = DeviceMesh.arange(tp=2)
    with mf.FusionDefinition("scaled") as fd:
        x = fd.define_tensor([8, 4], mesh=mesh, layout={"tp": Shard(0)})
        s = fd.define_scalar(None, dtype=torch.float32)
        whole = fd.ops.set(x).on(mesh, {})
        fd.add_output(fd.ops.exp(fd.ops.exp(whole) * s) + 1.0)
    program = mf.compile(fd)
    for n, factor in enumerate((0.5, 0.25, -1.0, 2.0)):
        (x,) = (torch.randn(8, 4, generator=torch.Generator().manual_seed(n)),)
        (y,) = program.run(x.chunk(2)[comm.rank].to(comm.device), factor)
        assert torch.allclose(y.cpu(), torch.exp(torch.exp(x) * factor) + 1, rtol=1e-5)


@pytest.mark.world(2)
@pytest.mark.gpu
def test_graphs_captured_again_in_a_new_communicator(comm: mf.Communicator) -> None:
    """Other groups for the same program: graphs of the old ones are given up."""
    program = mf.compile(chain(DeviceMesh.arange(tp=2), 2))
    for options in (mf.Options(), mf.Options(plans=1), mf.Options(graph="always")):
        for n in range(3):
            wholes = drawn(program, n)
            check(program, program.run(*mine(program, wholes, comm), options=options), wholes, comm)


@pytest.mark.world(2)
@pytest.mark.gpu
def test_on_other_streams(comm: mf.Communicator) -> None:
    """A plan's buffers serve one stream: on another one, another plan runs."""
    program = mf.compile(chain(DeviceMesh.arange(tp=2), 2))
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    kept = []
    for n in range(6):
        wholes = drawn(program, n)
        local = mine(program, wholes, comm)
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[n % 2]):
            kept.append((wholes, program.run(*local)))
            torch.cuda.current_stream().synchronize()
    for wholes, got in kept:
        check(program, got, wholes, comm)
    assert program.plans.info().size == 2
