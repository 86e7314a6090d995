"""What a calibration measures does one thing, as often as it says, of the size that it says."""

from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from helpers import sampling

import mdfuse as mf
from mdfuse import DeviceMesh
from mdfuse.cli.calibration.microbenchmarks import OPTIONS, _sum_across
from mdfuse.cli.calibration.scales import CPU, GPU, Scale, blocks_of
from mdfuse.cli.calibration.sending import Backends, Way, beside, ways
from mdfuse.cli.calibration.suite import points, subjects
from mdfuse.hir.instructions import POSTS
from mdfuse.hir.rank.pipelines import project
from mdfuse.hir.rank.unrolled import written_out
from mdfuse.seeing.amounts import attention, is_work, nbytes, operations, product
from mdfuse.seeing.cost_keys import LinkKey, WorkKey
from mdfuse.seeing.costs import ONE_QUERY
from mdfuse.seeing.kernels import kernels

#: As with two GPUs: NCCL's, and those of symmetric memory.
BACKENDS: Backends = {
    None: OPTIONS,
    "symmetric": replace(OPTIONS, backend="x=symmetric, meshes=symmetric"),
}


@pytest.mark.parametrize(
    ("scale", "ranks", "step"), [(CPU, 1, 1), (CPU, 2, 3), (CPU, 6, 3), (GPU, 1, 10)]
)
def test_each_subject_does_what_it_says(scale: Scale, ranks: int, step: int) -> None:
    """Every so many are looked at, in a sample a third of them."""
    step *= sampling.of(1, 3)
    count = 0
    seen: dict[object, set[object]] = defaultdict(set)
    for some in subjects(scale, ranks, BACKENDS).values():
        for subject in some():
            count += 1
            key = subject.key
            assert subject.at not in seen[key]
            seen[key].add(subject.at)
            if count % step:
                continue
            ranks_of = [r for mesh in subject.program.meshes for r in mesh.ranks]
            mine = written_out(project(subject.program, ranks_of[-1]))
            if isinstance(key, LinkKey):
                posts = [i for i in mine.instructions if i.op in POSTS]
                assert len(posts) == subject.times
                assert posts[0].comm is not None
                if scale is CPU:  # each when its rank has worked, and the same without it
                    ops = [i.op for i in mine.instructions if i.fn == "linear" or i.op in POSTS]
                    assert ops == [ops[0], posts[0].op] * subject.times
                    assert subject.without is not None
                    rest = written_out(project(subject.without, ranks_of[-1]))
                    sent = (*POSTS, "wait")
                    assert [i.fn or i.op for i in rest.instructions if i.op not in sent] == [
                        i.fn or i.op for i in mine.instructions if i.op not in sent
                    ]
                    assert not any(i.op in sent for i in rest.instructions)
                assert posts[0].comm.backend == key.backend
                assert posts[0].comm.bytes_received(ranks_of[-1]) == subject.at
                continue
            works = [i for i in mine.instructions if is_work(i)]
            assert len(works) == subject.times or key.name == "query"
            if subject.table == "attentions":
                for i in works:
                    a = attention(mine, i)
                    assert a is not None and (a.blocks, a.keys, a.features) == subject.at
                    assert a.queries == a.keys and WorkKey("", "bf16", 0, a.is_causal) == key
                continue
            if key.name == ONE_QUERY:
                assert {nbytes(mine, i) for i in works} == {subject.at}
                assert all(a.queries == 1 for i in works if (a := attention(mine, i)))
                continue
            if key.name == "query":
                (a, *_) = (attention(mine, i) for i in works)
                assert a is not None and a.keys == a.queries == subject.at
                assert subject.times == len(works) * a.heads * a.queries
                continue
            if key.name.startswith("compiled"):  # where nothing is, two operations are done
                works = works[::2]
            for i in works:
                sizes = product(mine, i)
                at = sizes[1:] if sizes is not None else operations(mine, i) or nbytes(mine, i)
                assert at == subject.at
    assert count == points(scale, ranks, BACKENDS)


def test_blocks_fill_multiprocessors() -> None:
    """A sequence of 4096 has 32 blocks in a head."""
    assert blocks_of(CPU) == []
    assert blocks_of(GPU, is_causal=True) == [32, 128, 256, 512]
    assert blocks_of(GPU) == [32, 128, 512], "each wave takes as long"
    assert blocks_of(replace(GPU, multiprocessors=108), is_causal=True) == [32, 96, 192, 416]
    assert blocks_of(replace(GPU, multiprocessors=8)) == [32]


def test_what_is_compiled_is_a_kernel_across_memory() -> None:
    options = replace(OPTIONS, compile="always")
    with mf.FusionDefinition("across") as fd:
        fd.add_output(-_sum_across(fd, DeviceMesh([0]), torch.bfloat16, 64))
    host = project(mf.compile(fd, options).host, 0)
    (launch,) = (i for i in host.instructions if i.op == "launch")
    (kernel,) = kernels(host, launch)
    assert kernel.like == "across" and kernel.nbytes == nbytes(host, launch) == 3 * 2 * 64 * 512


def test_the_usual_type_has_most() -> None:
    assert CPU.dtypes[0] is torch.float32 and GPU.dtypes[0] is torch.bfloat16


@pytest.mark.parametrize("way", ways(2, BACKENDS), ids=lambda way: str(way.key))
def test_a_product_stands_between_a_post_and_its_wait(way: Way) -> None:
    """What would be sent is written in both programs, before the product."""
    programs = (beside(CPU, way, 1 << 12, sends=x) for x in (False, True))
    alone, both = (written_out(project(p, 1)) for p in programs)
    ops = [
        [
            i.fn or i.op
            for i in p.instructions
            if i.op in (*POSTS, "wait") or i.fn in ("neg", "linear")
        ]
        for p in (alone, both)
    ]
    times = ops[0].count("linear")
    own = [] if way.kind == "SendRecv" else ["neg"]  # rank 0 has it there
    assert times > 1 and ops[0] == [*own, "linear"] * times
    assert ops[1] == [*own, "post", "linear", "wait"] * times
