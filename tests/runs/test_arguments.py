"""What runs take for a tensor: plain ones, on the first run and on later ones, simulated too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import mdfuse as mf
from mdfuse import DeviceMesh, Partial, Shard
from mdfuse.ir.tensors import overlaps_itself

ONE = DeviceMesh.arange(x=1)
TWO = DeviceMesh.arange(x=2)


def scaled(mesh: DeviceMesh = ONE, dtype: torch.dtype = torch.float32) -> mf.Program:
    with mf.FusionDefinition("scaled") as fd:
        x = fd.define_tensor([2, 3], dtype, mesh)
        fd.add_output(x * 2.0)
        fd.add_output(x.T)
    return mf.compile(fd)


class Own(Tensor):
    """A subclass."""


def given_up(x: Tensor) -> Tensor:
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


def fake(x: Tensor) -> Tensor:
    return FakeTensorMode().from_tensor(x)


OTHERS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "sparse": (lambda x: x.to_sparse(), r"torch.sparse_coo(.|\n)*to_dense"),
    "sparse of the same strides": (
        lambda x: torch.sparse_coo_tensor(size=(2, 3)),
        r"torch.sparse_coo(.|\n)*to_dense",
    ),
    "sparse csr": (lambda x: x.to_sparse_csr(), "torch.sparse_csr"),
    "mkldnn": (lambda x: x.to_mkldnn(), "torch._mkldnn"),
    "nested": (lambda x: torch.nested.nested_tensor([*x]), "nested"),
    "jagged": (lambda x: torch.nested.nested_tensor([*x], layout=torch.jagged), "nested"),
    "subclass": (lambda x: x.as_subclass(Own), r"class Own(.|\n)*as_subclass"),
    "fake": (fake, "FakeTensor"),
    "quantized": (lambda x: torch.quantize_per_tensor(x, 1.0, 0, torch.qint8), "quantized"),
    "given up": (given_up, "given up"),
    "meta": (lambda x: x.to("meta"), "meta"),
    "numpy": (lambda x: x.numpy(), "ndarray"),
    "list": (lambda x: x.tolist(), "list"),
    "none": (lambda x: None, "NoneType"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("what", OTHERS)
@pytest.mark.parametrize("before", ["first", "dense", "expanded"])
def test_what_is_no_plain_tensor(what: str, before: str) -> None:
    spoil, says = OTHERS[what]
    x = torch.arange(6.0).reshape(2, 3)
    usual = x if before == "dense" else x[:1, :1].expand(2, 3)
    program = scaled()
    if before != "first":
        program.run(usual)
        program.run(usual)
    for _ in range(2):
        if what != "given up" or before != "dense":  # torch itself does not look at that
            with pytest.raises(mf.ProgramError, match=says):
                program.run(spoil(x))
        (y, _) = program.run(usual)
        assert torch.equal(y, usual * 2.0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", OTHERS)
def test_what_is_no_plain_tensor_is_not_simulated(what: str) -> None:
    spoil, says = OTHERS[what]
    x = torch.arange(6.0).reshape(2, 3)
    with pytest.raises(mf.ProgramError, match=says):
        mf.simulate(scaled(TWO), [spoil(x)])
    with pytest.raises(mf.ProgramError, match=says):
        mf.simulate(scaled(TWO), per_rank=[{"x": spoil(x)}, {"x": spoil(x)}])


# -- elements that are not in memory as they are --------------------------------------------------

LAZY: dict[str, Callable[[Tensor], Tensor]] = {
    "negative": lambda x: torch._neg_view(x),
    "zero": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
    "conjugate": lambda x: x.conj(),
    "negative of a conjugate": lambda x: torch._neg_view(x.conj()),
    "imaginary": lambda x: torch.complex(x, -x).conj().imag,
}
REAL = ("negative", "zero", "imaginary")


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("what", LAZY)
@pytest.mark.parametrize("is_first", [True, False])
def test_elements_that_are_computed_when_read(what: str, is_first: bool) -> None:
    dtype = torch.float32 if what in REAL else torch.complex64
    program, make = scaled(ONE, dtype), LAZY[what]
    plain = torch.randn(2, 3, dtype=dtype)
    for n in range(3):
        if n or not is_first:
            assert torch.equal(program.run(plain)[0], plain * 2.0)
        x = make(plain)
        want = x.clone().resolve_conj().resolve_neg()
        assert want.abs().sum() > 0 or what == "zero"
        y, turned = program.run(x)
        assert torch.equal(y, want * 2.0)
        assert torch.equal(turned, want.T)


@pytest.mark.parametrize("what", LAZY)
@pytest.mark.parametrize("layout", [{"x": Shard(0)}, {"x": Partial()}, {"x": Shard(1)}])
def test_elements_that_are_computed_when_read_are_sent(what: str, layout: dict[str, Any]) -> None:
    """Simulated; `test_run_inputs_ranks.py` sends them on real ranks."""
    dtype = torch.float32 if what in REAL else torch.complex64
    with mf.FusionDefinition("gathered") as fd:
        x = fd.define_tensor([4, 4], dtype, TWO, layout)
        fd.add_output(fd.ops.set(x).on(TWO, {}))
    given = LAZY[what](torch.randn(4, 4, dtype=dtype))
    want = given.clone().resolve_conj().resolve_neg()
    assert torch.equal(mf.simulate(mf.compile(fd), [given]).outputs[0], want)


# -- what is written -------------------------------------------------------------------------------


def updated() -> mf.Program:
    with mf.FusionDefinition("updated") as fd:
        w = fd.define_tensor([2, 3], mesh=ONE)
        g = fd.define_tensor([2, 3], mesh=ONE)
        fd.add_output(w - g, reuse=w)
    return mf.compile(fd)


def made_for_inference(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.clone()


UNWRITABLE: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "expanded": (lambda x: x[:1].expand(2, 3), r"share memory(.|\n)*contiguous"),
    "overlapping": (lambda x: x.as_strided((2, 3), (1, 1)), r"share memory(.|\n)*clone"),
    "overlapping far away": (lambda x: x.as_strided((2, 3), (4, 2)), "share memory"),
    "negative": (lambda x: torch._neg_view(x), "does not hold its elements"),
    "zero": (lambda x: torch._efficientzerotensor((2, 3)), "does not hold its elements"),
    "inference": (made_for_inference, "inference_mode"),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("what", UNWRITABLE)
@pytest.mark.parametrize("is_first", [True, False])
def test_an_input_that_cannot_be_written(what: str, is_first: bool) -> None:
    spoil, says = UNWRITABLE[what]
    program = updated()
    for n in range(3):
        w, g = torch.randn(2, 6)[:, :3].clone(), torch.randn(2, 3)
        if n or not is_first:
            total = w - g
            assert program.run(w, g)[0] is w
            assert torch.equal(w, total)
        memory = torch.randn(12)
        wrong, kept = spoil(memory[:6].view(2, 3) if "far" not in what else memory), memory.clone()
        with pytest.raises(mf.ProgramError, match=f"%w(.|\n)*{says}|{says}"):
            program.run(wrong, g)
        assert torch.equal(memory, kept)
        with pytest.raises(mf.ProgramError, match=says):
            mf.simulate(program, per_rank=[{"w": wrong, "g": g}])
        assert torch.equal(memory, kept)
    with torch.inference_mode():
        assert torch.equal(program.run(made_for_inference(g), g)[0], g - g)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("what", UNWRITABLE)
@pytest.mark.parametrize("is_first", [True, False])
def test_a_buffer_that_cannot_be_written(what: str, is_first: bool) -> None:
    spoil, _ = UNWRITABLE[what]
    with mf.FusionDefinition("doubled") as fd:
        fd.add_output(fd.define_tensor([2, 3], mesh=ONE) * 2.0)
    program, x = mf.compile(fd), torch.randn(2, 3)
    for n in range(3):
        if n or not is_first:
            out = torch.empty(2, 3)
            assert program.run(x, out=[out])[0] is out
            assert torch.equal(out, x * 2.0)
        with pytest.raises(mf.ProgramError, match="%t"):
            program.run(x, out=[spoil(torch.randn(12)[: 12 if "far" in what else 6].view(2, -1))])


@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (3,), (2, 3), (3, 1), (2, 2, 2)])
def test_overlaps(shape: tuple[int, ...]) -> None:
    """No two elements at one address are missed."""
    memory = torch.arange(64)
    for code in range(6 ** len(shape)):
        strides = tuple(code // 6**d % 6 for d in range(len(shape)))
        x = memory.as_strided(shape, strides)
        if x.flatten().unique().numel() < x.numel():
            assert overlaps_itself(x), (shape, strides)


def test_what_does_not_overlap() -> None:
    x = torch.empty(4, 6, 5)
    for view in (x, x.permute(2, 0, 1), x[::2, 1::3].mT, x[:, :1], x[:0].expand(0, 6, 5), x[1:, 2]):
        assert not overlaps_itself(view), view.stride()


# -- gradients -------------------------------------------------------------------------------------


def test_nothing_that_requires_grad_is_simulated() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    program = scaled(TWO)
    for _ in range(2):
        with pytest.raises(mf.ProgramError, match=r"%x requires grad(.|\n)*detach"):
            mf.simulate(program, [x])
        with pytest.raises(mf.ProgramError, match=r"%x requires grad(.|\n)*detach"):
            mf.simulate(program, per_rank=[{"x": x.detach()}, {"x": x}])
        with torch.no_grad():
            (y, _) = mf.simulate(program, [x]).outputs
        assert torch.equal(y, x.detach() * 2.0)
        assert not y.requires_grad


@pytest.mark.usefixtures("alone")
def test_a_leaf_is_updated_without_gradients() -> None:
    """As an optimizer does, under no_grad."""
    program = updated()
    w, g = torch.nn.Parameter(torch.randn(2, 3)), torch.randn(2, 3)
    for _ in range(3):
        kept = w.detach().clone()
        with pytest.raises(mf.ProgramError, match="%w requires grad"):
            program.run(w, g)
        assert torch.equal(w, kept)
        with torch.no_grad():
            assert program.run(w, g)[0] is w
        assert torch.equal(w, kept - g)
        assert w.requires_grad
    out = torch.empty(2, 3, requires_grad=True)
    with pytest.raises(mf.ProgramError, match="%t requires grad"):
        scaled().run(g, out=[out, torch.empty(2, 3).T])


def test_buffers_that_come_to_overlap(alone: mf.Communicator) -> None:
    """Runs that are like the last one are looked at less closely, but not at their addresses."""
    with mf.FusionDefinition("update") as fd:
        w, x = (fd.define_tensor([3, 4], torch.float32, ONE) for _ in range(2))
        fd.add_output(w + x, reuse=w)
    program, memory = mf.compile(fd), torch.ones(40)
    w, beside, above = (memory[n : n + 12].view(3, 4) for n in (0, 12, 6))
    for _ in range(4):
        program.run(w, beside)
    with pytest.raises(mf.ProgramError, match="shares memory"):
        program.run(w, above)
    assert torch.equal(program.run(w, beside)[0], torch.full((3, 4), 6.0))
    with torch.inference_mode():
        inner = torch.ones(3, 4)
        for _ in range(4):
            program.run(inner, beside)
    with pytest.raises(mf.ProgramError, match="inference_mode"):
        program.run(inner, beside)
