"""Communications of what is there already are posted ahead, under a budget of memory."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import helpers
import pytest
import torch
import torch.nn.functional as F
from helpers.oracle import check_everywhere, simulate_shares
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Shard
from mdfuse.hir.passes import hoist_posts
from mdfuse.hir.rank.pipelines import project
from mdfuse.hir.verify.check import verify
from mdfuse.seeing.memory_use import memory_of

MESH = DeviceMesh.arange(dp=4)
ROWS = {"dp": Shard(0)}
WIDTH, BATCH, RATE = 16, 8, 0.1
#: A gathered parameter, in f64.
WHOLE = WIDTH * WIDTH * 8


@pytest.fixture
def pays() -> str:
    """A table by which overlap pays."""
    return str(Path(helpers.__file__).parent / "pays.json")


def numbers(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64) * 0.3


def network(layers: int, gathers_again: bool = True) -> mf.FusionDefinition:
    """A step of layers whose parameters are split, gathered for each layer, updated in place."""
    with mf.FusionDefinition("net") as fd:
        x = fd.define_tensor([BATCH, WIDTH], torch.float64, MESH, ROWS)
        ws = [
            fd.define_tensor([WIDTH, WIDTH], torch.float64, MESH, ROWS, name=f"w{n}")
            for n in range(layers)
        ]
        h = x
        for w in ws:
            if gathers_again:
                with mf.recompute():
                    whole = fd.ops.set(w).on(MESH, {})
            else:
                whole = fd.ops.set(w).on(MESH, {})
            h = fd.ops.tanh(h @ whole)
        loss = (h * h).mean()
        fd.add_output(loss)
        for w, dw in zip(ws, mf.grad(loss, ws), strict=True):
            fd.add_output(w - RATE * dw, reuse=w)
    return fd


def step_of_torch(x: Tensor, ws: Sequence[Tensor]) -> list[Tensor]:
    leaves = [w.clone().requires_grad_() for w in ws]
    h = x
    for w in leaves:
        h = torch.tanh(h @ w)
    loss = (h * h).mean()
    gradients = torch.autograd.grad(loss, leaves)
    return [loss.detach(), *(w - RATE * g for w, g in zip(ws, gradients, strict=True))]


def ahead(size: int) -> mf.Options:
    return mf.Options(prefetch_bytes=size)


def events(program: mf.Program) -> list[str]:
    """Posts, waits and products in order: gathers and products by number, waits by post."""
    gathers, products, found, handles = 0, 0, [], {}
    for i in program.host:
        if i.op == "post" and i.comm is not None and i.comm.kind == "Allgather":
            handles[i.outputs[0]] = f"{gathers}"
            found.append(f"gather {gathers}")
            gathers += 1
        elif i.op == "wait" and i.reads[0] in handles:
            found.append(f"wait {handles[i.reads[0]]}")
        elif i.fn == "matmul":
            found.append(f"product {products}")
            products += 1
    return found


def test_the_next_layer_is_gathered_behind_this_one() -> None:
    program = mf.compile(network(3, gathers_again=False), ahead(WHOLE))
    assert events(program)[:9] == [
        "gather 0", "gather 1", "wait 0", "product 0", "gather 2", "wait 1", "product 1",
        "wait 2", "product 2",
    ]  # fmt: skip
    two = mf.compile(network(3, gathers_again=False), ahead(2 * WHOLE))
    assert events(two)[:4] == ["gather 0", "gather 1", "gather 2", "wait 0"]


@pytest.mark.parametrize("size", [0, WHOLE - 1])
def test_nothing_moves_without_room(size: int) -> None:
    plain = mf.compile(network(3))
    assert str(mf.compile(network(3), ahead(size))) == str(plain)
    assert events(plain)[:6] == [
        "gather 0", "wait 0", "product 0", "gather 1", "wait 1", "product 1",
    ]  # fmt: skip


@pytest.mark.parametrize("gathers_again", [True, False])
@pytest.mark.parametrize("size", [WHOLE, 3 * WHOLE, 1 << 30])
def test_values_and_memory(size: int, gathers_again: bool) -> None:
    layers = 5
    fd, given = network(layers, gathers_again), [numbers(BATCH, WIDTH)]
    given += [numbers(WIDTH, WIDTH, seed=n + 1) for n in range(layers)]
    plain, program = mf.compile(fd), mf.compile(fd, ahead(size))
    expected = step_of_torch(given[0], given[1:])
    for schedule in (None, *range(6)):
        check_everywhere(program, given, expected, schedule=schedule)
    peaks = [simulate_shares(p, given).peak_bytes for p in (plain, program)]
    # what is sent is copied where it does not lie side by side, which here it does
    copies = layers * WHOLE // 4
    assert all(b <= a + size + copies for a, b in zip(*peaks, strict=True))
    assert program.bytes_received(0) == plain.bytes_received(0)
    text = str(mf.hir.parse(str(program.host)))
    assert str(mf.hir.parse(text)) == text


def test_a_value_that_is_updated_before_is_gathered_after() -> None:
    """The gather of the new parameter reads what the update writes in place."""
    with mf.FusionDefinition("zero") as fd:
        w = fd.define_tensor([8, 4], torch.float64, MESH, ROWS)
        g = fd.define_tensor([8, 4], torch.float64, MESH, ROWS)
        x = fd.define_tensor([4, 8], torch.float64, MESH)
        y = fd.ops.tanh(x @ fd.ops.set(w).on(MESH, {}))
        new = w - g
        fd.add_output(new, reuse=w)
        fd.add_output(y)
        fd.add_output(fd.ops.set(new).on(MESH, {}))
    program = mf.compile(fd, ahead(1 << 20))
    kinds = [i.fn or i.op for i in program.host if i.fn in ("sub",) or i.op == "post"]
    assert kinds == ["post", "sub", "post"]
    given = numbers(8, 4), numbers(8, 4, seed=1), numbers(4, 8, seed=2)
    new_whole = given[0] - given[1]
    expected = [new_whole, torch.tanh(given[2] @ given[0]), new_whole]
    for schedule in (None, *range(6)):
        check_everywhere(program, given, expected, schedule=schedule)


HEAD = """host @by_hand on mesh(dp=2) {
  input %a: f32[2] of [4] (dp=S0)
  input %b: f32[2] of [4] (dp=S0)
"""
GATHER = (
    "  %whole: f32[4] (dp=R) = alloc\n"
    "  %c0 = post allgather(%b) -> %whole f32[4] (dp=S0) => (dp=R) axis=dp dim=0\n"
    "  wait %c0\n"
)
WORK = "  %t: f32[2] of [4] (dp=S0) = exp(%a)\n"
TAIL = "  %u: f32[2] of [4] (dp=S0) = exp(%t)\n  return %u, %whole\n}"


def raised(text: str, size: int = 1 << 20) -> list[str]:
    program = mf.hir.parse(text)
    verify(program)
    found = hoist_posts.run(program, ahead(size))
    verify(found)
    assert sorted(map(str, found)) == sorted(map(str, program))
    return [i.fn or i.op for i in found]


def test_a_program_by_hand() -> None:
    assert raised(HEAD + WORK + GATHER + TAIL)[:4] == ["alloc", "post", "exp", "wait"]
    assert raised(HEAD + WORK + GATHER + TAIL, 15)[:2] == ["exp", "alloc"]


@pytest.mark.parametrize(
    ("between", "name"),
    [
        ("  barrier (dp=R)\n", "barrier"),
        ("  %s = get_stream\n", "get_stream"),
        ("  %q = relu(%t)\n", "relu"),  # what is sent is written
    ],
    ids=["barrier", "stream", "write"],
)
def test_what_a_post_does_not_pass(between: str, name: str) -> None:
    copy = "  %q: f32[2] of [4] (dp=S0) = alloc\n  %q = sqrt(%b)\n"
    found = raised(HEAD + copy + WORK + between + GATHER.replace("%b", "%q") + TAIL)
    assert found.index(name) + 2 == found.index("post")
    free = raised(HEAD + copy + WORK + GATHER.replace("%b", "%q") + TAIL)
    assert free.index("post") < free.index("exp")


def test_a_buffer_in_use_is_not_filled_early() -> None:
    """The buffer that the gather fills held something else before, which is read."""
    text = HEAD + (
        "  %whole: f32[4] (dp=R) = full(1.0, shape=[4], dtype=f32)\n"
        "  %sum: f32[4] (dp=R) = exp(%whole)\n"
        "  %c0 = post allgather(%b) -> %whole f32[4] (dp=S0) => (dp=R) axis=dp dim=0\n"
        "  wait %c0\n  return %sum, %whole\n}"
    )
    assert raised(text)[:3] == ["full", "exp", "post"]


def test_posts_of_a_group_stay_together() -> None:
    text = (
        HEAD + WORK + "  %g: f32[2] of [4] (dp=S0) = alloc\n"
        "  group_start\n"
        "  %c0 = send(%b, to=(coord(dp) + 1) mod 2, axis=dp)\n"
        "  %c1 = recv(%g, from=(coord(dp) + 1) mod 2, axis=dp)\n"
        "  group_end\n  wait %c0\n  wait %c1\n  return %t, %g\n}"
    )
    assert raised(text)[:4] == ["exp", "alloc", "group_start", "send"]


@pytest.mark.parametrize("seed", range(20))
def test_drawn(seed: int) -> None:
    """Values that are gathered, summed, updated in place and read again, under a drawn budget."""
    draw = random.Random(seed)
    given = [numbers(8, 4, seed=n) for n in range(4)]
    with mf.FusionDefinition("drawn") as fd:
        inputs = [fd.define_tensor([8, 4], torch.float64, MESH, ROWS) for _ in given]
        known: list[tuple[Any, Tensor]] = [*zip(inputs, given, strict=True)]
        expected = []
        for n in range(12):
            x, whole = draw.choice(known)
            kind = draw.choice(["gather", "work", "join", "sum"])
            if kind == "gather":
                x = fd.ops.set(x).on(MESH, draw.choice([{}, {"dp": Shard(1)}]))
            elif kind == "work":
                x, whole = fd.ops.tanh(x), whole.tanh()
            elif kind == "join":
                y, other = draw.choice(known)
                x, whole = x + 0.5 * y, whole + 0.5 * other
            else:
                x, whole = x - x.mean(0), whole - whole.mean(0)
            known.append((x, whole))
            if draw.random() < 0.5 or n > 9:
                fd.add_output(fd.ops.tanh(x))
                expected.append(whole.tanh())
        old, (x, whole) = draw.randrange(4), draw.choice(known)
        fd.add_output(fd.ops.set(x * 2 - inputs[old]).on(MESH, ROWS), reuse=inputs[old])
    expected.append(whole * 2 - given[old])
    program = mf.compile(fd, ahead(draw.choice([100, 300, 1000, 1 << 20])))
    for schedule in (None, 0, 1, 2):
        check_everywhere(program, given, expected, schedule=schedule)


@pytest.mark.parametrize("rows", [1, 3, 4, 5])
@pytest.mark.parametrize("copied", ["contiguous", "mul"])
def test_what_is_sent_again_later_stays(rows: int, copied: str) -> None:
    """A copy that is gathered far behind its last reader: the post passes it, the free does not."""
    mesh = DeviceMesh.arange(tp=2)
    with mf.FusionDefinition("again") as fd:
        x = fd.define_tensor([rows, rows], torch.float64, mesh=mesh, name="x")
        t = torch.minimum(x, x).on(mesh, {"tp": Shard(0)})
        y = F.linear(t, t.contiguous() if copied == "contiguous" else t * 1)
        fd.add_output(y + t)
        fd.add_output(mf.grad(y.sum(), [x])[0])
    leaf = numbers(rows, rows).requires_grad_()
    (leaf @ leaf.T).sum().backward()
    assert leaf.grad is not None
    whole = leaf.detach()
    program = mf.compile(fd, ahead(1 << 20))
    for schedule in (None, 0, 1):
        check_everywhere(program, [whole], [whole @ whole.T + whole, leaf.grad], schedule=schedule)


def updated_between(draw: random.Random) -> tuple[mf.FusionDefinition, list[Tensor], list[Tensor]]:
    """Products with gathered parameters, some of which are updated in place before or behind.

    Returns:
        the definition; inputs; outputs.
    """
    mesh, layers = DeviceMesh.arange(dp=draw.choice([2, 3, 4])), draw.choice([2, 3, 4])
    splits = [Shard(0), Shard(1), Shard(0, blocks=2)]
    given = [numbers(5, 6), *(numbers(6, 6, seed=n + 1) for n in range(layers))]
    h, *known = given
    updated: dict[int, bool] = {}
    with mf.FusionDefinition("updated") as fd:
        x = fd.define_tensor([5, 6], torch.float64, mesh, {"dp": Shard(0)})
        layouts = [{"dp": draw.choice(splits)} for _ in known]
        inputs = [fd.define_tensor([6, 6], torch.float64, mesh, layout) for layout in layouts]
        ws = [*inputs]
        for _ in range(3 * layers):
            n = draw.randrange(layers)
            match draw.choice(["use", "use", "turned", "update", "work"]):
                case "use":
                    x, h = x @ fd.ops.set(ws[n]).on(mesh, {}), h @ known[n]
                case "turned":
                    x = x @ fd.ops.set(ws[n].transpose(0, 1)).on(mesh, {})
                    h = h @ known[n].T
                case "update":
                    ws[n], known[n] = ws[n] * 0.5 + 1.0, known[n] * 0.5 + 1.0
                    updated[n] = draw.random() < 0.8
                case "work":
                    x, h = x * 0.5 + 1.0, h * 0.5 + 1.0
        fd.add_output(x * 1.0)
        for n, is_in_place in updated.items():
            fd.add_output(ws[n], reuse=inputs[n] if is_in_place else None)
    return fd, given, [h, *(known[n] for n in updated)]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("launches", ["never", "always"])
def test_parameters_that_are_updated_between_gathers(seed: int, launches: Any, pays: str) -> None:
    """Each gather brings the value of its place; and the budget is kept to the byte."""
    fd, given, expected = updated_between(random.Random(seed))
    plain = staging(mf.compile(fd, mf.Options(compile=launches)))
    for size in (287, 288, 600, 1 << 20):
        program = mf.compile(fd, mf.Options(compile=launches, prefetch_bytes=size))
        for schedule in (None, seed):
            check_everywhere(program, given, expected, schedule=schedule)
        if launches == "never":  # else units are cut otherwise
            assert all(b <= a + size for a, b in zip(plain, staging(program), strict=True))
    chosen = mf.compile(fd, mf.Options(compile=launches, overlap="auto", costs=pays))
    check_everywhere(chosen, given, expected, schedule=seed)


def staging(program: mf.Program) -> list[int]:
    """The bytes that each rank holds at most, beside inputs and outputs."""
    return [memory_of(project(program.host, r)).staging for r in program.host.meshes[0].ranks]


@pytest.mark.parametrize("value", [-1, 1.0, True, None])
def test_a_wrong_size_is_refused(value: Any) -> None:
    with pytest.raises(mf.ProgramError, match=r"prefetch_bytes=(.|\n)*0 for none"):
        mf.Options(prefetch_bytes=value)
