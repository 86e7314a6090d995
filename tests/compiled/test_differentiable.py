"""Programs under torch's autograd, beside the same calls of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, FusionDefinition, Shard
from mdfuse.compiled.differentiable import _Differentiable, _Forward

Body = Callable[..., Any]
Shapes = tuple[tuple[int, ...], ...]
CLOSE = {"rtol": 1e-10, "atol": 1e-12}


@pytest.fixture(autouse=True)
def alone(unjoined: None) -> mf.Communicator:
    return mf.init()


def defined(body: Body, shapes: Shapes, dtype: torch.dtype = torch.float64) -> FusionDefinition:
    with FusionDefinition("f") as fd:
        inputs = [fd.define_tensor(s, dtype, name=f"x{n}") for n, s in enumerate(shapes)]
        for y in body(*inputs):
            fd.add_output(y)
    return fd


def drawn(shapes: Shapes, wanted: tuple[int, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs, and equal ones for torch; those that are wanted require gradients."""
    torch.manual_seed(0)
    found = [torch.randn(s, dtype=torch.float64) for s in shapes]
    pairs = [(x.clone(), x.clone()) for x in found]
    for n in wanted:
        for x in pairs[n]:
            x.requires_grad_()
    return [a for a, _ in pairs], [b for _, b in pairs]


def layer(x: Any, w: Any, v: Any) -> Any:
    h = F.silu(F.linear(x, w))
    return F.linear(h, v) + x, h.sum(-1)


def attended(q: Any, k: Any, v: Any) -> Any:
    return (F.scaled_dot_product_attention(q, k, v, is_causal=True),)


BODIES: dict[str, tuple[Body, Shapes]] = {
    "a layer": (layer, ((5, 4), (6, 4), (4, 6))),
    "attention": (attended, ((2, 2, 5, 4), (2, 2, 5, 4), (2, 2, 5, 4))),
    "norms": (lambda x, w: (F.rms_norm(x, (4,), w), F.layer_norm(x, (4,), w)), ((3, 4), (4,))),
    "an output read by another": (lambda x, w: (y := x * w, y.exp()), ((3,), (3,))),
    "a view of an input": (lambda x, w: (x.transpose(0, 1), x @ w), ((3, 4), (4, 2))),
    "views of views": (lambda x, w: ((x.transpose(0, 1)[1:].exp() @ w,)), ((3, 4), (3, 2))),
    "nothing saved": (lambda x, w: (x + w,), ((3, 4), (4,))),
    "no dims": (lambda x, w: ((x * w).mean(),), ((3, 4), (4,))),
    "no elements": (lambda x, w: (x @ w,), ((0, 4), (4, 2))),
}


@pytest.mark.parametrize("wanted", [(0, 1), (0,), (1,)], ids=str)
@pytest.mark.parametrize("name", BODIES)
def test_as_torch(name: str, wanted: tuple[int, ...]) -> None:
    body, shapes = BODIES[name]
    f = mf.differentiable(defined(body, shapes))
    ours, theirs = drawn(shapes, wanted)
    for _ in range(3):  # later runs take what the first made
        got, want = f(*ours), body(*theirs)
        cts = [torch.randn_like(y) for y in want]
        pairs = [(a, b, ct) for a, b, ct in zip(got, want, cts, strict=True) if b.requires_grad]
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, **CLOSE)
            assert a.requires_grad == b.requires_grad
        torch.autograd.backward([a for a, _, _ in pairs], [ct for *_, ct in pairs])
        torch.autograd.backward([b for _, b, _ in pairs], [ct for *_, ct in pairs])
    for n in wanted:
        torch.testing.assert_close(ours[n].grad, theirs[n].grad, **CLOSE)
    assert not [x for n, x in enumerate(ours) if n not in wanted and x.grad is not None]


def test_cotangents_of_some_outputs() -> None:
    """An output that nobody needed has no cotangent, and the backward does without."""
    body, shapes = BODIES["a layer"]
    f = mf.differentiable(defined(body, shapes))
    ours, theirs = drawn(shapes, (0, 1, 2))
    for chosen in (0, 1):
        a, b = f(*ours)[chosen].sum(), body(*theirs)[chosen].sum()  # cotangents of stride 0
        got = torch.autograd.grad(a, ours, allow_unused=True)
        want = torch.autograd.grad(b, theirs, allow_unused=True)
        assert [x is None for x in got] == [y is None for y in want]
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y, **CLOSE)


def test_what_does_not_lead_there_has_no_gradient() -> None:
    """Optimizers of torch leave such parameters alone, and would decay those of zeros."""

    def body(x: Any, w: Any, v: Any) -> Any:
        return x * w, v * 2 + x, (v > 0).to(v.dtype), w.floor()

    f = mf.differentiable(defined(body, ((3,), (3,), (3,))))
    ours, theirs = drawn(((3,), (3,), (3,)), (0, 1, 2))
    for chosen in ((0,), (1,), (0, 1), (3,)):
        totals = (sum(g(*xs)[n].sum() for n in chosen) for g, xs in ((f, ours), (body, theirs)))
        found = (torch.autograd.grad(y, xs, allow_unused=True)
                 for y, xs in zip(totals, (ours, theirs), strict=True))  # fmt: skip
        for x, y in zip(*found, strict=True):
            assert (x is None) == (y is None)
            torch.testing.assert_close(x, y, **CLOSE)


def test_between_layers_of_torch() -> None:
    """A program is one node of torch's graph; gradients of two uses are added."""
    body, shapes = BODIES["a layer"]
    f = mf.differentiable(defined(body, shapes))
    (x, w, v), theirs = drawn(shapes, (0, 1, 2))

    def loss(g: Body, x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return (g(g(x.sin(), w, v)[0], w, v)[0] * g(x, w, v)[0]).square().mean()

    got = torch.autograd.grad(loss(f, x, w, v), (x, w, v))
    want = torch.autograd.grad(loss(body, *theirs), theirs)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


def test_gradcheck() -> None:
    body, shapes = BODIES["norms"]
    f = mf.differentiable(defined(body, shapes))
    ours, _ = drawn(shapes, (0, 1))
    assert torch.autograd.gradcheck(lambda *xs: tuple(f(*xs)), ours)


def test_without_gradients_the_plain_program_runs() -> None:
    body, shapes = BODIES["a layer"]
    f: Any = mf.differentiable(defined(body, shapes))
    ours, theirs = drawn(shapes, (0, 1))
    with torch.no_grad():
        got = f(*ours)
    plain = f(*(x.detach() for x in ours))
    for a, b, c in zip(got, plain, body(*theirs), strict=True):
        assert not a.requires_grad and not b.requires_grad
        torch.testing.assert_close(a, c.detach(), **CLOSE)
        torch.testing.assert_close(b, c.detach(), **CLOSE)
    assert not f._forwards


def test_what_is_saved() -> None:
    """Inputs as they are; of what is computed what the rules read, and no views of it."""
    fd = defined(lambda x, w: ((x @ w).tanh().transpose(0, 1) * 2.0,), ((3, 4), (4, 2)))
    forward = _Forward(_Differentiable(fd, None), (1,))
    saved = forward.phases.saved
    assert len(saved) == 2 and "x0" in saved
    assert len(forward.program.host.outputs) == 2
    _, backward = forward.backward((0,))
    products = [[i for i in p.host.walk() if i.fn == "matmul"] for p in (forward.program, backward)]
    assert len(products[1]) == 1 and products[1][0] not in products[0]


def test_integers_have_no_gradient() -> None:
    with FusionDefinition("f") as fd:
        table = fd.define_tensor([5, 3], torch.float64)
        rows = fd.define_tensor([4], torch.int64)
        fd.add_output(F.embedding(rows, table))
        fd.add_output(rows + 1)
        fd.add_output(fd.ops.detach(table) * 2.0)
    f = mf.differentiable(fd)
    table, rows = torch.randn(5, 3, dtype=torch.float64), torch.tensor([1, 1, 4, 0])
    ours, theirs = table.clone().requires_grad_(), table.clone().requires_grad_()
    got, numbers, constant = f(ours, rows)
    assert torch.equal(numbers, rows + 1) and not numbers.requires_grad
    assert torch.equal(constant, table * 2) and not constant.requires_grad
    (got.square().sum()).backward()
    F.embedding(rows, theirs).square().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, **CLOSE)


def test_numbers_of_a_run() -> None:
    with FusionDefinition("f") as fd:
        x, factor = fd.define_tensor([3], torch.float64), fd.define_scalar()
        fd.add_output((x * (factor * 2.0)).exp())
    f = mf.differentiable(fd)
    for factor in (0.5, 2.0):
        x = torch.randn(3, dtype=torch.float64, requires_grad=True)
        (y,) = f(x, factor)
        (got,) = torch.autograd.grad(y.sum(), x)
        torch.testing.assert_close(got, (x * factor * 2).exp() * factor * 2, **CLOSE)


LAYOUTS: dict[str, tuple[DeviceMesh, list[dict[str, Shard]]]] = {
    "tensor parallel": (DeviceMesh.arange(tp=4), [{}, {"tp": Shard(0)}, {"tp": Shard(1)}]),
    "sequence": (DeviceMesh.arange(tp=4), [{"tp": Shard(0)}, {"tp": Shard(0)}, {"tp": Shard(1)}]),
    "data parallel": (DeviceMesh.arange(dp=4), [{"dp": Shard(0)}, {}, {}]),
    "fsdp": (DeviceMesh.arange(dp=4), [{"dp": Shard(0)}, {"dp": Shard(0)}, {"dp": Shard(0)}]),
    "both": (
        DeviceMesh.arange(dp=2, tp=2), [{"dp": Shard(0)}, {"tp": Shard(0)}, {"tp": Shard(1)}]),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_split_on_simulated_ranks(name: str) -> None:
    """Both programs, one after the other; rows and units do not divide."""
    mesh, layouts = LAYOUTS[name]
    shapes: Shapes = ((5, 4), (7, 4), (4, 7))
    with FusionDefinition("f") as fd:
        xs = [
            fd.define_tensor(s, torch.float64, mesh, layout, name=f"x{n}")
            for n, (s, layout) in enumerate(zip(shapes, layouts, strict=True))
        ]
        for y in layer(*xs):
            fd.add_output(y)
    forward = _Forward(_Differentiable(fd, None), (0, 1, 2))
    _, theirs = drawn(shapes, (0, 1, 2))
    given = [x.detach() for x in theirs]
    found = mf.simulate(forward.program, given).outputs
    want = layer(*theirs)
    cts = [torch.randn_like(y) for y in want]
    for a, b in zip(found, want, strict=False):
        torch.testing.assert_close(a, b.detach(), **CLOSE)
    made, backward = forward.backward((0, 1))
    everything = [*given, *found]
    kept = [everything[forward.places[x]] for x in made.saved]
    got = mf.simulate(backward, [*kept, *cts]).outputs
    for a, b in zip(got, torch.autograd.grad(want, theirs, cts), strict=True):
        torch.testing.assert_close(a, b, **CLOSE)
    for n, x in enumerate(backward.host.outputs):
        assert backward.host.types[x].layout == forward.layouts[f"x{n}"]


# -- wrong use -----------------------------------------------------------------------------------


def test_twice_is_refused() -> None:
    body, shapes = BODIES["no dims"]
    ours, _ = drawn(shapes, (0, 1))
    (y,) = mf.differentiable(defined(body, shapes))(*ours)
    (first,) = torch.autograd.grad(y, ours[:1], create_graph=True)
    with pytest.raises(mf.ProgramError, match=r"differentiated twice(.|\n)*mf.grad"):
        first.sum().backward()


def test_what_cannot_be_differentiated() -> None:
    with pytest.raises(mf.DefinitionError, match=r"differentiable\(3\)"):
        mf.differentiable(3)  # type: ignore[arg-type]
    with FusionDefinition("f") as fd:
        x = fd.define_tensor([3])
        fd.add_output(x * 2.0, reuse=x)
    with pytest.raises(mf.DefinitionError, match=r"written into(.|\n)*add_output"):
        mf.differentiable(fd)(torch.ones(3, requires_grad=True))
    with FusionDefinition("f") as fd:
        fd.add_output(fd.define_tensor([-1]) * 2.0)
    with pytest.raises(mf.DefinitionError, match="chosen by each run"):
        mf.differentiable(fd)(torch.ones(3, requires_grad=True))
    with FusionDefinition("f") as fd:
        x = fd.define_tensor([3], mesh=DeviceMesh([0], ("a",)))
        fd.add_output(fd.ops.set(x).on(DeviceMesh([1], ("a",)), {}))
    with pytest.raises(mf.DefinitionError, match=r"rank . holds no input(.|\n)*mf.grad"):
        mf.differentiable(fd)(torch.ones(3, requires_grad=True))


def test_wrong_arguments_are_those_of_the_plain_program() -> None:
    f = mf.differentiable(defined(*BODIES["no dims"]))
    with pytest.raises(mf.ProgramError, match="x1"):
        f(torch.ones(3, 4, dtype=torch.float64, requires_grad=True))
    with pytest.raises(mf.ProgramError, match="x0"):
        f(torch.ones(3, 5, dtype=torch.float64, requires_grad=True), torch.ones(4).double())
