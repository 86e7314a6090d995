"""Pipelines over meshes that share ranks: each stage has a stream there."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.pipelines import batch_of, check_orders, network, sines, torch_makes

import mdfuse as mf
from mdfuse import DeviceMesh, hir
from mdfuse.hir.rank.pipelines import project
from mdfuse.hir.rank.unrolled import written_out
from mdfuse.hir.verify.check import verify

#: Meshes of stages, as (ranks, axis); a mesh that comes twice has two stages.
PLACES = {
    "one rank": ["0a", "0b"],
    "one rank, five stages": ["0a", "0b", "0c", "0d", "0e"],
    "the same ranks": ["01a", "01b"],
    "the same ranks, turned": ["01a", "10a"],
    "one rank is in both": ["01a", "12a"],
    "a part": ["012a", "1a"],
    "round": ["01a", "12a", "20a"],
    "two ranks, two stages on each": ["0a", "1a", "0b", "1b"],
    "there and back": ["01a", "12a", "01a"],
}


def meshes(places: list[str]) -> list[DeviceMesh]:
    return [DeviceMesh([*map(int, ranks)], axes=[axis]) for *ranks, axis in places]


#: Three stages on two rank groups are for gpipe alone.
CASES = [("there and back", "gpipe")] + [
    (name, schedule)
    for name in PLACES
    for schedule in ("gpipe", "1f1b", "zb1p")
    if name != "there and back"
]


@pytest.mark.parametrize(("name", "schedule"), CASES)
def test_stages_equal_torch_in_any_order_of_streams(name: str, schedule: str) -> None:
    net = sines(meshes(PLACES[name]), batch=7)
    program = mf.pipeline(net.definition, microbatches=3, batch={"x": 0, "t": 0}, schedule=schedule)
    assert hir.parse(str(program)) == program.host
    check_orders(program, net, 4)


def test_weights_that_are_gathered_before_are_there_for_all_streams() -> None:
    a, b = (DeviceMesh(ranks, axes=["dp"]) for ranks in ([0, 1], [1, 2]))
    split = {"dp": mf.Shard(0)}
    with mf.FusionDefinition("net") as fd:
        x = fd.define_tensor([8, 4], torch.float64, a, split, name="x")
        w, v = (fd.define_tensor([4, 4], torch.float64, m, split) for m in (a, b))
        h = fd.ops.set(fd.ops.linear(x, fd.ops.set(w).on(a, {})).tanh()).on(b, split)
        loss = fd.ops.linear(h, fd.ops.set(v).on(b, {})).square().sum()
        for y in (loss, *mf.grad(loss, [w, v])):
            fd.add_output(y)
    program = mf.pipeline(fd, microbatches=2, batch={"x": 0})
    given = [torch.randn(s, dtype=torch.float64) for s in ([8, 4], [4, 4], [4, 4])]
    x, *leaves = (g.clone().requires_grad_() for g in given)
    want = torch.nn.functional.linear(x, leaves[0]).tanh() @ leaves[1].T
    loss = want.square().sum()
    wanted = [loss.detach(), *torch.autograd.grad(loss, leaves)]
    for seed in (None, 0, 1):
        found = mf.simulate(program, given, schedule=seed).outputs
        for got, right in zip(found, wanted, strict=True):
            torch.testing.assert_close(got, right, rtol=1e-12, atol=1e-12)


def two_stages(schedule: str = "1f1b") -> mf.Program:
    net = network(meshes(PLACES["one rank"]))
    batch, options = batch_of(net), mf.Options(compile="never")  # each work by itself
    return mf.pipeline(
        net.definition, microbatches=2, batch=batch, schedule=schedule, options=options
    )


def test_a_stage_waits_for_what_it_reads_alone() -> None:
    """A later stage is queued first, so its stream does not wait for the next microbatch."""
    local = written_out(project(two_stages().host, 0))
    found, stream = [], ""
    for i in local.instructions:
        if i.op == "set_stream":
            stream = str(i.kwargs.get("stream", "caller"))
        if i.op == "sync" and i.attrs:
            found.append(f"{stream} waits for {i.kwargs['stream']}")
        if i.op == "launch" or i.fn == "linear":
            found.append(f"work on {stream}")
    first = [re.sub("work on ", "", x) for x in found[:8]]
    linears = ["0", "0"]  # of a stage, on its stream
    assert first[:5] == [*linears, "1 waits for 0", "1", "1"], found


@pytest.mark.parametrize("block", ["T01", "T10"])
def test_a_stage_that_does_not_wait_is_refused(block: str) -> None:
    host = two_stages().host
    code = [
        replace(i, body=tuple(j for j in i.body if j.op != "sync")) if i.fn == block else i
        for i in host.instructions
    ]
    assert code != [*host.instructions]
    verify(host)
    with pytest.raises(mf.ProgramError, match="sync"):
        verify(replace(host, instructions=tuple(code)))


def test_one_stream_is_enough_where_no_more_are_wanted() -> None:
    net = network(meshes(PLACES["one rank"]))
    program = mf.pipeline(
        net.definition,
        microbatches=2,
        batch=batch_of(net),
        schedule="gpipe",
        options=mf.Options(streams=1),
    )
    assert "set_stream" not in str(program)
    for got, want in zip(mf.simulate(program, net.inputs).outputs, net.wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("name", ["one rank", "one rank, five stages"])
@pytest.mark.parametrize(
    ("schedule", "compile"),
    [("gpipe", "never"), ("1f1b", "never"), ("1f1b", "auto"), ("zb1p", "never")],
)
def test_stages_on_streams_of_one_gpu_are_one_graph(schedule: str, compile: Any, name: str) -> None:
    """With "always", what cannot be captured is an error; replays read other numbers."""
    net = network(meshes(PLACES[name]), batch=12)
    program = mf.pipeline(
        net.definition,
        microbatches=4,
        batch=batch_of(net),
        schedule=schedule,
        options=mf.Options(graph="always", compile=compile),
    )
    assert len({*re.findall(r"set_stream (\d)", str(program))}) == min(len(PLACES[name]), 4)
    given = [x.cuda() for x in net.inputs]
    for run in range(5):
        torch.manual_seed(run)
        drawn = [torch.randn_like(x) / 2 for x in net.inputs]
        for x, new in zip(given, drawn, strict=True):
            x.copy_(new)  # weights are written over, and lie where they lay
        for got, want in zip(program.run(*given), torch_makes(drawn), strict=True):
            torch.testing.assert_close(got.cpu(), want, rtol=1e-11, atol=1e-11)
