"""Plans by signature: what a run with other arguments does, in one process."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import mdfuse as mf
from mdfuse import DeviceMesh
from mdfuse.caching import Cache

ONE = DeviceMesh([0])

pytestmark = pytest.mark.usefixtures("joined")


@pytest.fixture
def joined(unjoined: None) -> mf.Communicator:
    return mf.init(backend="gloo")


def product(options: mf.Options | None = None) -> mf.Program:
    with mf.FusionDefinition("product") as fd:
        x = fd.define_tensor([4, 3], mesh=ONE, layout={})
        w = fd.define_tensor([3, 5], mesh=ONE, layout={})
        fd.add_output(fd.ops.exp(fd.ops.tanh(x @ w)) * 2.0)
    return mf.compile(fd, options)


def want(x: Tensor, w: Tensor) -> Tensor:
    return torch.exp(torch.tanh(x.double() @ w.double())) * 2


def drawn() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3), torch.randn(3, 5)


def test_earlier_outputs_stay_as_they_are() -> None:
    program = product()
    kept = []
    for _ in range(5):
        x, w = drawn()
        kept.append((program.run(x, w)[0], want(x, w)))
    assert all(torch.allclose(y.double(), z) for y, z in kept)
    assert program.plans.info() == (4, 1, 0, 1, 32)


def test_a_plan_for_each_kind_of_strides() -> None:
    program = product()
    for _ in range(3):
        x, w = drawn()
        for given in ((x, w), (x.t().contiguous().t(), w), (x, torch.stack([w, w], 2)[:, :, 0])):
            assert torch.allclose(program.run(*given)[0].double(), want(x, w))
    assert program.plans.info() == (6, 3, 0, 3, 32)


def test_the_least_recently_used_goes() -> None:
    program = product(mf.Options(plans=2))
    x, w = drawn()
    other, third = x.t().contiguous().t(), torch.stack([x, x], 2)[:, :, 0]
    for given in (x, other, x, third, x, other):  # `third` drops `other`, which then drops `third`
        assert torch.allclose(program.run(given, w)[0].double(), want(x, w))
    assert program.plans.info() == (2, 4, 2, 2, 2)


def test_options_share_one_cache() -> None:
    program = product()
    x, w = drawn()
    for options in (None, mf.Options(verify=False), None, mf.Options(verify=False)):
        assert torch.allclose(program.run(x, w, options=options)[0].double(), want(x, w))
    assert program.plans.info() == (2, 2, 0, 2, 32)


WRONG: dict[str, tuple[Any, str]] = {
    "too few": ((torch.ones(4, 3),), "1 argument for 2 inputs"),
    "too many": ((torch.ones(4, 3), torch.ones(3, 5), 1.0), "3 arguments for 2 inputs"),
    "a shape": ((torch.ones(4, 4), torch.ones(3, 5)), r"%x has shape \(4, 4\)"),
    "a dtype": ((torch.ones(4, 3).double(), torch.ones(3, 5)), "%x has dtype torch.float64"),
    "nothing": ((None, torch.ones(3, 5)), "NoneType for %x"),
    "an array": ((torch.ones(4, 3).numpy(), torch.ones(3, 5)), "ndarray for %x"),
    "a sparse tensor": ((torch.ones(4, 3).to_sparse(), torch.ones(3, 5)), "sparse"),
    "a meta tensor": ((torch.ones(4, 3, device="meta"), torch.ones(3, 5)), "%x is on meta"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("runs", [0, 1, 3])
def test_what_does_not_fit_is_refused_in_any_run(name: str, runs: int) -> None:
    program, (arguments, words) = product(), WRONG[name]
    for _ in range(runs):
        program.run(*drawn())
    with pytest.raises(mf.ProgramError, match=words):
        program.run(*arguments)
    x, w = drawn()
    assert torch.allclose(program.run(x, w)[0].double(), want(x, w))


@pytest.mark.parametrize("runs", [0, 2])
@pytest.mark.parametrize("number", [2.5, "two", None, torch.ones(2)])
def test_a_number_of_another_kind_is_refused_in_any_run(number: Any, runs: int) -> None:
    with mf.FusionDefinition("scaled") as fd:
        x = fd.define_tensor([4], mesh=ONE, layout={})
        n = fd.define_scalar(None, dtype=torch.int64)
        fd.add_output(x * n)
    program, x = mf.compile(fd), torch.randn(4)
    for factor in range(runs):
        assert torch.equal(program.run(x, factor)[0], x * factor)
    with pytest.raises(mf.ProgramError, match="for %n"):
        program.run(x, number)
    assert torch.equal(program.run(x, 3.0)[0], x * 3)


def test_kinds_that_take_turns_are_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    program, (x, w) = product(), drawn()
    turned = x.t().contiguous().t()
    for given in (x, turned):
        program.run(given, w)

    def refuse(*arguments: Any) -> None:
        raise AssertionError("checked again")

    monkeypatch.setattr("mdfuse.evaluator.check_arguments", refuse)
    for given in (x, turned, x, turned):
        assert torch.allclose(program.run(given, w)[0].double(), want(x, w))
    assert program.plans.info() == (4, 2, 0, 2, 32)


# -- buffers of the caller -------------------------------------------------------------------------


def test_given_outputs_in_any_run() -> None:
    program = product()
    for n in range(6):
        x, w = drawn()
        out = [torch.full((4, 5), float("nan"))] if n % 2 else None
        (y,) = program.run(x, w, out=out)
        assert torch.allclose(y.double(), want(x, w))
        assert out is None or y is out[0]
    assert program.plans.info().misses == 2


@pytest.mark.parametrize("runs", [0, 2])
def test_a_given_output_that_is_an_input(runs: int) -> None:
    with mf.FusionDefinition("square") as fd:
        x = fd.define_tensor([3, 3], mesh=ONE, layout={})
        fd.add_output(x @ x)
    program, x = mf.compile(fd), torch.randn(3, 3)
    for _ in range(runs):
        program.run(x, out=[torch.empty(3, 3)])
    with pytest.raises(mf.ProgramError, match="shares memory with %x"):
        program.run(x, out=[x])


def test_an_input_that_is_written_and_another_one() -> None:
    with mf.FusionDefinition("update") as fd:
        x = fd.define_tensor([4], mesh=ONE, layout={})
        y = fd.define_tensor([4], mesh=ONE, layout={})
        fd.add_output(x + y, reuse=x)
    program = mf.compile(fd)
    for _ in range(3):
        a, b = torch.randn(4), torch.randn(4)
        total = a + b
        assert program.run(a, b)[0] is a and torch.equal(a, total)
    memory = torch.randn(6)
    with pytest.raises(mf.ProgramError, match="shares memory"):
        program.run(memory[:4], memory[2:])


# -- the caller's modes ----------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["watched", "plain"])
def test_inputs_that_autograd_watches(first: str) -> None:
    """A run has no gradient, and says so; where nothing is recorded it computes."""
    program = product()
    for n in range(4):
        x, w = drawn()
        parameter = torch.nn.Parameter(w)
        if n or first == "plain":
            (y,) = program.run(x, w)
            assert torch.allclose(y.double(), want(x, w))
        with pytest.raises(mf.ProgramError, match=r"%w requires grad(.|\n)*torch.no_grad\(\)"):
            program.run(x, parameter)
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode:
                (y,) = program.run(x, parameter)
            assert not y.requires_grad
            assert torch.allclose(y.double(), want(x, w))


@pytest.mark.parametrize("mode", [torch.autocast("cpu", torch.bfloat16), torch.device("meta")])
def test_modes_that_change_what_torch_computes(mode: Any) -> None:
    """A program has its own dtypes and devices, whatever torch would take by default."""
    with mf.FusionDefinition("linear") as fd:
        x = fd.define_tensor([4, 3], mesh=ONE)
        w = fd.define_tensor([5, 3], mesh=ONE)
        s = fd.define_scalar()
        fd.add_output(fd.ops.linear(x, w) * (s + 1.0))
    program = mf.compile(fd)
    x, w = torch.randn(4, 3), torch.randn(5, 3)
    expected = torch.nn.functional.linear(x, w) * 3.0
    for _ in range(2):
        with mode:
            found = [program.run(x, w, 2.0)[0], mf.simulate(program, [x, w, 2.0]).outputs[0]]
        for y in (*found, program.run(x, w, 2.0)[0]):
            assert (y.dtype, y.device) == (torch.float32, torch.device("cpu"))
            assert torch.allclose(y, expected)


def test_inputs_with_a_tangent() -> None:
    """Forward-mode gradients are not computed either."""
    program, (x, w) = product(), drawn()
    for _ in range(2):
        program.run(x, w)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            with pytest.raises(mf.ProgramError, match="%x has a tangent"):
                program.run(dual, w)
            (y,) = program.run(forward_ad.unpack_dual(dual).primal, w)
        assert torch.allclose(y.double(), want(x, w))


def test_inputs_inside_of_a_transform() -> None:
    """What torch.func wraps is refused; what it leaves alone runs."""
    program, (x, w) = product(), drawn()
    for _ in range(2):
        program.run(x, w)
        with pytest.raises(mf.ProgramError, match=r"%x is a tensor inside of a transform"):
            torch.vmap(lambda row: program.run(row, w)[0])(torch.stack([x, x]))
        (y,) = torch.vmap(lambda row: row + program.run(x, w)[0].sum())(torch.zeros(2, 1))[:1]
        assert torch.allclose(y.double(), want(x, w).sum())


def test_a_plan_made_in_inference_mode_serves_outside_of_it() -> None:
    program = product()
    x, w = drawn()
    with torch.inference_mode():
        program.run(x, w)
    for _ in range(2):
        (y,) = program.run(x, w)
        assert torch.allclose(y.double(), want(x, w))
        y.add_(1)  # an ordinary tensor


def test_threads_take_turns() -> None:
    program, wrong = product(), []

    def work() -> None:
        for _ in range(50):
            x, w = drawn()
            if not torch.allclose(program.run(x, w)[0].double(), want(x, w)):
                wrong.append(x)

    program.run(*drawn())
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_after_close_a_program_starts_afresh() -> None:
    program = product()
    for _ in range(2):
        x, w = drawn()
        assert torch.allclose(program.run(x, w)[0].double(), want(x, w))
        mf.init().close()


def test_an_error_in_a_run_names_the_line() -> None:
    with mf.FusionDefinition("lookup") as fd:
        rows = fd.define_tensor([2], dtype=torch.int64, mesh=ONE, layout={})
        table = fd.define_tensor([3, 2], mesh=ONE, layout={})
        fd.add_output(fd.ops.embedding(rows, table) + 1.0)
    program, table = mf.compile(fd), torch.randn(3, 2)
    assert torch.equal(program.run(torch.tensor([2, 0]), table)[0], table[[2, 0]] + 1)
    with pytest.raises(IndexError) as caught:
        program.run(torch.tensor([7, 0]), table)
    (note,) = caught.value.__notes__
    assert note.startswith("in test_signature.py:")


# -- the cache -------------------------------------------------------------------------------------


def test_what_was_dropped_is_not_used_again() -> None:
    cache = Cache[str](limit=1)
    cache.put(("a",), "first")
    assert cache.again(("a",), "first")
    assert cache.put(("b",), "second") == ["first"]
    assert not cache.again(("a",), "first")
    assert cache.clear("a") == [] and cache.clear("b") == ["second"]
    assert cache.info() == (1, 0, 1, 0, 1)


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(mf.ProgramError, match="plans=0"):
        mf.Options(plans=0)


def variants() -> dict[str, Any]:
    """Tensors of one global shape that differ in all that a plan depends on, or in nothing."""
    x = torch.randn(4, 3)

    class Own(Tensor):
        pass

    with torch.inference_mode():
        inference = torch.randn(4, 3)
    return {
        "plain": x,
        "alike": torch.randn(4, 3),
        "moved": torch.randn(20)[5:17].view(4, 3),
        "transposed": torch.randn(3, 4).t(),
        "expanded": torch.randn(1, 3).expand(4, 3),
        "other shape": torch.randn(4, 4),
        "more dims": torch.randn(4, 3, 1),
        "double": x.double(),
        "gradient": torch.randn(4, 3, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.randn(4, 3)),
        "negative bit": torch._neg_view(torch.randn(4, 3)),
        "no memory": torch._efficientzerotensor((4, 3)),
        "sparse": x.to_sparse(),
        "meta": x.to("meta"),
        "own class": x.as_subclass(Own),
        "inference": inference,
        "nested": torch.nested.nested_tensor([torch.randn(3)] * 4),
        "none": None,
        "number": 3.0,
    }


@pytest.mark.parametrize("name", list(variants()))
def test_what_is_like_the_last_is_of_its_kind(name: str, joined: mf.Communicator) -> None:
    """The quick look never takes for alike what a closer look tells apart."""
    program = product()
    program.run(*drawn())
    signature = program._usual._signature
    assert signature is not None
    w, found = torch.randn(3, 5), variants()
    first = found[name]
    if not isinstance(first, Tensor) or first.layout is not torch.strided:
        return
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            key = signature.read([first, w], None)
            if key is None:
                continue
            is_like = signature.like([first, w])
            assert is_like is not None
            for other in found.values():
                if is_like([other, w]):
                    assert signature.read([other, w], None) == key
            assert not is_like([first]) and not is_like([first, w, w])
            assert is_like([first, w]) or first.is_inference()


def test_changed_in_place_is_looked_at_again() -> None:
    """The same object may be another tensor by now."""
    program = product()
    x, w = drawn()
    for _ in range(4):
        program.run(x, w)
    x.data = torch.randn(3, 4).t()
    assert torch.allclose(program.run(x, w)[0].double(), want(x, w))
    x.resize_(5, 3)
    with pytest.raises(mf.ProgramError):
        program.run(x, w)
