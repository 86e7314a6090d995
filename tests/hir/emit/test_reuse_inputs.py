"""Outputs that are written into an input: after every read of the old value, on every rank."""

from __future__ import annotations

import re

import pytest
import torch
from helpers.host_programs import POISON, numbers
from helpers.reuse_cases import (
    CASES,
    MESH,
    Build,
    Expect,
    a_later_reader,
    by_chunks,
    define,
    inputs,
    one_op,
)

import mdfuse as mf
from mdfuse import FusionDefinition, Partial, Shard, hir
from mdfuse.hir.emit import reuse_inputs

SEEDS = [None, *range(5)]


MERGES = [mf.segmentation.merge_composite, mf.segmentation.merge_local]


def names_of(cases: list[tuple[Build, Expect]]) -> list[str]:
    return [build.__name__ for build, _ in cases]


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("merge", MERGES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("build", "expect"), CASES, ids=names_of(CASES))
def test_outputs_lie_in_their_inputs(
    build: Build,
    expect: Expect,
    seed: int | None,
    merge: mf.segmentation.ShouldMerge,
    columns: bool,
) -> None:
    """Whatever the order in which the caller's tensors lie."""
    program = mf.compile(define(build), should_merge=merge)
    assert hir.parse(str(program.host)) == program.host
    want = expect(*inputs())
    rows = [
        dict(zip(("x", "w"), (i.chunk(2)[rank].clone() for i in inputs()), strict=True))
        for rank in range(2)
    ]
    if columns:
        rows = [{name: x.T.contiguous().T for name, x in row.items()} for row in rows]
    names = program.host.inputs
    rows = [dict(zip(names, row.values(), strict=True)) for row in rows]
    result = mf.simulate(program, per_rank=rows, options=POISON, schedule=seed)
    for at, whole in enumerate(want):
        assert torch.equal(result.outputs[at], whole), f"{build.__name__} {at}\n{program}"
    for output, name in program.fusion.reuse.items():
        at = program.host.outputs.index(output)
        for row, outputs in zip(rows, result.per_rank, strict=True):
            assert torch.equal(row[name], outputs[at])
            assert seed is not None or outputs[at].stride() == row[name].stride()
            assert seed is not None or outputs[at].data_ptr() == row[name].data_ptr()


@pytest.mark.parametrize(("build", "expect"), CASES, ids=names_of(CASES))
def test_the_single_device_agrees(build: Build, expect: Expect) -> None:
    fd = define(build)
    x, w = inputs()
    got = mf.reference(fd, [x.clone(), w.clone()])
    for mine, theirs in zip(got, expect(x, w), strict=True):
        assert torch.equal(mine, theirs)


def test_a_second_run_goes_on_from_the_first() -> None:
    program = mf.compile(define(one_op))
    rows = [dict(zip(program.host.inputs, (numbers(2, 3), numbers(2, 3)), strict=True))] * 2
    rows = [{name: x.clone() for name, x in row.items()} for row in rows]
    for run in range(1, 4):
        result = mf.simulate(program, per_rank=rows, options=POISON)
        assert torch.equal(result.per_rank[1][0], numbers(2, 3) + run)


def test_a_partial_output_into_a_partial_input() -> None:
    with FusionDefinition("partials") as fd:
        x = fd.define_tensor([4], mesh=MESH, layout={"x": Partial()})
        fd.add_output(x * 2.0, reuse=x)
        fd.add_output(fd.ops.set(x).on(MESH, {}))
    program = mf.compile(fd)
    (name,) = program.host.inputs
    rows = [{name: numbers(4, start=10 * rank)} for rank in range(2)]
    result = mf.simulate(program, per_rank=rows, options=POISON)
    assert torch.equal(result.outputs[1], 2 * numbers(4) + 10)
    for rank, row in enumerate(rows):
        assert torch.equal(row[name], 2 * numbers(4, start=10 * rank))


def test_one_input_for_two_of_the_program_s() -> None:
    """It would be overwritten while it is still read."""
    program = mf.compile(define(a_later_reader))
    x = numbers(2, 3)
    rows = [dict.fromkeys(program.host.inputs, x)] * 2
    with pytest.raises(mf.ProgramError, match="shares memory with"):
        mf.simulate(program, per_rank=rows, options=POISON)


#: Cases in which every result is computed where it belongs.
IN_PLACE = {
    "one_op": "%x = add(%x, 1.0)",
    "a_post_before_and_after": "%x = add(%x, %t_1)",
    "a_result_that_is_read_again": "%x = add(%x, 1.0)",
    "a_reshard_into_the_input": "%x = set(%total)",
    "no_linear_op": "%x = where(%t, %t_1, %t_2)",
    "a_post_of_the_result": "%x = add(%x, 1.0)",
    "a_view_of_another": "%w = reshape(%x, shape=[4,3])",
    "by_chunks": "%x.i = sub(%x.i, %t.i)",
    "by_chunks_of_several_ops": "%x.i = sub(%x.i, %t.i)",
    "chunks_of_another": "%rows.i = matmul(%w.i, %t_2)",
    "chunks_that_go_on": "%x.i = add(%x.i, 1.0)",
    "chunks_after_a_loop": "%x.j = add(%x.j, 1.0)",
    "two_by_chunks": "%x.i = sub(%x.i, %t_1.i)",
    "sent_by_chunks": "%x.i = add(%x.i, 1.0)",
    "read_on_both_streams": "%x.i = sub(%x.i, %w.i)",
}


@pytest.mark.parametrize(("name", "line"), IN_PLACE.items(), ids=IN_PLACE)
@pytest.mark.parametrize("merge", MERGES, ids=lambda f: f.__name__)
def test_the_instruction_writes_into_the_input(
    name: str, line: str, merge: mf.segmentation.ShouldMerge
) -> None:
    """Nothing is computed elsewhere and copied, inside host units too."""
    (build,) = (build for build, _ in CASES if build.__name__ == name)
    text = str(mf.compile(define(build), should_merge=merge))
    assert line in text and ".new" not in text, text


@pytest.mark.parametrize(
    "name",
    [
        "a_later_reader", "a_view_beside_it", "rows_of_it", "two_that_swap", "two_inputs_that_swap",
        "chunks_and_a_later_reader", "a_chunk_that_is_read_later", "chunks_that_swap",
        "chunks_of_a_product", "other_chunks_too", "other_chunks_before", "received_by_chunks",
        "received_behind_a_reader",
    ],
)  # fmt: skip
def test_what_is_still_read_is_written_later(name: str) -> None:
    (build,) = (build for build, _ in CASES if build.__name__ == name)
    assert re.search(r"%\w+ = set\(%\w+\.new\)", str(mf.compile(define(build))))


@pytest.mark.usefixtures("unjoined")
def test_a_step_of_a_weight_copies_nothing() -> None:
    """The program as one writes it by hand, and torch's calls that a plan makes of it."""
    with FusionDefinition("sgd") as fd:
        w = fd.define_tensor([4, 3], mesh=MESH, layout={"x": Shard(0)})
        g = fd.define_tensor([4, 3], mesh=MESH, layout={"x": Partial()})
        step = 0.5 * fd.ops.set(g).on(MESH, {"x": Shard(0)})
        everywhere = fd.ops.set(w).on(MESH, {})
        fd.add_output(w - step, reuse=w)
        fd.add_output(fd.ops.sum(everywhere))
    program = mf.compile(fd, mf.Options(compile="never"))
    assert "%w = sub(%w, %step)" in str(program)
    mine, comm = numbers(2, 3), mf.init(backend="null", rank=0, size=2)
    try:
        new, _ = program.run(mine, numbers(4, 3))
        plan = str(program.plans.recent)
    finally:
        comm.close()
    assert new is mine
    named = re.search(r"(v\d+) = %w\b", plan)
    assert named is not None, plan
    w, plan = named[1], re.sub(" +#.*", "", plan)
    assert re.search(rf"sub\({w}, v\d+, out={w}\)\n", plan) and "copy" not in plan, plan
    sent = rf"(v\d+) = {w}\n +v\d+ = allgather_base\(b\d+, \1, c\d+\)"  # as it lies
    assert re.search(sent, plan), plan


@pytest.mark.usefixtures("unjoined")
def test_a_step_by_chunks_copies_nothing() -> None:
    """torch's calls of a step in a host loop: slices of the caller's tensor, written in place."""
    program = mf.compile(define(by_chunks))
    assert "alloc" not in str(program) and "set(" not in str(program), program
    x, w = numbers(2, 3), numbers(2, 3, start=100)
    want = x - 0.5 * w
    comm = mf.init(backend="null", rank=0, size=2)
    try:
        (new,) = program.run(x, w)
        plan = re.sub(" +#.*", "", str(program.plans.recent))
    finally:
        comm.close()
    assert new is x
    assert torch.equal(x, want)
    assert len(re.findall(r"sub\((v\d+), v\d+, out=\1\)", plan)) == 3, plan
    assert "copy" not in plan and "empty" not in plan, plan


def test_a_copy_that_is_read_after_its_operand_was_received_again() -> None:
    """In its own order it would be a view of the buffer into which the second post delivers."""
    program = hir.parse("""
    host @twice on mesh(x=2) {
      input %x: f32[1,2] of [2,2] (x=S0)
      input %y: f32[1,2] of [2,2] (x=S0)
      %b: f32[2,2] (x=R) = alloc
      %c0 = post allgather(%x) -> %b f32[2,2] (x=S0) => (x=R) axis=x dim=0
      wait %c0
      %first: f32[2,2] (x=R) = set(%b) contiguous
      %c1 = post allgather(%y) -> %b f32[2,2] (x=S0) => (x=R) axis=x dim=0
      wait %c1
      %z: f32[2,2] (x=R) = sub(%first, %b)
      return %z
    }""")
    rows = [{"x": numbers(1, 2, start=2 * r), "y": numbers(1, 2, start=50 + r)} for r in range(2)]
    y = torch.cat([row["y"] for row in rows])
    for seed in SEEDS:
        result = mf.simulate(program, per_rank=rows, options=POISON, schedule=seed)
        assert torch.equal(result.outputs[0], numbers(2, 2) - y)


def test_each_output_looks_at_its_own_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program with twice as many updates takes twice the work."""

    def looked_at(n: int) -> int:
        seen = []
        writes = reuse_inputs._Write.writes
        with monkeypatch.context() as patch:
            patch.setattr(
                reuse_inputs._Write, "writes", lambda self, i: seen.append(i) or writes(self, i)
            )
            with FusionDefinition("updates") as fd:
                for k in range(n):
                    w = fd.define_tensor([4], layout=mf.Layout(MESH), name=f"w{k}")
                    fd.add_output(w - 0.5, reuse=w)
            mf.compile(fd)
        return len(seen)

    assert 0 < looked_at(20) == 2 * looked_at(10)
