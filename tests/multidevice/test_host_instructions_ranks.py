"""Every instruction of host programs on real ranks; the programs are those of the simulator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.host_posts import CASES
from helpers.host_programs import POISON, Case, numbers, parse
from helpers.reuse_cases import CASES as REUSE
from helpers.reuse_cases import Build, Expect, define, inputs
from torch import Tensor

import mdfuse as mf
from mdfuse import hir
from mdfuse.hir import HostProgram
from mdfuse.hir.rank.pipelines import project


def here(x: Any, comm: mf.Communicator) -> Any:
    return x.to(comm.device) if isinstance(x, Tensor) else x


def check(case: Case, comm: mf.Communicator, program: HostProgram) -> None:
    """Each of two runs gives what plain torch gives; ranks outside get None."""
    evaluator = mf.HostIrEvaluator(program, comm, POISON)
    is_in = comm.rank < case.ranks
    for _ in range(2):
        row = case.inputs(comm.rank)
        got = evaluator.run({name: here(x, comm) if is_in else None for name, x in row.items()})
        if not is_in:
            assert got == [None] * len(got)
            continue
        for mine, want in zip(got, case.expected(comm.rank), strict=True):
            if want is None:
                assert mine is None
            else:
                assert torch.equal(mine.cpu(), want)


@pytest.mark.world(2)
@pytest.mark.parametrize("case", [c for c in CASES if c.ranks <= 2], ids=str)
def test_two_ranks(case: Case, comm: mf.Communicator) -> None:
    check(case, comm, case.program())


@pytest.mark.world(4)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_four_ranks(case: Case, comm: mf.Communicator) -> None:
    check(case, comm, case.program())


@pytest.mark.world(4)
@pytest.mark.parametrize("case", [c for c in CASES if c.ranks == 4], ids=str)
def test_each_rank_runs_its_own_projection(case: Case, comm: mf.Communicator) -> None:
    check(case, comm, hir.parse(str(project(case.program(), comm.rank))))


# -- buffers -------------------------------------------------------------------------------------


@pytest.mark.world(2)
def test_updates_in_place(comm: mf.Communicator) -> None:
    """Two runs go on from each other, in the caller's buffer."""
    body = """
      input %x: f32[] (x=R)
      alias %y: f32[] (x=R) = %x
      for %i in 1..6 step 2 {
        %y = add(%y, %i)
      }
      return %y"""
    evaluator = mf.HostIrEvaluator(parse(body, "mesh(x=2)"), comm, POISON)
    x = torch.tensor(21.0, device=comm.device)
    for want in (30, 39):
        (got,) = evaluator.run({"x": x})
        assert got.data_ptr() == x.data_ptr()
        assert got.item() == want


GATHER = """
  input %x: f32[2] of [4] (x=S0)
  %y: f32[4] (x=R) = alloc
  %c = post allgather(%x) -> %y f32[4] (x=S0) => (x=R) axis=x dim=0
  wait %c
  %z: f32[2] of [4] (x=S0) = add(%x, 1.0)
  return %y, %z"""


@pytest.mark.world(2)
@pytest.mark.parametrize("names", [(), ("y",), ("z",), ("y", "z")])
def test_results_lie_in_the_callers_buffers(names: tuple[str, ...], comm: mf.Communicator) -> None:
    evaluator = mf.HostIrEvaluator(parse(GATHER, "mesh(x=2)"), comm, POISON)
    buffers = {"y": torch.empty(4, device=comm.device), "z": torch.empty(2, device=comm.device)}
    for run in range(2):
        x = numbers(2, start=10 * comm.rank + run).to(comm.device)
        got = dict(
            zip("yz", evaluator.run({"x": x, **{n: buffers[n] for n in names}}), strict=True)
        )
        assert got["y"].tolist() == [run, run + 1, run + 10, run + 11]
        assert torch.equal(got["z"], x + 1)
        for name in names:
            assert got[name].data_ptr() == buffers[name].data_ptr()


@pytest.mark.world(2)
@pytest.mark.parametrize(("build", "expect"), REUSE, ids=lambda f: f.__name__)
def test_outputs_lie_in_their_inputs(build: Build, expect: Expect, comm: mf.Communicator) -> None:
    program = mf.compile(define(build), POISON)
    given = [x.chunk(2)[comm.rank].clone().to(comm.device) for x in inputs()]
    buffers = dict(zip(program.host.inputs, given, strict=True))
    evaluator = mf.HostIrEvaluator(program.host, comm, POISON)
    got = dict(zip(program.host.outputs, evaluator.run(buffers), strict=True))
    for output, name in program.fusion.reuse.items():
        assert got[output].data_ptr() == buffers[name].data_ptr()
    for name, whole in zip(program.host.outputs, expect(*inputs()), strict=True):
        is_split = any(isinstance(p, mf.Shard) for p in program.fusion.layout(name).placements)
        dim = next((d for d, _ in program.fusion.layout(name).splits), 0)
        want = whole.chunk(2, dim)[comm.rank] if is_split else whole
        assert torch.equal(got[name].cpu(), want)


# -- streams -------------------------------------------------------------------------------------

ON_STREAMS = """
  input %x: f32[4] (x=R)
  input %w: f32[{n}] (x=R)
  %caller = get_stream
  set_stream 0
  sync %caller
  %h: f32[4] (x=R) = add(%x, 1.0)
  set_stream 1
  sync 0
  %y: f32[4] (x=R) = mul(%h, %w)
  return %y"""


@pytest.mark.world(2)
def test_the_callers_stream_is_current_afterwards(comm: mf.Communicator) -> None:
    """Also where an instruction raised; and it has the results without a sync of the host."""
    x = torch.ones(4, device=comm.device)
    is_cuda = comm.device.type == "cuda"
    for n, is_right in ((4, True), (3, False), (4, True)):
        evaluator = mf.HostIrEvaluator(parse(ON_STREAMS.format(n=n), "mesh(x=2)"), comm, POISON)
        w = torch.full((n,), 3.0, device=comm.device)
        mine = torch.cuda.Stream() if is_cuda else None
        with torch.cuda.stream(mine):
            before = torch.cuda.current_stream() if is_cuda else None
            if is_right:
                (got,) = evaluator.run({"x": x, "w": w})
            else:
                with pytest.raises(RuntimeError) as caught:
                    evaluator.run({"x": x, "w": w})
                assert caught.value.__notes__ == ["in %y = mul"]
            assert not is_cuda or torch.cuda.current_stream() == before
    torch.cuda.synchronize() if is_cuda else None
    assert torch.equal(got.cpu(), torch.full((4,), 6.0))


# -- dtypes that travel --------------------------------------------------------------------------


MIXED = [("f32", "i64"), ("bool", "f16"), ("bf16", "i16"), ("i8", "u8")]


@pytest.mark.world(2)
@pytest.mark.parametrize("dtypes", MIXED)
def test_one_group_of_several_dtypes(dtypes: tuple[str, str], comm: mf.Communicator) -> None:
    a, b = dtypes
    body = f"""
      input %x: {a}[3] (x=R)
      input %k: {b}[2] (x=R)
      %y: {a}[3] (x=R) = alloc
      %l: {b}[2] (x=R) = alloc
      group_start
      %s0 = send(%x, to=1 - rank)
      %s1 = send(%k, to=1 - rank)
      %r0 = recv(%y, from=1 - rank)
      %r1 = recv(%l, from=1 - rank)
      group_end
      wait %r0
      wait %r1
      wait %s0
      wait %s1
      return %y, %l"""
    program = parse(body, "mesh(x=2)")
    kinds = [program.types[n].dtype for n in "xk"]
    sent = [(numbers(n) + comm.rank).to(d) for n, d in zip((3, 2), kinds, strict=True)]
    want = [(numbers(n) + 1 - comm.rank).to(d) for n, d in zip((3, 2), kinds, strict=True)]
    given = dict(zip("xk", (x.to(comm.device) for x in sent), strict=True))
    got = mf.HostIrEvaluator(program, comm, POISON).run(given)
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine.cpu(), theirs)


# -- refused alike -------------------------------------------------------------------------------


@pytest.mark.world(4)
@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("%s: f32[] (x=R) = select(%x, dim=0, index=rank)", "is out of range for dim 0"),
        ("if rank == 3 { %y = add(%h, 1.0) } if rank == 9 { %h: f32[2] (x=R) = alloc }", "%h"),
        ("if rank == 1 { set_stream rank - 2 }", "set_stream -1"),
        ("if rank == 0 { group_start }", "barrier inside a group"),
    ],
)
def test_what_means_nothing_on_one_rank(code: str, words: str, comm: mf.Communicator) -> None:
    """Every rank refuses, and nothing was posted."""
    body = f"""
      input %x: f32[2] (x=R)
      %y: f32[2] (x=R) = mul(%x, 1.0)
      {code}
      barrier (x=R)
      return %y"""
    evaluator = mf.HostIrEvaluator(parse(body, "mesh(x=4)"), comm, POISON)
    for _ in range(2):
        with pytest.raises(mf.MdfuseError) as caught:
            evaluator.run({"x": torch.ones(2, device=comm.device)})
        assert words in str(caught.value)


@pytest.mark.world(4)
def test_a_projection_of_another_rank(comm: mf.Communicator) -> None:
    program = project(parse(GATHER, "mesh(x=2)"), (comm.rank + 1) % 2)
    with pytest.raises(mf.ProgramError, match="onto rank"):
        mf.HostIrEvaluator(program, comm, POISON).run({"x": torch.ones(2, device=comm.device)})


@pytest.mark.world(4)
def test_the_world_is_usable_afterwards(comm: mf.Communicator) -> None:
    check(CASES[-1], comm, CASES[-1].program())
