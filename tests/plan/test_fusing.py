"""Host units that are compiled: what is handed to the compiler, what is left, equal units."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, FusionDefinition, Options
from mdfuse.evaluator import HostIrEvaluator
from mdfuse.hir.text.parser import parse
from mdfuse.ir import creation
from mdfuse.ir.element_writes import NOWHERE
from mdfuse.plan import compilation, inductor
from mdfuse.plan.build import Plan
from mdfuse.plan.inductor import TracedGraph
from mdfuse.plan.tensor_meta import Form, form_of

MESH = DeviceMesh.arange(t=1)
ALWAYS = Options(compile="always")


class Compiler:
    """Stands for Inductor: runs the graph that it is given as it is."""

    def __init__(self) -> None:
        self.bodies: list[list[Form]] = []
        self.fails = False
        self.pads = False

    def __call__(self, found: TracedGraph) -> Callable[..., Any]:
        if self.fails:
            raise NotImplementedError("no such op\nand more")
        forms = [form_of(x) for x in found.arguments]
        self.bodies.append(forms)

        def call(*values: Tensor) -> list[Tensor]:
            assert not any(x.is_neg() or x.is_conj() or torch._is_zerotensor(x) for x in values)
            assert found.sizes or [form_of(x) for x in values] == forms
            results = found.graph(*values)
            assert found.sizes or [form_of(x) for x in results] == found.results
            return [padded(x) for x in results] if self.pads else list(results)

        return call


def padded(x: Tensor) -> Tensor:
    """The values of x, in rows that are longer; what is behind them is not a number."""
    longer = x.new_full((*x.shape[:-1], x.shape[-1] + 2), math.nan)
    longer[..., : x.shape[-1]] = x
    return longer[..., : x.shape[-1]]


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    found = Compiler()
    monkeypatch.setattr(inductor, "compiled", found)
    monkeypatch.setattr(inductor, "folder", lambda: None)
    compilation._MADE.empty()
    yield found
    compilation._MADE.empty()


def defined(
    build: Callable[..., Any], *shapes: list[int], dtype: torch.dtype = torch.float32
) -> FusionDefinition:
    with FusionDefinition("f") as fd:
        given = [fd.define_tensor(shape, dtype, MESH, {}) for shape in shapes]
        for output in build(fd, *given):
            fd.add_output(output)
    return fd


def run(fd: FusionDefinition, *given: Tensor, options: Options = ALWAYS) -> list[Tensor]:
    program = mf.compile(fd, options=options)
    for _ in range(3):
        found = program.run(*given)
    return found


def test_a_unit_is_one_call(compiler: Compiler) -> None:
    fd = defined(lambda fd, x, y: [(x.exp() * y).sin(), x.exp() + 1.0], [3, 4], [4])
    x, y = torch.randn(3, 4), torch.randn(4)
    program = mf.compile(fd, options=ALWAYS)
    first, second = program.run(x, y)
    torch.testing.assert_close(first, (x.exp() * y).sin())
    torch.testing.assert_close(second, x.exp() + 1)
    assert len(compiler.bodies) == 1
    plan = program.plans.recent
    assert isinstance(plan, Plan)
    steps = [step.op for step in plan.steps]
    assert steps.count("launch") == 1 and "binary" not in steps


def test_results_lie_as_they_were_traced(compiler: Compiler) -> None:
    """Inductor pads products on GPUs; what goes by addresses would read the padding."""
    compiler.pads = True

    def build(fd: FusionDefinition, x: Any, w: Any) -> list[Any]:
        y = x.exp() @ w
        return [y, y.reshape([2, 9]), y.sum([0]) * 2.0, (x + 1.0)[:, 1:2]]

    x, w = torch.randn(3, 4), torch.randn(4, 6)
    found = run(defined(build, [3, 4], [4, 6]), x, w)
    y = x.exp() @ w
    assert compiler.bodies
    for got, want in zip(found, (y, y.reshape(2, 9), y.sum(0) * 2, (x + 1)[:, 1:2]), strict=True):
        torch.testing.assert_close(got, want)
    assert [z.stride() for z in found[:2]] == [(6, 1), (9, 1)]
    flat = torch.as_strided(found[0], (18,), (1,))
    torch.testing.assert_close(flat, y.flatten())


def test_equal_units_are_compiled_once(compiler: Compiler) -> None:
    def build(fd: FusionDefinition, x: Any, w: Any) -> list[Any]:
        for _ in range(200):
            x = (x @ w).exp() * 0.25 - 1.0
        return [x]

    x, w = torch.randn(3, 4), torch.randn(4, 4) * 0.1
    (got,) = run(defined(build, [3, 4], [4, 4]), x, w)
    for _ in range(200):
        x = (x @ w).exp() * 0.25 - 1
    torch.testing.assert_close(got, x)
    assert len(compiler.bodies) <= 2  # the last one may have fewer layers


def test_other_numbers_are_another_unit(compiler: Compiler) -> None:
    for factor in (2.0, 3.0):
        fd = defined(lambda fd, x, factor=factor: [x.exp() * factor], [3])
        (got,) = run(fd, torch.ones(3))
        torch.testing.assert_close(got, torch.ones(3).exp() * factor)
    assert len(compiler.bodies) == 2


def test_a_weight_is_updated_in_place(compiler: Compiler) -> None:
    with FusionDefinition("step") as fd:
        w, g = (fd.define_tensor([4, 4], torch.float32, MESH, {}) for _ in "wg")
        fd.add_output(w - (g * g).sqrt() * 0.5, reuse=w)
    program = mf.compile(fd, options=ALWAYS)
    w, g = torch.randn(2, 4, 4)
    want, at = w.clone(), w.data_ptr()
    for _ in range(3):
        (got,) = program.run(w, g)
        want = want - (g * g).sqrt() * 0.5
        assert got.data_ptr() == at
        torch.testing.assert_close(w, want)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("count", [1, 2, 6])
def test_sums_over_chunks_are_one_function(count: int, compiler: Compiler) -> None:
    """The first chunk is computed as the others are, whatever joins the parts."""
    with FusionDefinition("sums") as fd:
        x = fd.define_tensor([6, 4], torch.float32, MESH, {}, name="x")
        y = (x * 2.0).sin()
        for made in (fd.ops.sum, fd.ops.amax, fd.ops.amin, fd.ops.prod):
            fd.add_output(made(y, dims=[0]))
        fd.add_output(fd.ops.amax(fd.ops.cast(x * 9.0, torch.int32), dims=[0]))
    program = mf.pipeline(fd, microbatches=count, batch={"x": 0}, options=ALWAYS)
    x = torch.randn(6, 4)
    y = (x * 2).sin()
    want = [y.sum(0), y.amax(0), y.amin(0), y.prod(0), (x * 9).int().amax(0)]
    for _ in range(3):
        for got, expected in zip(program.run(x), want, strict=True):
            torch.testing.assert_close(got, expected)
    assert len(compiler.bodies) == 1
    assert isinstance(program.plans.recent, Plan)
    assert [step.op for step in program.plans.recent.steps].count("launch") == count


def test_what_fills_a_buffer_asks_for_no_address(compiler: Compiler) -> None:
    """Where it is traced there is none, and torch warns of whoever asks."""
    with FusionDefinition("f") as fd:
        x = fd.define_tensor([3], torch.float64, MESH, {})
        y = x.tanh()
        fd.add_output(y, reuse=x)
        fd.add_output(y * 2.0)
    given = torch.randn(3, dtype=torch.float64)
    want = given.tanh()
    got = mf.compile(fd, options=ALWAYS).run(given)
    assert got[0] is given and len(compiler.bodies) == 1
    torch.testing.assert_close(got, [want, want * 2])


def test_a_view_of_an_input_that_is_written(compiler: Compiler) -> None:
    with FusionDefinition("old") as fd:
        w = fd.define_tensor([3, 4], torch.float32, MESH, {})
        fd.add_output(w + 1.0, reuse=w)
        fd.add_output(fd.ops.permute(w, [1, 0]))
        fd.add_output(w.exp() * 2.0)
    program = mf.compile(fd, options=ALWAYS)
    w = torch.randn(3, 4)
    for _ in range(3):
        before = w.clone()
        new, old, other = program.run(w)
        assert torch.equal(w, before + 1) and new.data_ptr() == w.data_ptr()
        assert torch.equal(old, before.T)
        torch.testing.assert_close(other, before.exp() * 2)


def test_views_of_one_tensor(compiler: Compiler) -> None:
    """As the parts of a fused projection are: what is only read may share memory."""
    with FusionDefinition("parts") as fd:
        x = fd.define_tensor([4, 6], torch.float32, MESH, {})
        w = fd.define_tensor([6, 6], torch.float32, MESH, {})
        y = x @ w
        a, b = y[:, :3], y[:, 3:]
        product = a @ fd.ops.permute(b, [1, 0])
        fd.add_output((product.exp() + 1.0) @ (a.sin() * b.cos()))
    x, w = torch.randn(4, 6), torch.randn(6, 6) * 0.1
    (got,) = run(fd, x, w)
    a, b = (x @ w).split(3, 1)
    torch.testing.assert_close(got, ((a @ b.T).exp() + 1) @ (a.sin() * b.cos()))
    assert compiler.bodies


def test_outputs_and_views_of_them(compiler: Compiler) -> None:
    def build(fd: FusionDefinition, x: Any) -> list[Any]:
        y = x.exp() + 1.0
        return [y, fd.ops.permute(y, [1, 0]), y[1:] * 2.0]

    x = torch.randn(3, 4)
    got = run(defined(build, [3, 4]), x)
    y = x.exp() + 1
    for mine, theirs in zip(got, (y, y.T, y[1:] * 2), strict=True):
        torch.testing.assert_close(mine, theirs)
    kept = [x.clone() for x in got]
    run(defined(build, [3, 4]), x + 1)
    assert all(map(torch.equal, got, kept))  # later runs write elsewhere


SHARED: dict[str, Callable[[Any], Any]] = {
    "a view": lambda y: y.permute(1, 0, 2),
    "a view of another shape": lambda y: y.reshape(3, 8),
    "a view of a view": lambda y: y.permute(1, 0, 2)[1:],
    "a sum": lambda y: y.sum(0) * 2.0,
    "a product with a view": lambda y: y @ y.permute(0, 2, 1),
}


@pytest.mark.parametrize("what", SHARED)
def test_what_reads_one_of_two_equal_outputs(what: str, compiler: Compiler) -> None:
    """Both outputs come behind the compiled function, which reads one of them, or not."""

    def build(fd: FusionDefinition, x: Any, w: Any) -> list[Any]:
        y = x.exp() @ w
        first, second = fd.ops.set(y), fd.ops.set(y)
        return [first, second, SHARED[what](second)]

    x, w = torch.randn(2, 3, 4), torch.randn(4, 4)
    y = x.exp() @ w
    got = run(defined(build, [2, 3, 4], [4, 4]), x, w)
    for mine, theirs in zip(got, (y, y, SHARED[what](y)), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert compiler.bodies


def test_strided_and_expanded_arguments(compiler: Compiler) -> None:
    fd = defined(lambda fd, x: [(x.exp() * x).sum(0)], [4, 3])
    for x in (torch.randn(3, 4).T, torch.randn(1, 3).expand(4, 3), torch.randn(8, 6)[::2, ::2]):
        (got,) = run(fd, x)
        torch.testing.assert_close(got, (x.exp() * x).sum(0))
    assert len({body[0] for body in compiler.bodies}) == 3


LAZY: dict[str, Callable[[Tensor], Tensor]] = {
    "negative": torch._neg_view,
    "no memory": lambda x: torch._efficientzerotensor(x.shape),
}


@pytest.mark.parametrize("what", LAZY)
def test_elements_that_are_not_in_memory(what: str, compiler: Compiler) -> None:
    """A run with a view of an input, behind runs with plain inputs of its shape and strides."""
    program = mf.compile(defined(lambda fd, x: [x[1:].exp() * x[:3]], [4, 3]), options=ALWAYS)
    for make in (torch.clone, torch.clone, LAZY[what], LAZY[what], torch.clone):
        x = make(torch.randn(4, 3))
        plain = x.clone().resolve_neg()
        torch.testing.assert_close(program.run(x)[0], plain[1:].exp() * plain[:3])


def test_what_cannot_be_compiled_runs_as_it_is(compiler: Compiler) -> None:
    compiler.fails = True
    fd = defined(lambda fd, x: [x.exp() * 2.0], [3])
    with pytest.raises(mf.ProgramError, match="launch fused0 of @f cannot be compiled") as found:
        run(fd, torch.ones(3))
    assert "NotImplementedError: no such op" in str(found.value)
    assert 'compile="auto" runs it eagerly' in str(found.value)


def test_refusals_are_told(compiler: Compiler) -> None:
    compiler.fails = True
    program = mf.compile(defined(lambda fd, x: [x.exp() * 2.0], [3]), options=ALWAYS)
    assert "launches: 1, of 2 local instructions" in program.explain()
    with pytest.raises(mf.ProgramError):
        program.run(torch.ones(3))
    assert "fused0: runs eagerly, NotImplementedError: no such op" in program.explain()


def test_a_product_that_fills_a_buffer_is_no_part(compiler: Compiler) -> None:
    """A compiler would compute it elsewhere, and copy."""

    def build(fd: FusionDefinition, x: Any, w: Any) -> list[Any]:
        y = x.exp() * 0.5
        return [y @ w, fd.ops.permute(y, [1, 0]).sin() + 1.0]

    program = mf.compile(defined(build, [3, 4], [4, 5]), options=ALWAYS)
    x, w, out = torch.randn(3, 4), torch.randn(4, 5), [torch.empty(3, 5), torch.empty(3, 4).t()]
    for _ in range(3):
        got = program.run(x, w, out=out)
        y = x.exp() * 0.5
        torch.testing.assert_close(got[0], y @ w)
        torch.testing.assert_close(got[1], y.T.sin() + 1)
        assert got[0] is out[0] and got[1] is out[1]
        x = x + 1
    plan = program.plans.recent
    assert isinstance(plan, Plan)
    lines = [line for line in str(plan).splitlines() if "launch fused0" in line]
    assert len(lines) == 2 and "out=" in lines[1]
    assert len(compiler.bodies) == 1 and len(compiler.bodies[0]) == 2  # x, and the second output


def test_poisoned_buffers(compiler: Compiler) -> None:
    fd = defined(lambda fd, x: [(x @ x).exp() * 2.0 + x], [4, 4])
    x = torch.randn(4, 4) * 0.1
    (got,) = run(fd, x, options=Options(compile="always", poison=True))
    torch.testing.assert_close(got, (x @ x).exp() * 2 + x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_dtypes(compiler: Compiler, dtype: torch.dtype) -> None:
    fd = defined(lambda fd, x: [fd.ops.where(x == x, x, x).float() * 0.5 + 1.0], [5], dtype=dtype)
    x = torch.tensor([0, 1, 2, 3, 4]).to(dtype)
    (got,) = run(fd, x)
    torch.testing.assert_close(got, x.float() * 0.5 + 1)


def test_inductor_itself() -> None:
    """C++ on CPUs: the one test that compiles, which takes seconds."""
    fd = defined(lambda fd, x, w: [fd.ops.rms_norm(x, [64], w, 1e-6) + x], [8, 64], [64])
    x, w = torch.randn(8, 64), torch.randn(64)
    (got,) = run(fd, x, w)
    wide = x.double()
    want = wide / (wide * wide).mean(-1, keepdim=True).add(1e-6).sqrt() * w.double() + wide
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_a_repeated_element_of_a_launch_that_travels() -> None:
    """What `expand` made inside is known outside, where one element of it is sent."""
    mesh = DeviceMesh.arange(x=2)
    with FusionDefinition("repeats") as fd:
        x = fd.define_tensor([5, 4], torch.float32, mesh, {"x": mf.Shard(1)})
        y = x.exp() * 2.0
        repeated = y[:, None].expand(5, 9, 4)
        fd.add_output(fd.ops.set(repeated).on(mesh, {"x": mf.Shard(0)}))
        fd.add_output(repeated + 1.0)
    program = mf.compile(fd, options=ALWAYS)  # tests verify it, too
    (launch, *_) = [i for i in program.host.walk() if i.op == "launch"]
    assert any(i.fn == "expand" and i.outputs[0] in launch.outputs for i in launch.body)
    x = torch.randn(5, 4)
    results = mf.simulate(program, [x]).outputs
    expected = (x.exp() * 2)[:, None].expand(5, 9, 4)
    torch.testing.assert_close(results[0], expected)
    torch.testing.assert_close(results[1], expected + 1)


def test_numbers_from_outside_of_a_unit(compiler: Compiler) -> None:
    """As the ones of a gradient: what makes a tensor of numbers makes it dense."""
    mesh, other = MESH, DeviceMesh.arange(u=1)
    with FusionDefinition("numbers") as fd:
        x = fd.define_tensor([3, 4], torch.float32, mesh, {})
        ones = fd.ops.full([4], 0.5, dtype=torch.float32, mesh=other, layout={})
        moved = fd.ops.set(x.exp() * 2.0).on(other, {})
        fd.add_output(moved.sin() * ones.expand(3, 4) + 1.0)
    (got,) = run(fd, x := torch.randn(3, 4))
    torch.testing.assert_close(got, (x.exp() * 2).sin() * 0.5 + 1)


@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 4), (4, 1, 3), (2, 3, 4, 5), (1, 3, 1)])
def test_what_makes_numbers_is_dense(shape: tuple[int, ...]) -> None:
    for box in (None, tuple((n // 3, n) for n in shape)):
        made = [
            creation.uniform(1, shape=shape, dtype=torch.float32, stream=2, box=box),
            creation.full(2.0, shape=shape, dtype=torch.float32, box=box),
            creation.constant(
                values=range(math.prod(shape)), shape=shape, dtype=torch.int64, box=box
            ),
        ]
        assert all(x.is_contiguous() for x in made)
        assert made[2].shape == made[0].shape


@pytest.mark.parametrize(
    "body",
    [
        "%y: f32[3,4] (t=R) = mul(%x, 2)",
        "%c: f32[] (t=R) = full(2, shape=[], dtype=f32)  %y: f32[3,4] (t=R) = mul(%x, %c)",
        "%v: f32[4,3] (t=R) = permute(%x, dims=[1,0])  %w: f32[4,3] (t=R) = mul(%v, 2)"
        "  %y: f32[3,4] (t=R) = permute(%w, dims=[1,0])",
    ],
)
def test_what_one_call_makes_is_known_to_the_next_unit(body: str, compiler: Compiler) -> None:
    """A unit of one call gains nothing; how its result lies must not be forgotten over that."""
    text = f"""
        host @two on mesh(t=1) {{
          input %x: f32[3,4] (t=R)
          launch first(%x) -> %y {{
            {body}
          }}
          launch second(%y) -> %z {{
            %a: f32[3,4] (t=R) = exp(%y)
            %z: f32[3,4] (t=R) = add(%a, 1)
          }}
          free %y
          return %z
        }}
    """
    evaluator = HostIrEvaluator(parse(text.replace("  %", "\n%")), options=ALWAYS)
    x = torch.randn(4, 3).T
    (found,) = evaluator.run({"x": x})
    torch.testing.assert_close(found, (x * 2).exp() + 1)
    assert len(compiler.bodies) == 1 and not evaluator.fuser.refused


def test_a_view_of_what_a_unit_makes_is_known_to_the_next_one(compiler: Compiler) -> None:
    """As of keys and values, which a backward reads: the view is taken behind the unit."""
    text = """
        host @views on mesh(t=1) {
          input %x: f32[3,4] (t=R)
          launch first(%x) -> %y {
            %v: f32[4,3] (t=R) = permute(%x, dims=[1,0])
            %w: f32[4,3] (t=R) = mul(%v, 2)
            %u: f32[4,3] (t=R) = exp(%w)
            %y: f32[3,4] (t=R) = permute(%u, dims=[1,0])
          }
          launch second(%y) -> %z {
            %a: f32[3,4] (t=R) = sin(%y)
            %z: f32[3,4] (t=R) = add(%a, 1)
          }
          free %y
          return %z
        }
    """
    evaluator = HostIrEvaluator(parse(text), options=ALWAYS)
    x = torch.randn(3, 4)
    (found,) = evaluator.run({"x": x})
    torch.testing.assert_close(found, (x * 2).exp().sin() + 1)
    assert len(compiler.bodies) == 2 and not evaluator.fuser.refused


def test_a_product_that_is_written_over_is_not_copied() -> None:
    """Its memory is its own, unlike that of a view."""
    text = """
        host @products on mesh(t=1) {
          input %x: f32[2,3,4] (t=R)
          input %w: f32[4,4] (t=R)
          %y: f32[2,3,4] (t=R) = linear(%x, %w) contiguous
          %y = add(%y, %x)
          return %y
        }
    """
    evaluator = HostIrEvaluator(parse(text))
    x, w = torch.randn(2, 3, 4), torch.randn(4, 4)
    (found,) = evaluator.run({"x": x, "w": w})
    torch.testing.assert_close(found, x @ w.T + x)
    assert "copy_" not in str(evaluator.plans.recent)


@pytest.mark.parametrize(
    ("places", "attrs"),
    [
        ([6, 0, 3], ""),
        ([6, 0, 6], ""),
        ([NOWHERE, 0, 0], ", drops=True"),
        ([6, NOWHERE, NOWHERE], ", drops=True"),
        ([NOWHERE] * 3, ", drops=True"),
    ],
)
def test_rows_are_written_in_place_by_the_unit(
    places: list[int], attrs: str, compiler: Compiler
) -> None:
    """Among equal places the last one counts; where no row is to be written, none is."""
    text = """
        host @cache on mesh(t=1) {
          input %x: f32[3,4] (t=R)
          input %at: i64[3] (t=R)
          input %c: f32[7,4] (t=R)
          alias %n: f32[7,4] (t=R) = %c
          launch first(%x, %at, %c) -> %c {
            %a: f32[3,4] (t=R) = sin(%x)
            %b: f32[3,4] (t=R) = mul(%a, 2)
            %c = index_copy(%at, %b, %c, along=0{attrs})
          }
          %y: f32[7,4] (t=R) = exp(%c)
          return %n, %y
        }
    """
    evaluator = HostIrEvaluator(parse(text.replace("{attrs}", attrs)), options=ALWAYS)
    for _ in range(2):
        x, c = torch.randn(3, 4), torch.randn(7, 4)
        wanted = c.clone()
        for n, place in enumerate(places):
            if place != NOWHERE:
                wanted[place] = x[n].sin() * 2
        new, y = evaluator.run({"x": x, "at": torch.tensor(places), "c": c})
        assert new is c
        torch.testing.assert_close([new, y], [wanted, wanted.exp()])
    assert len(compiler.bodies) == 1 and not evaluator.fuser.refused


def test_views_behind_a_unit_are_dropped(compiler: Compiler) -> None:
    """Else what the unit made would be there until the run ends."""
    text = """
        host @views on mesh(t=1) {
          input %x: f32[3,4] (t=R)
          launch first(%x) -> %w {
            %a: f32[3,4] (t=R) = sin(%x)
            %b: f32[3,4] (t=R) = mul(%a, 2)
            %v: f32[4,3] (t=R) = permute(%b, dims=[1,0])
            %w: f32[3,4] (t=R) = permute(%v, dims=[1,0])
          }
          %y: f32[3,4] (t=R) = exp(%w)
          free %w
          return %y
        }
    """
    evaluator = HostIrEvaluator(parse(text), options=ALWAYS)
    x = torch.randn(3, 4)
    (found,) = evaluator.run({"x": x})
    torch.testing.assert_close(found, (x.sin() * 2).exp())
    lines = str(evaluator.plans.recent).splitlines()
    dropped = {x for line in lines if line.endswith("= None") for x in re.findall(r"v\d+", line)}
    bound = {x for line in lines[1:-1] for x in re.findall(r"(v\d+),? = ", line)}
    assert bound - dropped == {lines[-1].strip().removeprefix("return [").removesuffix("]")}


def test_what_lies_nobody_knows_how_is_made_dense(compiler: Compiler) -> None:
    """Most of it is dense already; here it follows the order of heads and positions before."""
    text = """
        host @between on mesh(t=1) {
          input %x: f32[1,4,2,8] (t=R)
          %v: f32[1,2,4,8] (t=R) = permute(%x, dims=[0,2,1,3])
          %w: f32[1,2,4,8] (t=R), %l: f32[1,2,4] (t=R) = attention(%v, %v, %v, None)
          launch unit(%w) -> %y, %s {
            %a: f32[1,2,4,8] (t=R) = exp(%w)
            %y: f32[1,2,4,8] (t=R) = add(%a, %w)
            %s: f32[1,4,2,8] (t=R) = permute(%y, dims=[0,2,1,3]) contiguous
          }
          free %v, %w, %l
          return %y, %s
        }
    """
    evaluator = HostIrEvaluator(parse(text), options=ALWAYS)
    x = torch.randn(1, 4, 2, 8)
    y, s = evaluator.run({"x": x})
    v = x.transpose(1, 2)
    w = torch.softmax(v @ v.mT / 8**0.5, -1) @ v
    torch.testing.assert_close(y, w.exp() + w)
    torch.testing.assert_close(s, y.transpose(1, 2))
    assert s.is_contiguous() and s.data_ptr() != y.data_ptr()
    assert len(compiler.bodies) == 1 and not evaluator.fuser.refused
