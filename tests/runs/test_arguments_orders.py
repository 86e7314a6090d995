"""A memory order that is required of an output is one of the input that it is written into."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Shard, hir
from mdfuse.hir.verify.check import verify

MESH = DeviceMesh.arange(tp=2)
LAYOUTS: tuple[dict[str, Any], ...] = ({}, {"tp": Shard(0)}, {"tp": Shard(-1)})


def program(
    shape: tuple[int, ...],
    order: tuple[int, ...],
    layout: dict[str, Any],
    is_read_later: bool = False,
    is_required: bool = True,
) -> mf.Program:
    """y + 1 into x, which is read before, or behind as well."""
    with mf.FusionDefinition("into") as fd:
        x, y = (
            fd.define_tensor([*shape], mesh=MESH, layout=layout, name=n, stride_order=order)
            for n in "xy"
        )
        new = x + y if is_read_later else y + 1.0
        fd.add_output(new, reuse=x, stride_order=order if is_required else None)
        if is_read_later:
            fd.add_output(x.exp())
    return mf.compile(fd)


def in_order(shape: tuple[int, ...], order: tuple[int, ...]) -> Tensor:
    """A dense tensor whose dim d is at the place order[d], 0 the fastest."""
    outermost = sorted(range(len(shape)), key=lambda d: -order[d])
    x = torch.zeros([shape[d] for d in outermost])
    return x.permute([outermost.index(d) for d in range(len(shape))])


def parts(shape: tuple[int, ...], layout: dict[str, Any]) -> tuple[int, ...]:
    split = [*shape]
    if layout:
        split[layout["tp"].dim] //= 2
    return tuple(split)


def run(made: Any, x: Tensor) -> Tensor:
    """The first output of rank 0, for an input that all ranks pass alike."""
    ys = {"x": x, "y": torch.ones(x.shape)}
    rows = [
        {**ys, "x": x if r == 0 else x.clone(memory_format=torch.preserve_format)} for r in (0, 1)
    ]
    result: Tensor = mf.simulate(made, per_rank=rows).per_rank[0][0]
    return result


@pytest.mark.parametrize("is_read_later", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("order", [(1, 0), (0, 1), (0,), (2, 0, 1), (0, 2, 1)])
def test_what_lies_so_is_written_and_what_does_not_is_refused(
    order: tuple[int, ...], layout: dict[str, Any], is_read_later: bool
) -> None:
    shape = (4, 6, 4)[: len(order)]
    made = program(shape, order, layout, is_read_later)
    local = parts(shape, layout)
    right = in_order(local, order)
    text = hir.parse(str(made.host))
    assert text.alias_orders == made.host.alias_orders and made.host.alias_orders
    for one in (made, text):
        right.zero_()
        found = run(one, right)
        assert found.data_ptr() == right.data_ptr() and found.stride() == right.stride()
        assert found.eq(1.0 + (not is_read_later)).all()
    wrong = {
        "with gaps": in_order((*local[:-1], 2 * local[-1]), order)[..., ::2],
        "in another order": in_order(local, tuple(reversed(order))),
    }
    for how, x in wrong.items():
        if x.stride() == right.stride():
            continue
        for one in (made, text):
            with pytest.raises(mf.ProgramError, match="has strides") as caught:
                run(one, x)
            assert f"expected {right.stride()}" in str(caught.value), how
            assert not x.any()


def test_strides_of_dims_of_one_element_mean_nothing() -> None:
    made = program((2, 1), (1, 0), {})
    x = torch.zeros(2).as_strided((2, 1), (1, 7))
    assert run(made, x).tolist() == [[2.0], [2.0]]


def test_nothing_is_asked_of_what_is_not_required() -> None:
    made = program((4, 6), (1, 0), {}, is_required=False)
    assert not made.host.alias_orders
    x = torch.zeros(6, 4).T
    assert run(made, x).stride() == (1, 4)


def test_an_iteration_that_writes_into_the_input() -> None:
    with mf.FusionDefinition("streamed") as fd:
        x = fd.define_tensor([8, 2], mesh=MESH, name="x")
        y = fd.define_tensor([8, 2], mesh=MESH, name="y")
        z = (y + 1.0).on(MESH, {}, stream=mf.Stream(0, 4))
        fd.add_output(z, reuse=x, stride_order=(1, 0))
    made = mf.compile(fd)
    assert run(made, torch.zeros(8, 2)).tolist() == [[2.0, 2.0]] * 8
    with pytest.raises(mf.ProgramError, match="expected \\(2, 1\\)"):
        run(made, torch.zeros(2, 8).T)


@pytest.mark.parametrize(
    ("alias", "wrong"),
    [
        ("alias %y: f32[2,3] (x=R) = %x order=[0,0]", "order=[0,0]"),
        ("alias %y: f32[2,3] (x=R) = %x order=[0]", "order=[0]"),
        ("alias %x: f32[2,3] (x=R) = %y contiguous", "alias %x"),
    ],
)
def test_orders_that_mean_nothing(alias: str, wrong: str) -> None:
    with pytest.raises(mf.ProgramError, match=re.escape(wrong)):
        verify(
            hir.parse(f"""host @f on mesh(x=1) {{
          input %x: f32[2,3] (x=R)
          {alias}
          %y = add(%y, 1.0)
          return %y
        }}""")
        )
