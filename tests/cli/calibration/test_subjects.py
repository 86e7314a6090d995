"""What a calibration measures does one thing, as often as it says, of the size that it says."""

from collections import defaultdict

import pytest
import torch

from mdfuse.cli.calibration.subjects import CPU, GPU, Scale, points, subjects
from mdfuse.hir.instructions import POSTS
from mdfuse.seeing.amounts import is_work, nbytes, operations, product


@pytest.mark.parametrize(
    ("scale", "ranks", "step"), [(CPU, 1, 1), (CPU, 2, 3), (CPU, 6, 3), (GPU, 1, 10)]
)
def test_each_subject_does_what_it_says(scale: Scale, ranks: int, step: int) -> None:
    """Every so many are looked at."""
    count = 0
    seen: dict[str, set[object]] = defaultdict(set)
    for some in subjects(scale, ranks).values():
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
                assert posts[0].comm.bytes_received(ranks_of[-1]) == subject.at
                continue
            works = [i for i in mine.instructions if is_work(i)]
            assert len(works) == subject.times
            for i in works:
                sizes = product(mine, i)
                at = sizes[1:] if sizes is not None else operations(mine, i) or nbytes(mine, i)
                assert at == subject.at
    assert count == points(scale, ranks)


def test_the_usual_type_has_most() -> None:
    assert CPU.dtypes[0] is torch.float32 and GPU.dtypes[0] is torch.bfloat16
