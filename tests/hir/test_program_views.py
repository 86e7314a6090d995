"""Slices of buffers: `select` and `chunk` share storage with what they are slices of."""

from __future__ import annotations

import pytest
import torch
from helpers.host_programs import alone, numbers, parse, simulate
from torch import Tensor

import mdfuse as mf


def is_inside(view: Tensor, whole: Tensor) -> bool:
    return view.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


# -- select --------------------------------------------------------------------------------------

SELECT = """
  input %x: f32[{shape}] (x=R)
  %y: f32[{result}] (x=R) = select(%x, dim={dim}, index={index})
  return %y"""


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -3])
@pytest.mark.parametrize("index", [0, 1, -1])
def test_select_is_a_view(dim: int, index: int) -> None:
    x = numbers(2, 3, 4)
    want = x.select(dim, index)
    result = ",".join(map(str, want.shape))
    (got,) = alone(SELECT.format(shape="2,3,4", result=result, dim=dim, index=index), x=x)
    assert is_inside(got, x) and got.data_ptr() == want.data_ptr()
    assert got.stride() == want.stride()
    assert torch.equal(got, want)


@pytest.mark.parametrize("index", [0, 1, 17, -5])
def test_a_dim_of_extent_one_has_only_index_zero(index: int) -> None:
    x = numbers(1, 3)
    (got,) = alone(SELECT.format(shape="1,3", result="3", dim=0, index=index), x=x)
    assert got.tolist() == [0, 1, 2]


@pytest.mark.parametrize("index", [0, 3, 17])
def test_an_expanded_dim_has_only_index_zero(index: int) -> None:
    body = f"""
      input %x: f32[1,3] (x=R)
      %e: f32[4,3] (x=R) = expand(%x, shape=[4,3])
      %y: f32[3] (x=R) = select(%e, dim=0, index={index})
      return %y"""
    x = numbers(1, 3)
    (got,) = alone(body, x=x)
    assert got.data_ptr() == x.data_ptr()
    assert got.tolist() == [0, 1, 2]


def test_an_input_that_is_expanded() -> None:
    x = numbers(1, 3).expand(4, 3)
    (got,) = alone(SELECT.format(shape="4,3", result="3", dim=0, index=2), x=x)
    assert got.data_ptr() == x.data_ptr()


@pytest.mark.parametrize(
    ("dim", "index", "words"),
    [
        (1, 3, r"select\(%x, dim=1, index=3\): index 3 is out of range for dim 1"),
        (0, -3, r"select\(%x, dim=0, index=-3\): index -3 is out of range for dim 0"),
    ],
)
def test_select_of_what_is_not_there(dim: int, index: int, words: str) -> None:
    with pytest.raises(mf.ProgramError, match=words) as caught:
        alone(SELECT.format(shape="2,3", result="2", dim=dim, index=index), x=numbers(2, 3))
    assert "%x has shape (2, 3) on rank 0" in str(caught.value)


@pytest.mark.parametrize("dim", [2, -3])
def test_select_of_a_dim_that_is_not_there(dim: int) -> None:
    with pytest.raises(mf.ProgramError, match=f"select with dim={dim}\n") as caught:
        parse(SELECT.format(shape="2,3", result="2", dim=dim, index=0))
    assert "dims go from -2 to 1" in str(caught.value)


def test_a_loop_index_that_leaves_the_buffer() -> None:
    body = """
      input %x: f32[3] (x=R)
      for %i in 0..4 {
        %y: f32[] (x=R) = select(%x, dim=0, index=%i)
      }
      return %y"""
    with pytest.raises(mf.ProgramError, match="index 3 is out of range for dim 0"):
        alone(body, x=numbers(3))


# -- chunk ---------------------------------------------------------------------------------------

CHUNKS = """
  input %x: f32[{rows},3] (x=R)
  %y: f32[{rows},3] (x=R) = alloc
  for %i in 0..{count} {{
    %a: f32[{first},3] of [{rows},3] (x=R, chunk(0,{chunks},%i)) = chunk(%x)
    %b: f32[{first},3] of [{rows},3] (x=R, chunk(0,{chunks},%i)) = chunk(%y)
    %b = add(%a, %i)
  }}
  %last: f32[] (x=R) = sum(%a)
  return %y, %last"""


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize(
    ("rows", "chunks"),
    [
        (6, 3),
        (6, 1),
        (7, 3),
        (5, 4),
        (2, 4),
        (1, 3),
        (0, 2),
        (7, (4, 2, 1)),
        (5, (0, 5)),
        (3, (3,)),
    ],
)
def test_chunks(rows: int, chunks: int | tuple[int, ...], seed: int | None) -> None:
    """Uneven ones, empty ones, lengths; every chunk is a part of the buffer, written in place."""
    x = numbers(rows, 3)
    if isinstance(chunks, int):
        pieces = list(x.chunk(chunks)) if rows else []
        pieces += [x[:0]] * (chunks - len(pieces))
        text, count = str(chunks), chunks
    else:
        pieces, count = list(x.split(chunks)), len(chunks)
        text = str(list(chunks)).replace(" ", "")
    first = max(len(p) for p in pieces)
    body = CHUNKS.format(rows=rows, chunks=text, count=count, first=first)
    got, last = alone(body, seed, x=x)
    want = [piece + i for i, piece in enumerate(pieces)]
    assert torch.equal(got, torch.cat(want))
    assert torch.equal(last, pieces[-1].sum())
    assert torch.equal(x, numbers(rows, 3))


def test_chunks_of_the_last_dim_of_a_rank_s_part() -> None:
    body = """
      input %x: f32[2,3] of [4,3] (x=S0)
      %y: f32[2,3] of [4,3] (x=S0) = alloc
      for %i in 0..2 {
        %a: f32[2,2] of [4,3] (x=S0, chunk(1,2,%i)) = chunk(%x)
        %b: f32[2,2] of [4,3] (x=S0, chunk(1,2,%i)) = chunk(%y)
        %b = mul(%a, %i + 1)
      }
      return %y"""
    rows = [{"x": numbers(2, 3, start=10 * rank)} for rank in range(2)]
    result = simulate(parse(body, "mesh(x=2)"), *rows)
    for row, (got,) in zip(rows, result.per_rank, strict=True):
        assert torch.equal(got, row["x"] * torch.tensor([1.0, 1.0, 2.0]))


def test_chunks_of_parts_of_different_lengths() -> None:
    """The parts of the ranks differ, and so do their chunks; both take part in every iteration."""
    body = """
      input %x: f32[3] of [5] (x=S0)
      %y: f32[3] of [5] (x=S0) = alloc
      for %i in 0..2 {
        %a: f32[2] of [5] (x=S0, chunk(0,2,%i)) = chunk(%x)
        %b: f32[2] of [5] (x=S0, chunk(0,2,%i)) = chunk(%y)
        %b = add(%a, extent(%a,0))
      }
      return %y"""
    rows = [{"x": numbers(3)}, {"x": numbers(2)}]
    result = simulate(parse(body, "mesh(x=2)"), *rows)
    assert [outputs[0].tolist() for outputs in result.per_rank] == [[2, 3, 3], [1, 2]]


def test_lengths_that_do_not_add_up() -> None:
    body = CHUNKS.format(rows=5, chunks="[2,2]", count=2, first=2)
    with pytest.raises(mf.MdfuseError, match="5 rows"):
        alone(body, x=numbers(5, 3))


def test_a_chunk_that_is_no_part() -> None:
    """The whole is not part of a rank's share."""
    body = """
      input %x: f32[2] of [4] (x=S0)
      %a: f32[2] of [4] (x=R, chunk(0,2,1)) = chunk(%x)
      %y: f32[] (x=R) = sum(%a)
      return %y"""
    with pytest.raises(mf.ProgramError, match=r"chunk\(%x\): %a is no part of it"):
        simulate(parse(body, "mesh(x=2)"), *[{"x": numbers(2)}] * 2)


def test_a_chunk_as_output() -> None:
    body = """
      input %x: f32[4] (x=R)
      for %i in 0..2 {
        %a: f32[2] of [4] (x=R, chunk(0,2,%i)) = chunk(%x)
      }
      return %a"""
    with pytest.raises(mf.ProgramError, match="returns %a, which is a chunk"):
        alone(body, x=numbers(4))


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_one_name_for_the_chunks_of_two_loops(seed: int | None) -> None:
    """What the first loop left is dropped: it is a view of the input, and must not be written."""
    body = """
      input %x: f32[4] (x=R)
      input %w: f32[4] (x=R)
      for %i in 0..2 {
        %a: f32[2] of [4] (x=R, chunk(0,2,%i)) = chunk(%x)
      }
      for %j in 0..2 {
        for %i in 0..2 {
          %a = chunk(%w)
          %s: f32[] (x=R) = sum(%a)
        }
      }
      return %s"""
    x, w = numbers(4), numbers(4, start=10)
    (got,) = alone(body, seed, x=x, w=w)
    assert got.item() == 25
    assert x.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_transposed_chunk_is_written_through(seed: int | None) -> None:
    body = """
      input %x: f32[4,2] (x=R)
      %y: f32[2,4] (x=R) = alloc
      for %i in 0..2 {
        %a: f32[2,2] of [4,2] (x=R, chunk(0,2,%i)) = chunk(%x)
        %b: f32[2,2] of [2,4] (x=R, chunk(1,2,%i)) = chunk(%y)
        %t: f32[2,2] of [4,2] (x=R, chunk(0,2,%i)) = permute(%b, dims=[1,0])
        %t = set(%a)
      }
      return %y"""
    (got,) = alone(body, seed, x=numbers(4, 2))
    assert torch.equal(got, numbers(4, 2).T)
