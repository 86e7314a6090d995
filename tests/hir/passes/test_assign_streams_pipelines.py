"""Two stages on disjoint meshes: what each rank waits for, on which stream, and what comes out."""

from __future__ import annotations

import re

import pytest
import torch
from helpers.host_programs import POISON, numbers
from helpers.programs import program_text
from helpers.stream_case import text

import mdfuse as mf
from mdfuse import DeviceMesh, FusionDefinition, Stream, hir
from mdfuse.hir.rank.pipelines import project
from mdfuse.hir.rank.unrolled import written_out
from mdfuse.hir.verify.check import verify

FIRST, SECOND = DeviceMesh([0]), DeviceMesh([1])
SEEDS = [None, *range(4)]


def chunked(chunks: int) -> mf.Program:
    """The chunks of a batch go through both stages in a loop."""
    with FusionDefinition("chunked") as fd:
        x = fd.define_tensor([7, 3], mesh=FIRST)
        w, v = fd.define_tensor([3, 4], mesh=FIRST), fd.define_tensor([4, 2], mesh=SECOND)
        stream = Stream(0, chunks)
        h = ((x @ w).on(FIRST, stream=stream) * 2.0).on(FIRST, stream=stream)
        g = fd.ops.set(h).on(SECOND, stream=stream)
        fd.add_output(fd.ops.relu((g @ v).on(SECOND, stream=stream)).on(SECOND, stream=stream))
    return mf.compile(fd)


def unrolled(batches: int) -> mf.Program:
    """One batch after the other, written out by the user."""
    with FusionDefinition("unrolled") as fd:
        w, v = fd.define_tensor([3, 4], mesh=FIRST), fd.define_tensor([4, 2], mesh=SECOND)
        for _ in range(batches):
            h = fd.define_tensor([7, 3], mesh=FIRST) @ w * 2.0
            fd.add_output(fd.ops.relu(fd.ops.set(h).on(SECOND) @ v))
    return mf.compile(fd)


def ops(program: hir.HostProgram) -> list[str]:
    """What a rank does, in order: ops with what tells streams and handles apart."""
    found = []
    for i in program.instructions:
        more = i.outputs if i.op == "post" else (*i.reads, *(str(v) for _, v in i.attrs))
        shown = i.op in ("post", "wait", "set_stream", "sync", "free")
        found.append(" ".join((i.op if i.op != "binary" else i.fn, *(more if shown else ()))))
    return found


def body(program: hir.HostProgram) -> str:
    """The loop over chunks."""
    return re.split(r"for %i in .*\n", text(program))[1].split("\n  }")[0]


def test_a_sender_waits_for_what_it_sent_a_chunk_before() -> None:
    """The transfers wait for what they send, and work for what was sent before that."""
    found = body(chunked(3).for_rank(0))
    switches = re.findall(r"set_stream \d|sync \d|= matmul|= mul|post|next|wait", found)
    made = ["set_stream 0", "= matmul", "= mul", "set_stream 1", "sync 0", "post"]
    assert switches == [*made, "next", "set_stream 0", "wait"], found


def test_a_receiver_does_not_wait_for_what_it_computes() -> None:
    """What arrives is computed on the other stream, element-wise ops too."""
    found = body(chunked(3).for_rank(1))
    switches = re.findall(r"set_stream \d|sync \d|= matmul|= relu|post|next|wait", found)
    want = ["set_stream 1", "post", "next", "set_stream 0", "wait", "= matmul", "= relu"]
    assert switches == want, found


def test_a_sender_computes_the_next_chunk_meanwhile() -> None:
    """Two chunks at most are alive in the program as it runs."""
    found = ops(written_out(chunked(3).for_rank(0)))
    calls = re.findall(r"matmul|post c0@\d|wait c0@\d|free h.i@\d", "\n".join(found))
    assert calls[:8] == [
        "matmul", "post c0@1", "matmul", "post c0@2",
        "wait c0@1", "free h.i@1", "matmul", "post c0@3",
    ]  # fmt: skip
    assert calls[8:10] == ["wait c0@2", "free h.i@2"]


def test_a_receiver_posts_the_next_chunk_before_it_works() -> None:
    found = ops(written_out(chunked(3).for_rank(1)))
    calls = re.findall(r"matmul|post c0@\d|wait c0@\d", "\n".join(found))
    assert calls == [
        "post c0@1", "post c0@2", "wait c0@1", "matmul",
        "post c0@3", "wait c0@2", "matmul", "wait c0@3", "matmul",
    ]  # fmt: skip


def test_a_sender_of_batches_computes_the_next_one_meanwhile() -> None:
    found = [op for op in ops(unrolled(3).for_rank(0)) if not op.startswith("free t")]
    calls = re.findall(r"matmul|post \w+|wait \w+|free", "\n".join(found))
    assert calls == [
        "matmul", "post c0", "matmul", "wait c0", "free",
        "post c1", "matmul", "wait c1", "free", "post c2", "wait c2", "free",
    ], found  # fmt: skip


@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 9])
def test_the_values_of_chunks(chunks: int) -> None:
    """Uneven ones, and more of them than rows; in lockstep and in any order."""
    program = chunked(chunks)
    x, w, v = numbers(7, 3), numbers(3, 4, start=-5), numbers(4, 2, start=-3)
    for seed in SEEDS:
        result = mf.simulate(program, [x, w, v], options=POISON, schedule=seed)
        assert torch.equal(result.outputs[0], torch.relu(x @ w * 2 @ v))


def test_the_values_of_batches() -> None:
    program = unrolled(3)
    xs = [numbers(7, 3, start=n) for n in range(3)]
    w, v = numbers(3, 4, start=-5), numbers(4, 2, start=-3)
    for seed in SEEDS:
        result = mf.simulate(program, [w, v, *xs], options=POISON, schedule=seed)
        for got, x in zip(result.outputs, xs, strict=True):
            assert torch.equal(got, torch.relu(x @ w * 2 @ v))


OVERWRITTEN = program_text("assign_streams_pipelines/overwritten")


def test_what_is_sent_is_not_overwritten_before() -> None:
    """The wait passes what reads the buffer, not what writes it."""
    program = hir.parse(OVERWRITTEN)
    verify(program)
    assert ops(project(program, 0))[:4] == ["post c0", "mul", "wait c0", "add"]
    for seed in range(10):
        given = [{"x": numbers(2)}, {}]
        result = mf.simulate(program, per_rank=given, options=POISON, schedule=seed)
        assert torch.equal(result.per_rank[1][0], numbers(2))
        assert torch.equal(result.per_rank[0][1], 2 * numbers(2) + 1)


NEEDED = program_text("assign_streams_pipelines/needed")


def test_a_sync_that_a_rank_needs_stays() -> None:
    """One buffer for all chunks: it is written again only when it is sent."""
    program = hir.parse(NEEDED)
    verify(program)
    assert re.findall(r"sync \d", body(project(program, 0))) == ["sync 1", "sync 0"]
    assert re.findall(r"sync \d|set_stream \d", body(project(program, 1))) == ["set_stream 1"]
    for seed in range(10):
        result = mf.simulate(program, [numbers(2)], options=POISON, schedule=seed)
        assert torch.equal(result.outputs[0], numbers(2) + 2)
