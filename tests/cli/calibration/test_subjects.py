"""What a calibration measures does one thing, as often as it says, of the size that it says."""

from collections import defaultdict
from dataclasses import replace

import pytest
import torch

from mdfuse import DeviceMesh
from mdfuse.cli.calibration.subjects import (
    BETWEEN,
    CPU,
    GPU,
    OPTIONS,
    TURNS,
    Backends,
    Scale,
    Way,
    beside,
    points,
    subjects,
    switches,
    ways,
)
from mdfuse.hir.instructions import POSTS
from mdfuse.seeing.amounts import is_work, nbytes, operations, product

#: As with two GPUs: NCCL's, and those of symmetric memory.
BACKENDS: Backends = {
    None: OPTIONS,
    "symmetric": replace(OPTIONS, backend="x=symmetric, meshes=symmetric"),
}


@pytest.mark.parametrize(
    ("scale", "ranks", "step"), [(CPU, 1, 1), (CPU, 2, 3), (CPU, 6, 3), (GPU, 1, 10)]
)
def test_each_subject_does_what_it_says(scale: Scale, ranks: int, step: int) -> None:
    """Every so many are looked at."""
    count = 0
    seen: dict[str, set[object]] = defaultdict(set)
    for some in subjects(scale, ranks, BACKENDS).values():
        for subject in some():
            count += 1
            assert subject.at not in seen[subject.key]
            seen[subject.key].add(subject.at)
            if count % step:
                continue
            ranks_of = [r for mesh in subject.program.meshes for r in mesh.ranks]
            mine = subject.program.project(ranks_of[-1]).written_out
            if subject.table == "links":
                posts = [i for i in mine.instructions if i.op in POSTS]
                assert len(posts) == subject.times
                assert posts[0].comm is not None
                carrier = "symmetric" if subject.key.startswith("symmetric: ") else None
                assert posts[0].comm.backend == carrier
                assert posts[0].comm.bytes_received(ranks_of[-1]) == subject.at
                continue
            works = [i for i in mine.instructions if is_work(i)]
            assert len(works) == subject.times
            for i in works:
                sizes = product(mine, i)
                at = sizes[1:] if sizes is not None else operations(mine, i) or nbytes(mine, i)
                assert at == subject.at
    assert count == points(scale, ranks, BACKENDS)


def test_the_usual_type_has_most() -> None:
    assert CPU.dtypes[0] is torch.float32 and GPU.dtypes[0] is torch.bfloat16


@pytest.mark.parametrize("way", ways(2, BACKENDS), ids=lambda way: way.key)
def test_a_product_stands_between_a_post_and_its_wait(way: Way) -> None:
    given = ((None, True), (1 << 12, False), (1 << 12, True))
    programs = (beside(CPU, way, *sizes).project(1).written_out for sizes in given)
    product_alone, sent, both = programs
    product_op = next(i for i in product_alone.instructions if is_work(i)).op
    ops = [
        [i.op for i in p.instructions if i.op in (*POSTS, "wait", product_op)]
        for p in (product_alone, sent, both)
    ]
    times = len(ops[0])
    assert times > 1 and ops[1] == ["post", "wait"] * times
    assert ops[2] == ["post", product_op, "wait"] * times


@pytest.mark.parametrize("between", BETWEEN)
def test_products_and_other_work_take_turns(between: str) -> None:
    mesh = DeviceMesh.arange(x=1)
    programs = [p.project(0).written_out for p in switches(CPU, mesh, between)]
    alone, other, both = ([i.fn for i in p.instructions if is_work(i)] for p in programs)
    assert alone == ["linear"] * TURNS and other == [other[0]] * TURNS != alone
    assert both == ["linear", other[0]] * TURNS
