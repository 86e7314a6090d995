"""Arguments of the wrong kind, of everything that users call: refused by an error of mdfuse."""

from __future__ import annotations

import inspect
import random
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

import mdfuse as mf
from fuzz.definitions import STRANGE
from mdfuse import DeviceMesh, FusionDefinition, Layout, Options, Partial, Shard, Stream, hir

ODD: tuple[Callable[[], Any], ...] = (
    *STRANGE, lambda: 2**70, lambda: -(2**70), lambda: -(10**5000), lambda: [2**70], lambda: {0: 1},
    lambda: {"tp": 1}, lambda: {"tp"}, lambda: (i for i in (1, 2)), lambda: [[0, 1], [2]],
    lambda: slice(0, 2, 0), lambda: 1e300, lambda: -float("inf"), lambda: bytearray(b"x"),
    lambda: frozenset(), lambda: memoryview(b"ab"), lambda: Stream(0, 2), lambda: Partial(),
    lambda: Layout(MESH, {"tp": Shard(0)}), lambda: Options(), lambda: int, lambda: "tp",
    lambda: ("tp", "dp"), lambda: {"tp": None}, lambda: nn.Linear(2, 2), lambda: NotImplemented,
    lambda: 2**62, lambda: 10**12, lambda: {"x.0": 2**70}, lambda: "\udcff", lambda: {1: (2, [3])},
)  # fmt: skip

MESH = DeviceMesh.arange(tp=2)

#: What takes no longer than a blink with any argument, and right arguments by name.
CALLS: dict[Callable[..., Any], dict[str, Callable[[], Any]]] = {
    DeviceMesh: {"ranks": lambda: [0, 1], "axes": lambda: ("tp",), "hosts": lambda: [0, 0]},
    DeviceMesh.arange: {"tp": lambda: 2},
    MESH.with_hosts: {"hosts": lambda: [0, 1]},
    Shard: {"dim": lambda: 0, "blocks": lambda: 2},
    Partial: {"op": lambda: "sum"},
    Stream: {"dim": lambda: 0, "chunks": lambda: 2, "rotate": lambda: "tp"},
    Layout: {
        "mesh": lambda: MESH,
        "placements": lambda: {"tp": Shard(0)},
        "order": lambda: {0: ("tp",)},
        "stream": lambda: Stream(0, 2),
    },
    mf.compile: {"definition": lambda: defined(), "options": Options},
    mf.simulate: {
        "program": lambda: mf.compile(defined()),
        "inputs": lambda: [torch.ones(4, 4), 2.0],
        "options": Options,
        "extents": dict,
    },
    mf.reference: {"definition": lambda: defined(), "inputs": lambda: [torch.ones(4, 4), 2.0]},
    mf.grad: {"y": lambda: 1, "wrt": lambda: [1], "seed": lambda: None},
    mf.layout_of: {"x": lambda: torch.ones(2), "axes": lambda: None},
    mf.spec_of: {"x": lambda: torch.ones(2), "axes": lambda: None},
    mf.HostIrEvaluator: {"program": lambda: mf.compile(defined()).host, "options": Options},
    FusionDefinition: {"name": lambda: "f"},
    hir.parse: {"text": lambda: "host @f on mesh(tp=2) {\n  return\n}\n"},
    mf.shard_tensor: {
        "tensor": lambda: torch.ones(4),
        "mesh": lambda: MESH,
        "placements": lambda: {"tp": Shard(0)},
        "rank": lambda: 0,
    },
    mf.unshard_tensor: {
        "parts": lambda: [torch.ones(2)] * 2,
        "mesh": lambda: MESH,
        "placements": lambda: {"tp": Shard(0)},
    },
}


def defined() -> FusionDefinition:
    with FusionDefinition("f") as fd:
        x = fd.define_tensor([4, 4], mesh=MESH, layout={"tp": Shard(0)}, name="x")
        fd.add_output(x * fd.define_scalar(name="s"))
    return fd


def fuzz(drawn: random.Random) -> None:
    """Call something with an odd argument or two, and show what comes of it."""
    sort = drawn.randrange(6)
    if sort == 0:
        _option(drawn)
    elif sort == 1:
        _definition(drawn)
    elif sort == 2:
        _index(drawn)
    else:
        call = drawn.choice([*CALLS])
        repr(call(**mixed(drawn, call, CALLS[call])))


def mixed(
    drawn: random.Random,
    call: Callable[..., Any],
    right: Mapping[str, Callable[[], Any]],
    odd: Sequence[Callable[[], Any]] = ODD,
) -> dict[str, Any]:
    """Right arguments but for one or two; some that need not be given are left out."""
    names, parameters = [*right], inspect.signature(call).parameters
    wrong = drawn.sample(names, min(len(names), drawn.choice((1, 1, 2))))
    free = {n for n, p in parameters.items() if p.default is not p.empty} - {*wrong}
    left = {n for n in sorted(free) if drawn.random() < 0.3}
    return {
        n: bent(drawn, right[n](), odd) if n in wrong else right[n]()
        for n in names
        if n not in left
    }


def bent(drawn: random.Random, x: Any, odd: Sequence[Callable[[], Any]]) -> Any:
    """Something odd; or a dict, a list or a tuple with something odd among it."""
    if not isinstance(x, dict | list | tuple) or not x or drawn.random() < 0.4:
        return drawn.choice(odd)()
    strange = drawn.choice(odd)()
    if isinstance(x, dict):
        key = drawn.choice([*x])
        if drawn.random() < 0.6:
            return {**x, key: bent(drawn, x[key], odd)}
        rest = dict(x) if drawn.random() < 0.5 else {k: y for k, y in x.items() if k != key}
        return {**rest, strange: x[key]} if isinstance(strange, Hashable) else rest
    at = drawn.randrange(len(x))
    item = bent(drawn, x[at], odd) if drawn.random() < 0.7 else strange
    return type(x)([*x[:at], *([item] * drawn.randrange(3)), *x[at + 1 :]])


def _option(drawn: random.Random) -> None:
    name = drawn.choice([*inspect.signature(Options).parameters])
    options = Options(**{name: drawn.choice(ODD)()})
    if name not in ("costs", "trace", "reports"):
        mf.compile(defined(), options)


def _definition(drawn: random.Random) -> None:
    """A method of a definition, with odd arguments."""
    with FusionDefinition("f") as fd:
        x = fd.define_tensor([4, 4], mesh=MESH, layout={"tp": Shard(0)}, name="x")
        calls: dict[Any, dict[str, Callable[[], Any]]] = {
            fd.define_tensor: {
                "shape": lambda: [4, 4],
                "dtype": lambda: torch.float32,
                "mesh": lambda: MESH,
                "layout": lambda: {"tp": Shard(0)},
                "stride_order": lambda: [1, 0],
                "name": lambda: "y",
            },
            fd.define_scalar: {"value": lambda: 2, "dtype": lambda: None, "name": lambda: "s"},
            fd.add_output: {"t": lambda: x, "stride_order": lambda: [0, 1], "reuse": lambda: None},
            x.on: {"mesh": lambda: MESH, "layout": lambda: {"tp": Shard(1)}},
            fd.ops.set(x).on: {"mesh": lambda: MESH, "layout": lambda: {"tp": Shard(1)}},
        }
        call = drawn.choice([*calls])
        made = call(**mixed(drawn, call, calls[call]))
        if isinstance(made, type(x)) and made.is_tensor:
            made = made + 1
        fd.add_output(x + 1)
    program = mf.compile(fd)
    assert hir.parse(str(program)) == program.host


def _index(drawn: random.Random) -> None:
    """An index of a tensor, beside torch's own; what is read back is the same program."""
    whole = torch.arange(24.0).reshape(4, 3, 2)
    items = [_item(drawn) for _ in range(drawn.choice((1, 1, 1, 2, 3)))]
    where = items[0] if len(items) == 1 else tuple(items)
    with FusionDefinition("f") as fd:
        x = fd.define_tensor([4, 3, 2], mesh=MESH, layout={"tp": Shard(drawn.randrange(3))})
        y = x[where]
        fd.add_output(y + 0.0)
    program = mf.compile(fd)
    assert hir.parse(str(program)) == program.host
    (found,) = mf.simulate(program, [whole]).outputs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch cuts large ends of slices off, too
        assert torch.equal(found, whole[where]), where


def _item(drawn: random.Random) -> Any:
    number = drawn.choice((0, 1, -1, 3, 4, -5, 99, 2**31, 2**63, -(2**63), 2**70, None))
    other = drawn.choice((0, 1, 2, -1, -9, 99, None, 2**70))
    match drawn.randrange(6):
        case 0:
            return slice(number, other, drawn.choice((None, 1, 2, 0, -1, 2**70)))
        case 1:
            return [n for n in (number, other) if n is not None]
        case 2:
            return drawn.choice((None, ..., True, slice(None)))
        case 3:
            return drawn.choice(ODD)()
    return number if number is not None else 0
