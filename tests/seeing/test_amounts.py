"""How much instructions compute, read and write, counted by hand."""

import pytest
import torch
import torch.nn.functional as F

import mdfuse as mf
from mdfuse import DeviceMesh, Shard
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.hir.rank.pipelines import project
from mdfuse.seeing.amounts import attention, is_work, nbytes, operations, product

MESH = DeviceMesh.arange(tp=2)


def first(fd: mf.FusionDefinition) -> tuple[HostProgram, Instruction]:
    program = project(mf.compile(fd, mf.Options(compile="never")).host, 0)
    return program, next(i for i in program.instructions if is_work(i))


def test_a_linear_layer_is_one_product() -> None:
    with mf.FusionDefinition("linear") as fd:
        x = fd.define_tensor([3, 5, 8], mesh=MESH)
        w = fd.define_tensor([6, 8], mesh=MESH, layout={"tp": Shard(0)})
        fd.add_output(fd.ops.linear(x, w))
    program, i = first(fd)
    assert product(program, i) == (1, 15, 3, 8)  # half of the features of 6
    assert operations(program, i) == 2 * 15 * 3 * 8
    assert nbytes(program, i) == 4 * (15 * 8 + 3 * 8 + 15 * 3)


@pytest.mark.parametrize(
    ("left", "right", "sizes"),
    [
        ([7, 4, 8], [7, 8, 6], (7, 4, 6, 8)),
        ([7, 4, 8], [8, 6], (1, 28, 6, 8)),
        ([4, 8], [8], (1, 4, 1, 8)),
    ],
)
def test_products(left: list[int], right: list[int], sizes: tuple[int, ...]) -> None:
    with mf.FusionDefinition("product") as fd:
        a, b = (fd.define_tensor(shape, mesh=MESH) for shape in (left, right))
        fd.add_output(fd.ops.matmul(a, b))
    program, i = first(fd)
    assert product(program, i) == sizes


def test_a_contraction_is_a_batch_of_products() -> None:
    with mf.FusionDefinition("contraction") as fd:
        a = fd.define_tensor([2, 3, 4, 5], mesh=MESH)
        b = fd.define_tensor([2, 5, 4, 7], mesh=MESH)
        fd.add_output(fd.ops.einsum("bihd,bdhj->bhij", a, b))
    program = project(mf.compile(fd, mf.Options(compile="never")).host, 0)
    found = [s for i in program.instructions if (s := product(program, i)) is not None]
    assert found == [(8, 3, 7, 5)]


def test_a_table_of_words_is_read_where_it_is_asked() -> None:
    with mf.FusionDefinition("words") as fd:
        table = fd.define_tensor([1000, 8], mesh=MESH)
        words = fd.define_tensor([5], torch.int64, mesh=MESH)
        fd.add_output(F.embedding(words, table))  # type: ignore[arg-type]
    program, i = first(fd)
    assert nbytes(program, i) < 1000 * 8 * 4, "not the whole of it"
    assert nbytes(program, i) == 2 * 5 * 8 * 4 + 5 * 8


def test_an_attention_takes_the_keys_that_rows_see() -> None:
    """The later half of eight rows sees 5 to 8 keys; with windows of two, two each."""
    for window, pairs in ((None, 5 + 6 + 7 + 8), (2, 2 * 4)):
        with mf.FusionDefinition("later_rows") as fd:
            q, k, v = (
                fd.define_tensor([2, 3, 8, 4], mesh=MESH, layout={"tp": Shard(2)}) for _ in "qkv"
            )
            fd.add_output(fd.ops.attention(q, k, v, is_causal=True, window=window).output)
        options = mf.Options(compile="never", context="gather")
        program = project(mf.compile(fd, options).host, 1)
        (i,) = (i for i in program.instructions if i.fn == "attention")
        keys = -(-pairs // 4)
        assert operations(program, i) == 2 * 2 * (2 * 3 * 4 * 4) * keys
        found = attention(program, i)
        assert found is not None and (found.keys, found.is_causal) == (keys, False)
