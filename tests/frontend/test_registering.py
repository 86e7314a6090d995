"""Operations that users add: recorded, laid out, printed, verified, simulated, differentiated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mdfuse as mf
from mdfuse import DefinitionError, DeviceMesh, FusionDefinition, Layout, Shard, hir
from mdfuse.frontend import ops
from mdfuse.ir.op_table import TABLE

MESH = DeviceMesh.arange(tp=2)


def normal(x: Tensor, weight: Tensor, *, eps: float = 1e-6) -> Tensor:
    """RMS norm, as a kernel that computes whole rows alone."""
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def normal_vjp(e: Any, ct: Any) -> tuple[Any, Any]:
    x, w = e[0], e[1]
    scale = mf.ops.rsqrt((x * x).mean(-1, keepdim=True) + e.attrs["eps"])
    inner = ct * w
    turned = x * (inner * x).mean(-1, keepdim=True) * scale * scale
    weight = (ct * x * scale).sum(tuple(range(x.ndim - 1)))
    return (inner - turned) * scale, weight


def define(
    op: Any, placement: dict[str, Any], *shapes: list[int], **attrs: Any
) -> FusionDefinition:
    """A definition of one call: the first operand is placed, the others are whole."""
    with FusionDefinition("f") as fd:
        layouts = [Layout(MESH, placement), *(Layout(MESH) for _ in shapes[1:])]
        given = [
            fd.define_tensor(s, torch.float64, layout, name=f"x{n}")
            for n, (s, layout) in enumerate(zip(shapes, layouts, strict=True))
        ]
        made = op(*given, **attrs)
        for y in made if isinstance(made, tuple) else (made,):
            fd.add_output(y)
    return fd


# -- what is right -------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [0, 1, 2, None])
def test_it_runs_on_parts_as_torch_on_the_whole(dim: int | None) -> None:
    x, w = torch.randn(5, 3, 6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    op = mf.register_op("my_norm", normal, "... d!, d! -> ... d!", example=(x, w))
    placement = {} if dim is None else {"tp": Shard(dim)}
    program = mf.compile(define(op, placement, [5, 3, 6], [6], eps=1e-3))
    assert hir.parse(str(program.host)) == program.host
    (y,) = mf.simulate(program, [x, w]).outputs
    torch.testing.assert_close(y, F.rms_norm(x, (6,), w, 1e-3))
    assert [c.kind for c in program.communications] == (["Allgather"] if dim == 2 else [])
    assert mf.ops.my_norm is op


def test_its_gradient_follows() -> None:
    op = mf.register_op("my_norm", normal, "... d!, d! -> ... d!", normal_vjp)
    x, w = torch.randn(4, 6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    with FusionDefinition("g") as fd:
        a = fd.define_tensor([4, 6], torch.float64, Layout(MESH, {"tp": Shard(0)}), name="a")
        b = fd.define_tensor([6], torch.float64, Layout(MESH), name="b")
        loss = (op(a, b) ** 3).sum()
        for grad in mf.grad(loss, [a, b]):
            fd.add_output(grad)
    program = mf.compile(fd)
    x.requires_grad_(), w.requires_grad_()
    (F.rms_norm(x, (6,), w, 1e-6) ** 3).sum().backward()
    found = mf.simulate(program, [x.detach(), w.detach()]).outputs
    torch.testing.assert_close(found, [x.grad, w.grad])
    assert [c.kind for c in program.communications] == ["Allreduce"]


def test_labels_that_are_reduced_are_joined() -> None:
    op = mf.register_op("product", lambda a, b: a @ b, "m k, k n -> m n", reduces={"k": "sum"})
    program = mf.compile(define(op, {"tp": Shard(1)}, [4, 6], [6, 2]))
    a, b = torch.randn(4, 6, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    torch.testing.assert_close(mf.simulate(program, [a, b]).outputs, [a @ b])
    assert [c.kind for c in program.communications] == ["Allreduce"]


def pair(
    x: Tensor, bias: Tensor | None = None, *, largest: bool, order: Literal["up", "down"] = "up",
    scales: tuple[float, ...] = (1.0,),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    sign = 1 if order == "up" else -1
    extreme = x.amax(-1) if largest else x.amin(-1)
    whole = x if bias is None else x + bias
    return extreme * sign, whole * scales[0]


@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_several_results_and_all_kinds_of_attributes(largest: bool, bias: bool) -> None:
    op = mf.register_op("pair", pair, "n d!, d! -> n, n d!")
    shapes = [[5, 4], [4]][: 1 + bias]
    attrs: dict[str, Any] = {"largest": largest, "order": "down", "scales": (2.5, 1.0)}
    program = mf.compile(define(op, {"tp": Shard(0)}, *shapes, **attrs))
    assert hir.parse(str(program.host)) == program.host
    xs = [torch.randn(s, dtype=torch.float64) for s in shapes]
    torch.testing.assert_close(mf.simulate(program, xs).outputs, list(pair(*xs, **attrs)))


def test_labels_may_depend_on_attributes() -> None:
    def softmax(x: Tensor, *, dim: int) -> Tensor:
        return x.softmax(dim)

    def rule(shapes: Any, attrs: Any) -> str:
        words = ["a", "b"]
        words[attrs["dim"]] += "!"
        return f"{' '.join(words)} -> {' '.join(words)}"

    op = mf.register_op("my_softmax", softmax, rule, example=(torch.randn(3, 4), {"dim": 1}))
    x = torch.randn(4, 6, dtype=torch.float64)
    for dim, count in ((0, 1), (1, 0)):
        program = mf.compile(define(op, {"tp": Shard(0)}, [4, 6], dim=dim))
        torch.testing.assert_close(mf.simulate(program, [x]).outputs, [x.softmax(dim)])
        assert len(program.communications) == count


def test_extents_that_runs_choose() -> None:
    op = mf.register_op("my_norm", normal, "... d!, d! -> ... d!")
    with FusionDefinition("f") as fd:
        x = fd.define_tensor([-1, 6], torch.float64, Layout(MESH, {"tp": Shard(0)}))
        w = fd.define_tensor([6], torch.float64, Layout(MESH))
        fd.add_output(op(x, w))
    program, w = mf.compile(fd), torch.randn(6, dtype=torch.float64)
    for n in (4, 7):
        x = torch.randn(n, 6, dtype=torch.float64)
        (y,) = mf.simulate(program, [x, w]).outputs
        torch.testing.assert_close(y, F.rms_norm(x, (6,), w, 1e-6))
    assert len(program.lowerings) == 1


def test_another_call_on_the_meta_device() -> None:
    def call(x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy() * 2)  # which has no meta device

    op = mf.register_op("by_numpy", call, "n -> n", meta=torch.empty_like)
    program = mf.compile(define(op, {"tp": Shard(0)}, [5]))
    x = torch.randn(5, dtype=torch.float64)
    torch.testing.assert_close(mf.simulate(program, [x]).outputs, [x * 2])


def test_a_module_that_calls_it_is_imported() -> None:
    @torch.library.custom_op("mdfuse_tests::norm", mutates_args=())
    def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return normal(x, weight, eps=eps)

    norm.register_fake(lambda x, weight, eps: torch.empty_like(x))

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6))
            self.up = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Any:
            return self.up(torch.ops.mdfuse_tests.norm(x, self.weight, 1e-3))

    module, x = Module(), torch.randn(4, 6)
    layouts = {"input:*": {"tp": Shard(0)}}
    with pytest.raises(DefinitionError, match=r"mdfuse_tests\.norm\.default"):
        mf.from_torch(module, (x,), mesh=MESH, layouts=layouts)
    overload = torch.ops.mdfuse_tests.norm.default
    mf.register_op("my_norm", normal, "... d!, d! -> ... d!", normal_vjp, overload=overload)
    model = mf.from_torch(module, (x,), mesh=MESH, layouts=layouts)
    program = model.compile()
    (y,) = mf.simulate(program, [*model.load(), x]).outputs
    torch.testing.assert_close(y, module(x).detach())
    assert "my_norm(" in str(program) and not program.communications


# -- what is wrong -------------------------------------------------------------------------------


def kernel(x: Tensor, w: Tensor, *, eps: float = 0.0) -> Tensor:
    return x * w + eps


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a name of an operation": ({"name": "softmax"}, "taken.*that of an operation"),
    "a name of an instruction": ({"name": "chunk"}, "taken"),
    "a word of programs": ({"name": "rank"}, "taken.*a word of their text"),
    "no name": ({"name": "2 x"}, "a name of Python"),
    "no arrow": ({"rule": "b d, d"}, "is no rule"),
    "other words": ({"rule": "b d?, d -> b d"}, "is no rule"),
    "a label twice": ({"rule": "b b, d -> b d"}, "stands once"),
    "dots behind": ({"rule": "b ..., d -> b d"}, "and ... first"),
    "a new label": ({"rule": "b d, d -> b e"}, "e is in no operand: write e!"),
    "a label that goes": ({"rule": "b d, d -> b"}, r"write d! .* reduces=\{'d': 'sum'\}"),
    "operands": ({"rule": "b d -> b d"}, "1 operand, and the call takes 2"),
    "a reduce op": ({"rule": "b d, d -> b", "reduces": {"d": "all"}}, "'all' is none of sum"),
    "no signature": ({"call": lambda *xs: xs[0]}, "each operand and each attribute has a name"),
    "no operand": ({"call": lambda *, eps: eps}, "takes no operand"),
    "a number as operand": ({"call": lambda x, w=1.0: x}, "write it behind"),
    "an attribute": ({"call": lambda x, w, *, like: x}, "attributes are bool"),
    "a view": ({"call": lambda x, w: x, "example": True}, "a view of an operand"),
    "sums": (
        {"call": lambda x, w: x.softmax(-1) * w, "example": True},
        "in two parts along dim 1 of operand 0 and dim 0 of operand 1",
    ),
    "extents of the example": (
        {"call": lambda x, w: x[:-1] * w, "example": True}, "b of .* is 4 .* and 3 in a result",
    ),
    "small example": (
        {"example": (torch.ones(1, 3), torch.ones(3))}, "no two elements to be split"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_registered(what: str) -> None:
    changed, says = WRONG[what]
    given: dict[str, Any] = {"name": "mine", "call": kernel, "rule": "b d, d -> b d", **changed}
    if given.get("example") is True:
        given["example"] = (torch.randn(4, 6), torch.randn(6))
    with pytest.raises(DefinitionError, match=f"(?s){says}"):
        mf.register_op(**given)
    assert "mine" not in TABLE and "mine" not in ops.BY_NAME


def test_a_name_is_taken_once() -> None:
    mf.register_op("mine", kernel, "b d, d -> b d")
    with pytest.raises(DefinitionError, match=r"the name is taken(?s:.)*my_mine"):
        mf.register_op("mine", kernel, "b d, d -> b d")


CALLS: dict[str, tuple[Callable[[Any, Any, Any], Any], str]] = {
    "too few": (lambda op, x, w: op(x), "missing a required argument: 'w'"),
    "a tensor": (lambda op, x, w: op(x, torch.ones(6)), "Tensor is no operand"),
    "a number": (lambda op, x, w: op(x, 2.0), "float is no operand"),
    "None": (lambda op, x, w: op(x, None), "NoneType is no operand"),
    "an attribute": (lambda op, x, w: op(x, w, eps="a"), "eps is a number"),
    "another attribute": (lambda op, x, w: op(x, w, dim=1), "unexpected keyword argument 'dim'"),
    "ranks": (lambda op, x, w: op(w, w), "has not the dims of 'b d, d -> b d'"),
    "extents": (lambda op, x, w: op(x, x[0, :3]), "d is 6 in one operand, and 3 in another"),
}


@pytest.mark.parametrize("what", CALLS)
def test_calls_that_do_not_fit(what: str) -> None:
    op = mf.register_op("mine", kernel, "b d, d -> b d")
    call, says = CALLS[what]
    with FusionDefinition("f") as fd:
        x, w = fd.define_tensor([4, 6]), fd.define_tensor([6])
        with pytest.raises(DefinitionError, match=says):
            call(op, x, w)


LIES: dict[str, tuple[Callable[..., Any], str, str]] = {
    "dims": (lambda x: x.sum(-1), "a b -> a b", r"a result \[4\] has not the dims"),
    "extents": (lambda x: x[:, :2], "a b -> a b", "b of 'a b -> a b' is 6 .* and 2"),
    "results": (lambda x: (x, x), "a b -> a b", "of 1 result.* the call gave one tuple"),
    "fewer results": (lambda x: x, "a b! -> a b!, a", "of 2 results.* gave one Tensor"),
    "no meta": (lambda x: torch.from_numpy(x.numpy()), "a b -> a b", "meta"),
}


@pytest.mark.parametrize("what", LIES)
def test_a_rule_that_is_not_true_of_the_call(what: str) -> None:
    call, rule, says = LIES[what]
    op = mf.register_op("mine", call, rule)
    with FusionDefinition("f") as fd:
        x = fd.define_tensor([4, 6])
        with pytest.raises(DefinitionError, match=says) as caught:
            op(x)
    assert "test_registering.py" in str(caught.value)


def test_a_rule_that_is_not_true_of_parts() -> None:
    """The verifier asks the call on each rank's part."""
    op = mf.register_op("padded", lambda x: F.pad(x, (0, 6 - x.shape[-1])), "a b -> a b")
    fd = define(op, {"tp": Shard(1)}, [4, 6])
    with pytest.raises(mf.ProgramError, match=r"b of 'a b -> a b' is 3 .* and 6 in a result"):
        mf.compile(fd)


GRADIENTS: dict[str, tuple[Any, str]] = {
    "none": (None, "there is no rule for mine"),
    "one": (lambda e, ct: (ct,), "gave 1 value"),
    "no tuple": (lambda e, ct: ct, "for each of 2 operands"),
    "a number": (lambda e, ct: (1.0, None), "made of operations"),
    "a shape": (lambda e, ct: (ct * e[1], ct * e[0]), r"operand 1 has the shape \[6\]"),
}


@pytest.mark.parametrize("what", GRADIENTS)
def test_gradients_that_do_not_fit(what: str) -> None:
    vjp, says = GRADIENTS[what]
    op = mf.register_op("mine", kernel, "b d, d -> b d", vjp)
    with FusionDefinition("f") as fd:
        x, w = fd.define_tensor([4, 6]), fd.define_tensor([6])
        with pytest.raises(DefinitionError, match=says):
            mf.grad(op(x, w).sum(), [x, w])


def test_a_split_of_what_must_be_whole_is_brought_together() -> None:
    op = mf.register_op("my_cumsum", lambda x: x.cumsum(0), "n! d -> n! d")
    fd = define(op, {"tp": Shard(0)}, [4, 6])
    assert len(mf.compile(fd).communications) == 1
    x = torch.randn(4, 6, dtype=torch.float64)
    torch.testing.assert_close(mf.simulate(mf.compile(fd), [x]).outputs, [x.cumsum(0)])
