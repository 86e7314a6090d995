"""Replays: what they notice of arguments that are no longer what they were, and which graph runs.

Graphs are fakes that make the recorded calls again, on the addresses that they had: where a change
goes unnoticed, they compute with other elements than they should.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from helpers.fake_graphs import FakeRecorder, capture_on_cpu
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import mdfuse as mf
from mdfuse.plan.graphs import GRAPHS, TIMES, GraphPlan
from mdfuse.plan.tensor_meta import Form
from mdfuse.torch_private import likeness

ONE = mf.DeviceMesh([0])


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch, unjoined: None) -> list[FakeRecorder]:
    return capture_on_cpu(monkeypatch)


def program(dtype: torch.dtype = torch.complex64) -> mf.Program:
    with mf.FusionDefinition("f") as fd:
        x = fd.define_tensor([4, 4], dtype, mesh=ONE, name="x")
        w = fd.define_tensor([4, 4], dtype, mesh=ONE, name="w")
        fd.add_output((x @ w) * 2.0)
    return mf.compile(fd)


def draw() -> Tensor:
    return torch.randn(4, 4, dtype=torch.complex64)


def moved(x: Tensor) -> Tensor:
    x.data = draw()
    return x


def transposed(x: Tensor) -> Tensor:
    x.data = x.data.t()  # the same address and shape
    return x


def turned(x: Tensor) -> Tensor:
    return x.t_()


def emptied(x: Tensor) -> Tensor:
    x.set_(draw())  # type: ignore[call-overload]
    return x


def smaller(x: Tensor) -> Tensor:
    return x.resize_(3, 4)


def larger(x: Tensor) -> Tensor:
    return x.resize_(400, 4)


def deeper(x: Tensor) -> Tensor:
    return x.unsqueeze_(0)


def freed(x: Tensor) -> Tensor:
    """Its storage is the same object, but lies elsewhere."""
    storage = x.untyped_storage()
    held = storage.clone()
    storage.resize_(0)
    storage.resize_(held.nbytes())
    storage.copy_(held)
    return x


def swapped(x: Tensor) -> Tensor:
    torch.utils.swap_tensors(x, draw())
    return x


def nested(x: Tensor) -> Tensor:
    """The same elements at the same address."""
    view: Tensor = torch._nested_view_from_buffer(  # type: ignore[attr-defined]
        x.reshape(-1), torch.tensor([[4], [12]]), torch.tensor([[1], [1]]), torch.tensor([0, 4])
    )
    return view


#: Memory that no later tensor gets: the stand-in of a graph holds tensors, a graph addresses.
HELD: list[Tensor] = []


def swapped_for_nested(x: Tensor) -> Tensor:
    other = nested(x.clone())
    torch.utils.swap_tensors(x, other)
    HELD.append(other)
    return x


def other_shape(x: Tensor) -> Tensor:
    return x.reshape(2, 8)


def other_dtype(x: Tensor) -> Tensor:
    return torch.view_as_real(x.resolve_conj())[..., 0]


def watched(x: Tensor) -> Tensor:
    return x.requires_grad_()


class Own(Tensor):
    """Has no memory that a program may count on."""


#: What becomes of an argument; the rest makes another one of it, most at its address.
CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "another": lambda x: draw(),
    ".data": moved,
    ".data of the transposed": transposed,
    "t_": turned,
    "set_": emptied,
    "resize_ to less": smaller,
    "resize_ to more": larger,
    "unsqueeze_": deeper,
    "transpose_": lambda x: x.transpose_(0, 1),
    "resize_ of the storage": freed,
    "zeros without memory": lambda x: torch._efficientzerotensor(  # type: ignore[attr-defined]
        x.shape, dtype=x.dtype
    ),
    "a view": other_shape,
    "a view of another dtype": other_dtype,
    "transposed": lambda x: x.t(),
    "strided": lambda x: x.as_strided((4, 4), (1, 4)),
    "repeated": lambda x: x[:1].expand(4, 4),
    "conjugated": torch.conj,
    "negative": lambda x: torch._neg_view(x),
    "parameter": nn.Parameter,
    "gradient": watched,
    "subclass": lambda x: x.as_subclass(Own),
    "nested": nested,
    "swapped": swapped,
    "swapped for a nested one": swapped_for_nested,
    "sparse": lambda x: x.to_sparse(),
    "meta": lambda x: x.to("meta"),
    "array": lambda x: x.detach().numpy(),
    "nothing": lambda x: None,
    "alike": lambda x: x[:],
}


def wanted(x: Any, w: Tensor) -> Tensor | None:
    """What a run gives; None where it is refused."""
    is_plain = type(x) in (Tensor, nn.Parameter) and not x.is_nested
    if not is_plain or x.layout is not torch.strided or x.is_meta or x.requires_grad:
        return None
    if x.shape != (4, 4) or x.dtype != torch.complex64:
        return None
    return x.resolve_conj().resolve_neg() @ w * 2


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("runs", [3, 6])
def test_a_change_of_an_argument_is_noticed(
    name: str, runs: int, recorders: list[FakeRecorder]
) -> None:
    f, x, w = program(), draw(), draw()
    for _ in range(runs):
        torch.testing.assert_close(f.run(x, w)[0], x @ w * 2)
    assert isinstance(f.plans.recent, GraphPlan)
    changed = CHANGES[name](x)
    for _ in range(4):
        right = wanted(changed, w)
        if right is None:
            with pytest.raises(mf.ProgramError, match="%x"):
                f.run(changed, w)
        else:
            torch.testing.assert_close(f.run(changed, w)[0], right)
    other = draw()
    for _ in range(3):
        torch.testing.assert_close(f.run(other, w)[0], other @ w * 2)
    assert recorders


@pytest.mark.parametrize("seed", range(6))
def test_changes_in_any_order(seed: int, recorders: list[FakeRecorder]) -> None:
    rng = random.Random(seed)
    f, given = program(), [draw(), draw()]
    for _ in range(60):
        name = rng.choice([*CHANGES, *["alike"] * len(CHANGES)])
        changed = CHANGES[name](given[0])
        right = wanted(changed, given[1])
        if right is None:
            with pytest.raises(mf.ProgramError, match="%x"):
                f.run(changed, given[1])
            given[0] = draw()
        else:
            torch.testing.assert_close(f.run(changed, given[1])[0], right)
            given[0] = draw() if changed._is_zerotensor() else changed  # these cannot be changed
    assert recorders


def keeping() -> mf.Program:
    """What a step does again, as a fake does when it captures, changes nothing."""
    with mf.FusionDefinition("keep") as fd:
        kept, x = fd.define_tensor([4], name="kept"), fd.define_tensor([4], name="x")
        fd.add_output(x * 2.0)
        fd.add_output(x * 3.0, reuse=kept)
    return mf.compile(fd)


@pytest.mark.parametrize("how", ["assigned", "data", "set_", "module"])
def test_state_that_is_replaced_is_noticed(how: str, recorders: list[FakeRecorder]) -> None:
    """A step writes what its state is now; what it was before stays as it is."""
    module = nn.Linear(4, 4)
    kept = nn.Parameter(torch.zeros(4), requires_grad=False)
    module.bias = kept
    step, x = mf.Step(keeping(), {"kept": kept}), torch.zeros(4)

    def take() -> None:
        x.copy_(torch.randn(4))
        assert torch.equal(step(x), x * 2)
        assert torch.equal(step.state["kept"], x * 3)

    for _ in range(5):
        take()
    before, other = kept.detach(), torch.zeros(4)
    right = before.clone()
    if how == "assigned":
        step.state["kept"] = other
    elif how == "data":
        kept.data = other
    elif how == "set_":
        kept.set_(other)  # type: ignore[call-overload]
    else:
        module.double()
        with pytest.raises(mf.ProgramError, match=r"%kept has dtype torch\.float64"):
            step(x)
        module.float()
    for _ in range(4):
        take()
    assert torch.equal(before, right)
    assert recorders


def test_state_of_another_shape_is_refused(recorders: list[FakeRecorder]) -> None:
    kept, x = torch.zeros(4), torch.ones(4)
    step = mf.Step(keeping(), {"kept": kept})
    for _ in range(5):
        step(x)
    kept.resize_(2)
    with pytest.raises(mf.ProgramError, match=r"%kept has shape \(2,\)"):
        step(x)
    assert recorders


# -- which graph ---------------------------------------------------------------------------------


class Places:
    """New outputs where a test wants them: the i-th of its buffers."""

    def __init__(self) -> None:
        self.memory, self.now = [draw() for _ in range(8)], 0

    def all_new(self, forms: Sequence[Form]) -> Callable[[], list[Tensor]]:
        assert len(forms) == 1
        return lambda: [self.memory[self.now].view(4, 4)]


def test_outputs_that_come_again_and_again_get_a_graph(
    monkeypatch: pytest.MonkeyPatch, recorders: list[FakeRecorder]
) -> None:
    """What a caller kept at first takes no place for ever; what comes in turns is copied out."""
    places = Places()
    monkeypatch.setattr("mdfuse.plan.graphs.all_new", places.all_new)
    f, x, w = program(), draw(), draw()

    def run(place: int) -> list[int]:
        """Run with an output there; return how often each graph has run."""
        places.now = place
        x.copy_(draw())
        (y,) = f.run(x, w)
        torch.testing.assert_close(y, x @ w * 2)
        assert y.data_ptr() == places.memory[place].data_ptr()
        return [r.count for r in recorders[0].made] if recorders else []

    f.run(x, w)  # the first run's output is where torch has it
    for place in range(GRAPHS):
        counts = run(place)
    assert counts == [1] * GRAPHS
    for n in range(TIMES - 1):
        assert run(4) == [1] * GRAPHS + [n + 1]
    assert run(4) == [1] * GRAPHS + [TIMES - 1, 1]
    assert recorders[0].made[0].is_reset and not recorders[0].made[1].is_reset
    assert run(4)[-1] == 2
    for n in range(12):  # in turns: no graph for either of them
        run(5 + n % 2)
    assert len(recorders[0].made) == GRAPHS + 2
    for _ in range(2 * TIMES):  # the next one takes twice as long
        run(7)
    assert len(recorders[0].made) == GRAPHS + 3
    run(2)
    assert len(recorders[0].made) == GRAPHS + 3


def test_arguments_that_move_are_copied(recorders: list[FakeRecorder]) -> None:
    """What is elsewhere in each run has a place in the graph; the weights are read in theirs."""
    f, w, kept = program(), draw(), []
    for _ in range(12):
        kept.append(draw())
        torch.testing.assert_close(f.run(kept[-1], w)[0], kept[-1] @ w * 2)
    plan = f.plans.recent
    assert isinstance(plan, GraphPlan) and plan.replays()
    assert all(one.copies and len(one.at) == 1 for one in plan.replays())
    (recorder,) = recorders
    assert sum(r.count for r in recorder.made) == 11


def test_given_buffers_are_filled(recorders: list[FakeRecorder]) -> None:
    f, x, w = program(), draw(), draw()
    out = [draw(), draw()]
    for n in range(9):
        x.copy_(draw())
        (y,) = f.run(x, w, out=[out[n // 3 % 2]])
        assert y is out[n // 3 % 2]
        torch.testing.assert_close(y, x @ w * 2)
    assert recorders


# -- modes ---------------------------------------------------------------------------------------


MODES: dict[str, Callable[[Callable[[], Any]], Any]] = {
    "vmap": lambda ask: torch.vmap(lambda row: (ask(), row)[1])(torch.zeros(2)),
    "grad": lambda ask: torch.func.grad(lambda x: (ask(), x)[1])(torch.zeros(())),
    "jvp": lambda ask: torch.func.jvp(
        lambda x: (ask(), x)[1], (torch.zeros(()),), (torch.ones(()),)
    ),
    "functionalize": lambda ask: torch.func.functionalize(lambda x: (ask(), x)[1])(torch.zeros(())),
}


@pytest.mark.parametrize("name", MODES)
def test_nothing_is_alike_inside_of_a_transform(name: str) -> None:
    xs, found = (torch.randn(3), torch.randn(2, 2)), []
    where = likeness(xs)
    MODES[name](lambda: found.append(where(xs)))
    assert found and not any(found)
    assert where(xs) == tuple(x.data_ptr() for x in xs)


@pytest.mark.parametrize(
    "mode",
    [
        torch.inference_mode,
        partial(torch.autocast, "cpu"),
        torch.autograd.forward_ad.dual_level,
        TorchDispatchMode,
    ],
)
def test_alike_means_in_the_same_modes(mode: Callable[[], Any]) -> None:
    xs = (torch.randn(3), torch.randn(2, 2))
    outside = likeness(xs)
    with mode():
        assert outside(xs) is None
    assert outside(xs) is not None
