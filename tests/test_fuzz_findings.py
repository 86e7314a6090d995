"""What drawn inputs found, each in its smallest form; beside plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import mdfuse as mf
from mdfuse import DeviceMesh, FusionDefinition, Partial, Replicate, Shard, hir
from mdfuse.hir.verify.check import verify

MESH = DeviceMesh.arange(t=2)


def test_a_refused_output_leaves_no_trace() -> None:
    with FusionDefinition("f") as fd:
        x = fd.define_tensor([4], torch.float32, MESH, {})
        y = fd.define_tensor([4], torch.float32, MESH, {})
        for of, into in ((x, x), (x, y)):
            with pytest.raises(mf.DefinitionError, match="reuse= is said of it"):
                fd.add_output(of, reuse=into)
        fd.add_output(x)
        with pytest.raises(mf.DefinitionError, match="reuse= is said of it"):
            fd.add_output(y * 2, reuse=x)
        fd.add_output(y + 1, reuse=y)
    given = torch.arange(4.0)
    first, second = mf.simulate(mf.compile(fd), [given, given * 2]).outputs
    assert torch.equal(first, given) and torch.equal(second, given * 2 + 1)


def test_what_arrives_is_written_into_an_input_after_its_wait() -> None:
    with FusionDefinition("f") as fd:
        x = fd.define_tensor([], torch.int64, MESH, {"t": Replicate()})
        y = fd.define_tensor([], torch.int64, MESH, {"t": Partial()})
        fd.add_output(fd.ops.permute(y, []), reuse=x)
    found = mf.simulate(mf.compile(fd), [torch.tensor(1), torch.tensor(5)]).outputs
    assert torch.equal(found[0], torch.tensor(5))


def test_what_a_posted_buffer_is_a_view_of_is_freed_after_the_wait() -> None:
    mesh = DeviceMesh.arange(t=4)
    with FusionDefinition("f") as fd:
        x = fd.define_tensor([2, 2], torch.bool, mesh, {"t": Shard(1)})
        t = x * x
        whole = fd.ops.set(t).on(mesh, {"t": Replicate()})
        fd.add_output(t * x)
        fd.add_output(whole)
    given = torch.tensor([[True, False], [True, True]])
    for found in mf.simulate(mf.compile(fd), [given]).outputs:
        assert torch.equal(found, given)


@pytest.mark.parametrize("name", ["mse_loss", "l1_loss"])
def test_losses_have_the_dtype_that_both_have_as_tensors(name: str) -> None:
    one, many = torch.tensor(2.0, dtype=torch.bfloat16), torch.tensor([1.0, 3.5]).half()
    with FusionDefinition("f") as fd:
        x = fd.define_tensor([], one.dtype, MESH, {})
        y = fd.define_tensor([2], many.dtype, MESH, {})
        fd.add_output(getattr(fd.ops, name)(x, y))
    (found,) = mf.simulate(mf.compile(fd), [one, many]).outputs
    want = getattr(F, name)(one.expand(2), many)
    assert found.dtype == want.dtype == torch.float32
    assert torch.equal(found, want)


@pytest.mark.parametrize(
    "use",
    [
        lambda ops, x: ops.broadcast_in_dim(x, 3, [0]),
        lambda ops, x: ops.set(x).on(MESH, torch.ones(2)),
        lambda ops, x: ops.set(x).on(MESH, []),
        lambda ops, x: ops.layer_norm(x, 4, x, x == x),
        lambda ops, x: ops.scaled_dot_product_attention(
            ops.zeros([2, 1, 4]), ops.zeros([0, 1, 4]), ops.zeros([0, 1, 4]), enable_gqa=True
        ),
    ],
)
def test_strange_arguments_are_refused(use: Any) -> None:
    with FusionDefinition("f") as fd:
        x = fd.define_tensor([4], torch.float32, MESH, {})
        with pytest.raises(mf.MdfuseError):
            use(fd.ops, x)
        fd.add_output(x)


def test_bits_of_complex_parts_are_not_joined() -> None:
    part = torch.ones(2, dtype=torch.complex64)
    layout = mf.Layout(MESH, {"t": Partial("bor")})
    with pytest.raises(mf.CommunicationError, match="not defined"):
        mf.unshard_tensor([part, part], layout)


@pytest.mark.parametrize(
    "line",
    ["%z: bf16[] (x=R) = eq(None, %x)", "%z: bool[] (x=R) = full_like(2, %x, dtype=f64)"],
)
def test_no_number_where_only_a_tensor_will_do(line: str) -> None:
    text = f"host @f on mesh(x=2) {{\ninput %x: f32[1,2] (x=R)\n{line}\nreturn %z\n}}"
    words = r"of numbers is a number|means nothing|does not take these operands"
    with pytest.raises(mf.ProgramError, match=words):
        verify(mf.hir.parse(text))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("add", torch.bool), ("add", torch.int64), ("sub", torch.int64), ("sub", torch.float32)],
)
def test_alpha_does_not_change_the_dtype(name: str, dtype: torch.dtype) -> None:
    x, other = torch.ones(3, dtype=torch.bfloat16), torch.tensor([0, 1, 1]).to(dtype)
    with mf.FusionDefinition() as fd:
        a, b = (fd.define_tensor([3], t.dtype, mf.DeviceMesh.arange(tp=1)) for t in (x, other))
        fd.add_output(getattr(fd.ops, name)(a, b, alpha=1.5))
    got = mf.simulate(mf.compile(fd), [x, other]).outputs[0]
    torch.testing.assert_close(got, getattr(torch, name)(x, other, alpha=1.5))


def test_alpha_of_bools() -> None:
    x, other = torch.tensor([False, False, True]), torch.tensor([False, True, True])
    with mf.FusionDefinition() as fd:
        a, b = (fd.define_tensor([3], torch.bool, mf.DeviceMesh.arange(tp=1)) for _ in range(2))
        fd.add_output(fd.ops.add(a, b, alpha=3))
    got = mf.simulate(mf.compile(fd), [x, other]).outputs[0]
    torch.testing.assert_close(got, torch.add(x, other, alpha=3))


@pytest.mark.parametrize("shape", [(-1, 0), (-1, 2), (-2,)])
def test_a_new_dim_has_no_extent_to_keep(shape: tuple[int, ...]) -> None:
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([], mesh=mf.DeviceMesh.arange(tp=1))
        with pytest.raises(mf.DefinitionError, match="expand"):
            fd.ops.expand(x, shape)
        fd.add_output(x + 1)


@pytest.mark.parametrize("cut", [slice(1, None), slice(1, -1), slice(None, None, 2)])
def test_slices_of_slices_of_a_symbolic_extent(cut: slice) -> None:
    with FusionDefinition("f") as fd:
        x = fd.define_tensor([-1], torch.int64, MESH, {})
        t = x
        for _ in range(7):
            t = t[cut]
        fd.add_output(t + x.sum())
    program = mf.compile(fd)
    for n in (15, 16, 40, 256):
        given = want = torch.arange(n)
        for _ in range(7):
            want = want[list(range(len(want)))[cut]]
        (found,) = mf.simulate(program, [given]).outputs
        assert torch.equal(found, want + given.sum()), n


@pytest.mark.parametrize("shape", [[], [3]])
def test_zeros_without_memory_have_the_dtype_of_zeros(shape: list[int]) -> None:
    one = DeviceMesh([0])
    with FusionDefinition("f") as fd:
        x = fd.define_tensor(shape, torch.int32, one, {})
        fd.add_output(x * 2)
        fd.add_output(x * 0.5)
    program = mf.compile(fd)
    given = torch._efficientzerotensor(shape, dtype=torch.int32)
    want = [torch.zeros(shape, dtype=torch.int32) * 2, torch.zeros(shape, dtype=torch.int32) * 0.5]
    for run in (program.run, program.run):
        for found, wanted in zip(run(given), want, strict=True):
            assert found.dtype == wanted.dtype
            assert torch.equal(found, wanted)
    assert [x.dtype for x in mf.reference(fd, [given])] == [x.dtype for x in want]
    assert [x.dtype for x in mf.simulate(program, [given]).outputs] == [x.dtype for x in want]


def test_zeros_without_memory_of_another_shape_are_not_made() -> None:
    with FusionDefinition("f") as fd:
        x = fd.define_tensor([4], torch.float32, MESH, {"t": Shard(0)})
        fd.add_output(x * 2)
    huge = torch._efficientzerotensor((2**50,), dtype=torch.float32)
    with pytest.raises(mf.ProgramError, match="1125899906842624"):
        mf.simulate(mf.compile(fd), per_rank=[{"x": huge}, {"x": torch.ones(2)}])


@pytest.mark.parametrize("split", [Replicate(), Shard(0), Shard(1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layer_norm_of_16_bits_with_factors_of_32(dtype: torch.dtype, split: Any) -> None:
    with FusionDefinition("f") as fd:
        x = fd.define_tensor([4, 6], dtype, MESH, {"t": split})
        w, b = (fd.define_tensor([6], torch.float32, MESH, {}) for _ in range(2))
        fd.add_output(fd.ops.layer_norm(x, 6, w, b))
    torch.manual_seed(0)
    given = torch.randn(4, 6).to(dtype), torch.randn(6), torch.randn(6)
    (found,) = mf.simulate(mf.compile(fd), [*given]).outputs
    want = F.layer_norm(given[0], (6,), *given[1:])
    assert found.dtype == want.dtype == dtype
    torch.testing.assert_close(found, want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("dtype", "weight", "bias"),
    [
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float16, torch.float16),
        (torch.float32, torch.float64, torch.float64),
    ],
)
def test_layer_norm_with_factors_that_torch_refuses(
    dtype: torch.dtype, weight: torch.dtype, bias: torch.dtype
) -> None:
    with pytest.raises(RuntimeError):
        F.layer_norm(
            torch.ones(2, 3, dtype=dtype), (3,), *(torch.ones(3, dtype=d) for d in (weight, bias))
        )
    with FusionDefinition("f") as fd:
        x = fd.define_tensor([2, 3], dtype, MESH, {})
        w, b = (fd.define_tensor([3], d, MESH, {}) for d in (weight, bias))
        with pytest.raises(mf.DefinitionError, match="weight and bias have the dtype"):
            fd.ops.layer_norm(x, 3, w, b)
        fd.add_output(x)


def test_a_shape_of_one_extent() -> None:
    with FusionDefinition("f") as fd:
        fd.define_tensor([2], mesh=MESH)
        for seed, shape in ((3, 5), (3, [5])):
            fd.add_output(fd.ops.set(fd.ops.uniform(shape, seed=seed)).on(MESH, {}))
    one, other = mf.simulate(mf.compile(fd), [torch.ones(2)]).outputs
    assert one.shape == torch.rand(5).shape == other.shape


@pytest.mark.parametrize("alpha", [-1, 2, 0, True, False])
@pytest.mark.parametrize("other", [True, False])
def test_alpha_of_bools_is_one(alpha: float, other: bool) -> None:
    x = torch.tensor([True, False])
    for a, b in ((x, other), (other, x), (x, x)):
        with FusionDefinition("f") as fd:
            y = fd.define_tensor([2], torch.bool, MESH, {})
            fd.add_output(fd.ops.add(*(y if z is x else z for z in (a, b)), alpha=alpha))
        (found,) = mf.simulate(mf.compile(fd), [x]).outputs
        torch.testing.assert_close(found, torch.add(a, b, alpha=alpha), rtol=0, atol=0)


@pytest.mark.parametrize("correction", [-3, -1, 0, 1, 2])
def test_the_variance_of_nothing(correction: int) -> None:
    with FusionDefinition("f") as fd:
        x = fd.define_tensor([4, 0], mesh=MESH)
        fd.add_output(fd.ops.var(x, correction=correction))
        fd.add_output(fd.ops.std(x, 1, correction=correction))
    given = torch.empty(4, 0)
    found = mf.simulate(mf.compile(fd), [given]).outputs
    assert found[0].isnan().all() and found[1].isnan().all() and found[1].shape == (4,)
    assert torch.var(given, correction=correction).isnan()


@pytest.mark.parametrize("limit", [float("nan"), float("inf")])
def test_integers_between_limits_that_none_can_be(limit: float) -> None:
    with pytest.raises(RuntimeError, match="overflow"):
        F.hardtanh(torch.tensor([3]), -1, limit)
    with FusionDefinition("f") as fd:
        x = fd.define_tensor([2], torch.int64, MESH, {})
        with pytest.raises(mf.DefinitionError, match="with the number"):
            fd.ops.hardtanh(x, -1, limit)
        fd.add_output(x)


def test_a_pad_of_what_nobody_bound() -> None:
    text = """host @f on mesh(x=2) {
  input %x: f32[0] (x=R)
  %y: i8[3,3] of [6,3] (x=S0) = pad(%i, dim=0)
  return %x
}
"""
    with pytest.raises(mf.ProgramError, match="%i"):
        mf.hir.verify.check.verify(mf.hir.parse(text))


def test_a_mesh_of_more_ranks_than_there_are_integers() -> None:
    with pytest.raises(mf.MdfuseError, match="a job has at most"):
        mf.hir.parse(f"host @f on mesh(x={2**62}, y=8) {{\n  input %x: f32[1] (x=R, y=R)\n}}\n")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.float32])
@pytest.mark.parametrize("value", [1.5, 0.5, 2])
def test_the_value_of_addcmul(dtype: torch.dtype, value: float) -> None:
    x = torch.tensor([3, 5, 0, 2]).to(dtype)
    with FusionDefinition("f") as fd:
        y = fd.define_tensor([4], dtype, MESH, {"t": Shard(0)})
        fd.add_output(fd.ops.set(fd.ops.addcmul(y, y, y, value=value)).on(MESH, {}))
    (found,) = mf.simulate(mf.compile(fd), [x]).outputs
    torch.testing.assert_close(found, torch.addcmul(x, x, x, value=value))


def test_more_pieces_than_anybody_posts() -> None:
    text = """host @f on mesh(x=2) {
  input %x: f32[4] (x=P(sum))
  %y: f32[4] (x=R) = alloc
  %c = post allreduce[sum](%x) -> %y f32[4] (x=P(sum)) => (x=R) axis=x pieces=9223372036854775807
  wait %c
  return %y
}
"""
    with pytest.raises(mf.ProgramError, match="in 9223372036854775807 pieces"):
        mf.hir.verify.check.verify(mf.hir.parse(text))


@pytest.mark.parametrize("shape", [(), (2, 2)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float16, torch.complex64])
def test_alpha_of_a_bool_beside_another_dtype(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, y = torch.full(shape, 6).to(dtype), torch.tensor([[True, False], [False, True]])
    with FusionDefinition("f") as fd:
        a, b = fd.define_tensor(shape, dtype, MESH, {}), fd.define_tensor([2, 2], torch.bool, MESH)
        fd.add_output(fd.ops.add(a, b, alpha=3))
    (found,) = mf.simulate(mf.compile(fd), [x, y]).outputs
    torch.testing.assert_close(found, torch.add(x, y, alpha=3), rtol=0, atol=0)


@pytest.mark.parametrize("exponent", [True, False, 1, 0, 2.0])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_powers_of_a_bool(exponent: float, shape: tuple[int, ...]) -> None:
    with FusionDefinition("f") as fd:
        x = fd.define_tensor(shape, torch.bool, MESH, {})
        power = fd.ops.pow(x, exponent)
        fd.add_output(power)
        fd.add_output(power * -0.25)
    given = torch.arange(math.prod(shape)).reshape(shape) % 2 == 0
    power_found, scaled = mf.simulate(mf.compile(fd), [given]).outputs
    expected = torch.pow(given, exponent)
    assert power_found.dtype == expected.dtype and torch.equal(power_found, expected)
    assert scaled.dtype == (expected * -0.25).dtype and torch.equal(scaled, expected * -0.25)


def test_a_table_that_is_a_number() -> None:
    with FusionDefinition("f") as fd:
        number = fd.define_scalar(dtype=torch.int64)
        with pytest.raises(mf.DefinitionError, match="embedding of scalars means nothing"):
            fd.ops.embedding(number, number)
        fd.add_output(fd.define_tensor([1], torch.float32, MESH, {}))


def test_numbers_of_a_run_are_not_complex() -> None:
    with (
        FusionDefinition("f") as fd,
        pytest.raises(mf.DefinitionError, match=r"no number of a run is complex") as raised,
    ):
        fd.ops.complex(1.0, 2.0)
    assert "test_fuzz_findings.py" in str(raised.value)


def test_a_sum_of_what_is_repeated_along_blocks() -> None:
    """The gradient of a variance: a Partial that is expanded to a dim that is split in blocks."""
    layout = {"t": Shard(0, blocks=(1, 3))}
    with FusionDefinition("f") as fd:
        x = fd.define_tensor([4, 6], torch.float64, MESH, layout)
        (dx,) = mf.grad(x.var(), [x])
        fd.add_output(dx)
    given = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(given.var(), given)
    (found,) = mf.simulate(mf.compile(fd), [given.detach()]).outputs
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rows", [1, 6])
def test_places_that_arrive_late(rows: int) -> None:
    """In a random order of what happens, a lookup is queued before its indices are there."""
    with FusionDefinition("f") as fd:
        places = fd.define_tensor([6], torch.int64, MESH, {"t": Shard(0, blocks=2)})
        table = fd.define_tensor([rows, 3], torch.float32, MESH, {})
        fd.add_output(F.embedding(fd.ops.set(places).on(MESH, {"t": Shard(0)}), table))
    given, numbers = torch.arange(6) % rows, torch.randn(rows, 3)
    for schedule in range(1, 4):
        options = mf.Options(poison=True)
        found = mf.simulate(mf.compile(fd), [given, numbers], options=options, schedule=schedule)
        assert torch.equal(found.outputs[0], numbers[given])


def test_a_copy_before_windows_that_overlap() -> None:
    """A convolution reads more than its part of a copy, of which no part is asked for."""
    with FusionDefinition("f") as fd:
        x = fd.define_tensor([1, 1, 8], torch.float64, MESH, {})
        w = fd.define_tensor([1, 1, 3], torch.float64, MESH, {})
        y = F.conv1d(fd.ops.set(x * 2), w, padding=1).on(MESH, {"t": Shard(2)})
        fd.add_output(y)
    given, kernel = torch.randn(1, 1, 8).double(), torch.randn(1, 1, 3).double()
    (found,) = mf.simulate(mf.compile(fd), [given, kernel]).outputs
    torch.testing.assert_close(found, F.conv1d(given * 2, kernel, padding=1))


@pytest.mark.parametrize(
    "call",
    [
        "routed_mm_grad(%x, %x, None, shape=[1,2,3,3])",
        "grouped_mm_grad(%x, %x, None, shape=[2,3,3])",
        "routed_mm(%x, None, %x)",
        "solve(%x, None)",
    ],
)
def test_an_operand_that_is_not_there(call: str) -> None:
    """The rule of the op's shape takes it for granted."""
    text = f"""
        host @f on mesh(t=2) {{
          input %x: f32[3,3] (t=R)
          %y: f32[3,3] (t=R) = {call}
          return %y
        }}
    """
    with pytest.raises(mf.ProgramError):
        verify(hir.parse(text))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
@pytest.mark.parametrize("eps", [1e-6, 1, True])
def test_distances_of_integers_are_floats(dtype: torch.dtype, eps: float) -> None:
    x, y = (torch.randint(0, 100, (4, 3)).to(dtype) for _ in range(2))
    with FusionDefinition("f") as fd:
        a, b = (fd.define_tensor([4, 3], dtype, MESH, {"t": Shard(0)}) for _ in range(2))
        fd.add_output(F.pairwise_distance(a, b, eps=eps))
    (found,) = mf.simulate(mf.compile(fd), [x, y]).outputs
    torch.testing.assert_close(found, F.pairwise_distance(x, y, eps=eps))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
@pytest.mark.parametrize(
    "norm",
    [torch.norm, torch.linalg.vector_norm, lambda x: torch.linalg.matrix_norm(x, 1)],
    ids=["norm", "vector_norm", "matrix_norm"],
)
def test_norms_of_integers_are_refused(norm: Callable[[Any], Any], dtype: torch.dtype) -> None:
    with pytest.raises(RuntimeError, match="floating point"):
        norm(torch.ones(3, 3, dtype=dtype))
    with FusionDefinition("f") as fd:
        x = fd.define_tensor([3, 3], dtype, MESH, {})
        with pytest.raises(mf.DefinitionError, match="a norm of %x") as caught:
            norm(x)
        assert "cast it to a float dtype" in str(caught.value)
        fd.add_output(x.norm(dtype=torch.float32))
    (found,) = mf.simulate(mf.compile(fd), [torch.ones(3, 3, dtype=dtype)]).outputs
    torch.testing.assert_close(found, torch.tensor(3.0))


@pytest.mark.parametrize("number", [-(2**63), 1 - 2**63, 2**63 - 1, -1, -0.0, 1e300, 5e-324])
def test_a_constant_reads_back(number: float) -> None:
    with FusionDefinition("f") as fd:
        x = fd.define_tensor([2], torch.float64, MESH, {})
        i = fd.define_tensor([2], torch.int64, MESH, {})
        fd.add_output(x * number)
        fd.add_output((i if isinstance(number, int) else x) + number)
    program = mf.compile(fd)
    assert hir.parse(str(program)) == program.host
    given = torch.tensor([1.0, -3.0], dtype=torch.float64), torch.tensor([0, 1])
    found = mf.simulate(program, list(given)).outputs
    assert torch.equal(found[0], given[0] * number)
    assert torch.equal(found[1], given[isinstance(number, int)] + number)


@pytest.mark.parametrize("number", ["9223372036854775808", "-9223372036854775809", "9" * 5000])
def test_a_number_that_64_bits_do_not_hold(number: str) -> None:
    head = "host @f on mesh(t=2) {\n  input %x: f32[2] (t=R)\n"
    text = f"{head}  %y: f32[2] (t=R) = add(%x, {number})\n"
    with pytest.raises(mf.ProgramError, match=r"write one from -9223372036854775808 to 9223372036"):
        hir.parse(text + "  return %y\n}\n")


@pytest.mark.parametrize(
    "index",
    [[4], [0, -5], (slice(None), [3]), ([0, 1], [0, 9]), (None, [4]), (..., [-4]), [2**70]],
    ids=str,
)
def test_integers_of_a_list_that_are_out_of_range(index: Any) -> None:
    with FusionDefinition("f") as fd:
        x = fd.define_tensor([4, 3], torch.float32, MESH, {"t": Shard(0)})
        with pytest.raises(mf.DefinitionError, match="is out of range for dim"):
            x[index]
        fd.add_output(x[[3, -4], [2, -3]])
    whole = torch.arange(12.0).reshape(4, 3)
    (found,) = mf.simulate(mf.compile(fd), [whole]).outputs
    assert torch.equal(found, whole[[3, -4], [2, -3]])


def test_integers_of_a_list_where_a_run_chooses_the_extent() -> None:
    with FusionDefinition("f") as fd:
        x = fd.define_tensor([-1, 3], torch.float32, MESH, {})
        fd.add_output(x[[5, -1]])
    program, whole = mf.compile(fd), torch.arange(18.0).reshape(6, 3)
    assert torch.equal(mf.simulate(program, [whole]).outputs[0], whole[[5, -1]])
    with pytest.raises(mf.MdfuseError, match=r"x\.0 > 5"):
        mf.simulate(program, [whole[:5]])


@pytest.mark.parametrize("blocks", [2**16 + 1, 10**12, 2**63, 2**70, (1,) * (2**16 + 1)])
def test_more_blocks_than_anything_has(blocks: Any) -> None:
    with pytest.raises(mf.LayoutError, match="a dim has at most 65536"):
        Shard(0, blocks=blocks)
    assert str(Shard(0, blocks=2**16)) == "S0/65536"


LOOP = "  for %i in 0..2 {\n    %y.i: f32[2] of [4] (t=R, chunk(0,2,%i)) = chunk(%x)\n  }\n"


@pytest.mark.parametrize(
    ("body", "output"),
    [
        (LOOP + "  %y: f32[2] of [4] (t=R, chunk(0,2,%i)) = chunk(%x)\n", "%x"),
        (LOOP + "  %y: f32[2] of [4] (t=R, chunk(0,2,%i)) = neg(%y.i)\n", "%y"),
        (LOOP, "%y.i"),
        (LOOP + "  set_stream %i\n", "%x"),
        ("  input %y: f32[2] of [4] (t=R, chunk(0,2,%i))\n" + LOOP, "%x"),
        ("  if rank == 0 {\n" + LOOP + "    sync %i\n  }\n", "%x"),
    ],
)
def test_an_index_outside_of_its_loop(body: str, output: str) -> None:
    head = "host @f on mesh(t=2) {\n  input %x: f32[4] (t=R)\n"
    program = hir.parse(f"{head}{body}  return {output}\n}}\n")
    with pytest.raises(mf.ProgramError, match="%i is no index"):
        verify(program)
    verify(hir.parse(f"{head}{LOOP}{LOOP.replace('%y', '%z')}  return %x\n}}\n"))


def test_only_operations_are_shown_as_such() -> None:
    shown = dir(mf.ops)
    assert shown == sorted(mf.ops.__all__) and {"relu", "softmax", "clip", "index_select"} <= {
        *shown
    }
    assert not {"taking_kinds", "as_dtype", "FAMILIES", "Operation", "views"} & {*shown}
    for name in shown:
        assert callable(getattr(mf.ops, name))
    for name in ("taking_kinds", "as_dtype"):
        with pytest.raises(AttributeError, match="there is no operation"):
            getattr(mf.ops, name)
