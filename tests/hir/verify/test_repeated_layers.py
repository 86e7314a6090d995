"""Layers that are alike are verified once: which ones that is, and that it hides no fault."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from helpers.mutants import broken, is_right

import mdfuse as mf
from mdfuse import DeviceMesh, MdfuseError, Options, Shard, Stream
from mdfuse.hir import HostProgram
from mdfuse.hir.text.parser import parse
from mdfuse.hir.verify.check import verify
from mdfuse.hir.verify.repeated_layers import without_repeated

MESH = DeviceMesh.arange(tp=2)
LAYERS = 5

INPUTS = "".join(f"  input %{x}: f32[2,2] (x=R)\n" for x in ("x", "k", "w0", "w1", "w2", "w3"))
HEAD = "host @net on mesh(x=1) {\n" + INPUTS + "  %y: f32[2,2] (x=R) = relu(%x)\n"


def layer(n: int, before: str, weight: str = "") -> str:
    return (
        f"  %a{n}: f32[2,2] (x=R) = matmul({before}, %{weight or f'w{n}'})\n"
        f"  %b{n}: f32[2,2] (x=R) = add(%a{n}, %k)\n"
        f"  free %a{n}, {before}\n"
        f"  %x{n}: f32[2,2] (x=R) = relu(%b{n})\n"
        f"  free %b{n}\n"
    )


def test_two_layers_of_four_are_left() -> None:
    layers = [layer(n, f"%x{n - 1}" if n else "%y") for n in range(4)]
    short = without_repeated(parse(HEAD + "".join(layers) + "  return %x3\n}"))
    head = HEAD.replace("  input %w2: f32[2,2] (x=R)\n  input %w3: f32[2,2] (x=R)\n", "")
    assert short is not None
    assert str(short).split() == str(parse(head + "".join(layers[:2]) + "return %x1\n}")).split()


@pytest.mark.parametrize(
    "layers",
    [
        [layer(n, "%y") for n in range(4)],  # each leaves what is used in the end
        [layer(n, f"%x{n - 2}" if n > 1 else "%y") for n in range(4)],  # of two layers before
        [layer(n, f"%x{n - 1}" if n else "%y", "w0" if n % 2 else "w1") for n in range(4)],
        [layer(n, f"%x{n - 1}" if n else "%y").replace("add", "mul", n == 2) for n in range(4)],
    ],
)  # fmt: skip
def test_layers_that_are_not_alike(layers: list[str]) -> None:
    returned = ", ".join(f"%x{n}" for n in range(4))
    assert without_repeated(parse(f"{HEAD}{''.join(layers)}  return {returned}\n}}")) is None


def test_a_fault_is_told_with_its_own_names() -> None:
    layers = [layer(n, f"%x{n - 1}" if n else "%y") for n in range(4)]
    layers[2] = layers[2].replace("free %a2, ", "free ")
    with pytest.raises(MdfuseError, match="%a2"):
        verify(parse(HEAD + "".join(layers) + "  return %x3\n}"))
    spoiled = [x.replace(f"free %a{n}, ", "free ") for n, x in enumerate(layers)]
    with pytest.raises(MdfuseError, match="%a0"):
        verify(parse(HEAD + "".join(spoiled) + "  return %x3\n}"))


# -- what is broken in layers ----------------------------------------------------------------------


def rings() -> HostProgram:
    """Rows go round: sends and receives in loops, on two streams."""
    turn, split = Stream(0, 2, rotate="tp"), {"tp": Shard(0)}
    with mf.FusionDefinition("rings") as fd:
        x = fd.define_tensor([3, 4], torch.float32, MESH, split)
        for _ in range(LAYERS):
            w1 = fd.define_tensor([4, 4], torch.float32, MESH, {"tp": Shard(1)})
            w2 = fd.define_tensor([4, 4], torch.float32, MESH, {"tp": Shard(0)})
            whole = fd.ops.set(x).on(MESH, stream=turn)
            h = fd.ops.matmul(whole, w1).on(MESH, {"tp": Shard(1)}, stream=turn)
            x = fd.ops.matmul(fd.ops.relu(h), w2).on(MESH, split, stream=turn)
        fd.add_output(x)
    return mf.compile(fd, Options(verify=False)).host


def sums() -> HostProgram:
    """Partial products are all-reduced: posts, waits and frees, without loops."""
    with mf.FusionDefinition("sums") as fd:
        x = fd.define_tensor([4, 4], torch.float32, MESH, {})
        for _ in range(LAYERS):
            w1 = fd.define_tensor([4, 4], torch.float32, MESH, {"tp": Shard(0)})
            w2 = fd.define_tensor([4, 4], torch.float32, MESH, {"tp": Shard(1)})
            x = x + fd.ops.linear(fd.ops.relu(fd.ops.linear(x, w1)), w2).on(MESH)
        fd.add_output(x)
    return mf.compile(fd, Options(verify=False)).host


def spoiled(program: HostProgram) -> list[HostProgram]:
    """The program with one fault, in all of its layers, some, or one."""
    code = program.instructions
    markers = [n for n, i in enumerate(code) if any(j.fn == "relu" for j in i.walk())]
    period = markers[1] - markers[0]
    assert [n - markers[0] for n in markers] == [n * period for n in range(LAYERS)]
    start = markers[1] - period // 2  # inside the first layer
    layers = [code[start + n * period : start + (n + 1) * period] for n in range(LAYERS - 1)]
    variants = [[x for at in range(period) for x in broken(block, at)] for block in layers]
    assert len({*map(len, variants)}) == 1
    found = []
    for changed in zip(*variants, strict=True):
        for where in ({0, 1, 2, 3}, {2, 3}, {3}, {1}):
            made = [changed[n] if n in where else x for n, x in enumerate(layers)]
            behind = code[start + len(layers) * period :]
            kept = (*code[:start], *(i for block in made for i in block), *behind)
            found.append(replace(program, instructions=kept))
    return found


@pytest.mark.parametrize("make", [rings, sums])
def test_faults_in_layers(make: Callable[[], HostProgram]) -> None:
    """The verdict is the one on the program as it is, also where all layers have one fault."""
    program = make()
    short = without_repeated(program)
    assert short is not None and len(short) < len(program)
    assert is_right(program, False)
    drawn = random.Random(0).sample(spoiled(program), 60)
    verdicts = [(is_right(p, False), is_right(p, True)) for p in drawn]
    assert all(a == b for a, b in verdicts)
    assert len({*verdicts}) == 2
