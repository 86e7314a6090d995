"""Drawn whole programs, each with its outputs by plain torch: what options must leave as they are.

Operations of `fuzz.families`, and any others, on one mesh or on two one behind the other; gradients
(torch's autograd has them, too), steps of one optimizer or two, recomputation, streams, extents
that a run chooses, pipelines; several outputs, among them inputs, views, and one value twice. A
program is drawn in pieces, each from a seed of its own: without one of them the others stay as they
are.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import mdfuse as mf
from fuzz.definitions import Drawn, Known, is_of_example, try_
from fuzz.families import FAMILIES, ROWS, Call, Shape
from mdfuse import DeviceMesh, Layout, MdfuseError, Partial, Replicate, Shard, Stream
from mdfuse.layouts.layout import Placement

#: Elements of a value that the next operation still reads.
MOST = 600
KINDS = {"plain": 10, "meshes": 2, "streams": 2, "symbolic": 1, "pipeline": 3}
EXTENTS = (1, 1, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8, 9)
SIZES = (
    (1,),
    (2,),
    (2,),
    (2,),
    (3,),
    (4,),
    (2, 2),
    (2, 2),
    (1, 2),
    (2, 3),
    (8,),
    (2, 2, 2),
    (3, 1, 2),
)
SCHEDULES = (None, None, "1f1b", "gpipe", "zb1p", "interleaved")


@dataclass(frozen=True)
class Output:
    """What an output is."""

    known: Known
    #: the input into whose memory it goes
    reuse: int | None


class Whole(Drawn):
    """One whole program.

    Args:
        seed: what it is drawn from.
        without: pieces that it lacks.
    """

    def __init__(self, seed: int, without: frozenset[str] = frozenset()) -> None:
        draw = random.Random(f"{seed}")
        super().__init__(draw)
        self.seed, self.without = seed, without
        self.pieces: list[str] = []
        self.kind = draw.choices([*KINDS], [*KINDS.values()])[0]
        self.dtype = draw.choices(
            (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64),
            (12, 3, 1, 1, 1 if self.kind == "plain" else 0),
        )[0]
        is_float = self.dtype.is_floating_point
        self.has_gradients = is_float and (self.kind == "pipeline" or draw.random() < 0.5)
        self.is_normal = self.has_gradients or draw.random() < 0.5
        self.laws = draw.choice((0.0, 0.2, 0.5, 0.9))
        self.is_dense = self.kind in ("plain", "meshes") and draw.random() < 0.5
        self.partials = draw.random() < 0.25
        self.meshes = self.drawn_meshes()
        self.here = self.meshes[:1]
        self.length = draw.randint(1, 8)
        self.lengths = draw.sample(EXTENTS, draw.choice((1, 2, 2, 3))) + [0] * (draw.random() < 0.1)
        self.rows = draw.choice((1, 2, 2, 3, 4, 4, 6, 8))
        #: inputs whose first dim is the batch's, by number
        self.batch: list[int] = []
        self.outputs: list[Output] = []
        self.count, self.schedule = 1, None
        #: values of which no gradient is compared: equal ones may have been told apart
        self.kinked: set[int] = set()
        #: parameters, their gradients
        self.slopes: list[tuple[Known, Known]] = []
        self.layouts: dict[int, Layout | None] = {}

    def piece(self, name: str) -> bool:
        """Begin a piece of the program, which has a seed of its own; False where it lacks it."""
        self.begin(name)
        if name in self.without:
            return False
        self.pieces.append(name)
        return True

    def begin(self, name: str) -> None:
        """Begin a piece that every program has."""
        self.draw = random.Random(f"{self.seed} {name}")

    def drawn_meshes(self) -> list[DeviceMesh]:
        draw = self.draw
        if self.kind == "pipeline":
            size = draw.choice((1, 1, 2, 2, 3))
            places = draw.choice((1, 2, 2, 3)) if size < 3 else 1
            return [DeviceMesh(range(n * size, (n + 1) * size), axes=("a",)) for n in range(places)]
        sizes = draw.choice(SIZES)
        count = math.prod(sizes)
        ranks = list(range(count)) if draw.random() < 0.7 else draw.sample(range(count + 1), count)
        meshes = [DeviceMesh(torch.tensor(ranks).reshape(sizes), axes=tuple("abc"[: len(sizes)]))]
        if self.kind == "meshes":
            low, other = draw.randint(0, count), draw.choice((1, 2, 3))
            meshes.append(DeviceMesh(range(low, low + other), axes=("x",)))
        return meshes

    # -- inputs ----------------------------------------------------------------------------------

    def values(self, shape: list[int], dtype: torch.dtype) -> Tensor:
        if not dtype.is_floating_point or not self.is_normal:
            return super().values(shape, dtype)
        generator = torch.Generator().manual_seed(self.draw.randrange(10**6))
        x = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        return x.requires_grad_() if self.has_gradients else x

    def layout(self, rank: int, dtype: torch.dtype, is_input: bool = False) -> Layout | None:
        draw = self.draw
        if draw.random() < 0.1:
            return None if not is_input or len(self.meshes) == 1 else Layout(self.here[0], {})
        mesh = draw.choice(self.here)
        kinds: list[Placement] = [Replicate(), *(Shard(d) for d in range(rank))]
        if self.partials and dtype.is_floating_point and draw.random() < 0.3:
            kinds.append(Partial())
        placements = {axis: draw.choice(kinds) for axis in mesh.axes}
        order = {}
        for dim in range(rank):
            axes = [a for a, p in placements.items() if p == Shard(dim)]
            if len(axes) > 1 and draw.random() < 0.5:
                order[dim] = tuple(draw.sample(axes, len(axes)))
        return Layout(mesh, placements, order)

    def input(self, shape: Sequence[int], dtype: torch.dtype, whole: Tensor | None = None) -> Known:
        """A new input, of drawn values where none are given."""
        whole = self.values(list(shape), dtype) if whole is None else whole
        said: list[Any] = list(shape)
        if self.kind == "symbolic" and said and said[0] == self.rows:
            said[0] = -1
        layout = self.layout(len(said), dtype, is_input=True)
        known = self.add(whole, said, layout)
        self.layouts[known.handle.id] = layout
        return known

    def operand(self, shape: Shape, like: Known) -> Known:
        """A value of a shape, or a new input, which is often gathered first."""
        if self.kind == "pipeline":
            return self.input(shape, like.handle.dtype)
        same = [k for k in self.readable() if k.handle.dtype == like.handle.dtype]
        same = [k for k in same if k.whole is not None and k.whole.shape == shape]
        if same and self.draw.random() < 0.6:
            return self.draw.choice(same)
        found = self.input(shape, like.handle.dtype)
        return found if self.draw.random() < 0.8 else self.moved(found)

    def places(self, shape: Shape, below: int) -> Known:
        generator = torch.Generator().manual_seed(self.draw.randrange(10**6))
        whole = torch.randint(
            0, max(below, 1), shape, generator=generator
        )  # of no row torch has none
        return self.input(shape, torch.int64, whole)

    def extent(self) -> int:
        return self.draw.choice(self.lengths)

    # -- operations ------------------------------------------------------------------------------

    def readable(self) -> list[Known]:
        return [
            k
            for k in self.known
            if k.whole is not None and k.whole.numel() <= MOST and k.whole.ndim < 5
        ]

    def family(self) -> None:
        """One operation that fits a value."""
        draw = self.draw
        found = [k for k in self.readable() if k.handle.dtype == self.dtype] or self.readable()
        if not found:
            return
        x = found[-1] if draw.random() < 0.5 else draw.choice(found)
        families = ROWS if self.kind == "pipeline" else FAMILIES
        for _ in range(5):
            call = draw.choice(families)(self, x)
            if call is not None:
                self.record(call)
                return

    def record(self, call: Call) -> None:
        """Record an operation, and let torch do the same."""
        wholes = torch_makes(call.function, [k.whole for k in call.operands])
        is_rough = any(k.is_rough for k in call.operands)
        if wholes is None or (is_rough and not call.is_smooth):
            return
        block = mf.recompute() if self.draw.random() < 0.15 else nullcontext()
        with block:
            made = call.function(*(k.handle for k in call.operands))
        parts = list(made) if isinstance(made, tuple | list) else [made]
        if is_of_example([*call.operands], parts, wholes):
            return
        assert len(parts) == len(wholes), (call.name, len(parts), len(wholes))
        before = len(self.known)
        self.keep_parts(
            call.name, list(call.operands), parts, wholes, is_rough or not call.is_exact
        )
        is_kinked = not call.has_slope and is_rough
        if is_kinked or any(k.handle.id in self.kinked for k in call.operands):
            self.kinked |= {k.handle.id for k in self.known[before:]}

    def layer(self) -> None:
        """A product of what is communicated, or one that is communicated."""
        draw = self.draw
        found = [k for k in self.readable() if k.handle.dtype == self.dtype and k.handle.ndim > 1]
        if not found:
            return
        x = draw.choice(found[-3:])
        width = x.handle.shape[-1:]
        fitting = [k for k in found if k.handle.ndim == 2 and k.handle.shape[-1:] == width]
        if fitting and draw.random() < 0.4:
            weight = draw.choice(fitting)
            self.record(Call("copy", lambda a: a.contiguous(), (weight,), is_exact=True))
            weight = self.known[-1]
        else:
            weight = self.input((self.extent(), x.handle.shape[-1]), self.dtype)
        x = self.moved(x) if draw.random() < 0.3 else x
        weight = self.moved(weight) if draw.random() < 0.5 else weight
        self.record(Call("linear", F.linear, (x, weight)))
        if draw.random() < 0.5:
            self.moved(self.known[-1])

    def any_step(self) -> None:
        """An operation that fits, any other, or a new place for a value."""
        how = self.draw.random()
        if self.kind == "pipeline" or how < 0.75:
            self.layer() if self.is_dense and self.draw.random() < 0.5 else self.family()
        elif how < 0.85:
            before = len(self.known)
            self.step()
            self.kinked |= {k.handle.id for k in self.known[before:]}
        else:
            self.move()

    def move(self, is_stage: bool = False) -> None:
        """Set a value to another layout."""
        found = self.readable()
        if not found:
            return
        x = self.draw.choice(found) if not is_stage else found[-1]
        self.moved(x)

    def moved(self, x: Known) -> Known:
        """A value in another layout."""
        layout = self.layout(x.handle.ndim, x.handle.dtype) or Layout(self.here[0], {})
        handle = self.fd.ops.set(x.handle)
        if self.kind == "streams" and x.handle.ndim and self.draw.random() < 0.6:
            dim = self.draw.randrange(x.handle.ndim)
            chunks = self.draw.choice((2, 2, 3, 4))
            axis = self.draw.choice((None, None, *layout.mesh.axes))
            stream = Stream(dim, chunks, axis)
            handle.on(layout.mesh, layout.by_axis(), layout.order, stream)
        else:
            handle.on(layout)
        known = Known(handle, x.whole.clone(), x.is_rough, x.error)  # type: ignore[union-attr]
        if x.handle.id in self.kinked:
            self.kinked.add(known.handle.id)
        self.known.append(known)
        return known

    # -- gradients and what follows from them ------------------------------------------------------

    def gradients(self) -> None:
        """The gradients of some values of a sum."""
        draw = self.draw
        smooth = [k for k in self.readable() if k.handle.dtype.is_floating_point]
        smooth = [k for k in smooth if k.handle.id not in self.kinked]
        inputs = [k for k in smooth if k.handle.id in self.layouts]
        made = [k for k in smooth if k.whole is not None and k.whole.grad_fn is not None]
        if not made or not inputs:
            return
        y = made[-1] if draw.random() < 0.7 else draw.choice(made)
        wrt = draw.sample(inputs, min(len(inputs), draw.randint(1, 3)))
        if draw.random() < 0.2:
            wrt.append(draw.choice(made))
        reduce = draw.choice((lambda x: x.sum(), lambda x: x.mean(), lambda x: (x * x).sum()))
        if self.kind == "pipeline":
            reduce = draw.choice((lambda x: x.mean(), lambda x: (x * x).sum()))
        assert y.whole is not None
        loss, total = reduce(y.handle), reduce(y.whole)
        found = mf.grad(loss, [k.handle for k in wrt])
        wholes = torch.autograd.grad(
            total, [k.whole for k in wrt], retain_graph=True, allow_unused=True
        )
        self.keep_parts("loss", [y], [loss], [total], True)
        for k, handle, whole in zip(wrt, found, wholes, strict=True):
            assert k.whole is not None
            slope = torch.zeros_like(k.whole) if whole is None else whole
            known = Known(handle, slope.detach(), True, max(k.error, y.error))
            self.known.append(known)
            self.kinked.add(known.handle.id)
            if k in inputs and whole is not None:  # what leads nowhere has no step
                self.slopes.append((k, known))

    def optimizer(self) -> None:
        """A step of an optimizer, written where parameter and state are."""
        draw, (w, dw) = self.draw, self.draw.choice(self.slopes)
        assert w.whole is not None and dw.whole is not None
        if draw.random() < 0.5:
            v = self.like(w)
            news = mf.optim.sgd(w.handle, dw.handle, v.handle, lr=0.1, momentum=0.9)
            velocity = 0.9 * v.whole + dw.whole
            pairs = ((w, news[0], w.whole - 0.1 * velocity), (v, news[1], velocity))
        else:
            m, v = self.like(w), self.like(w, least=0.5)
            step = self.input([], w.handle.dtype, torch.tensor(3.0, dtype=w.handle.dtype))
            news = mf.optim.adamw(w.handle, dw.handle, m.handle, v.handle, step.handle, lr=0.1)
            # in 64 bits: the square of a gradient may be too large for 16
            x, slope, mean, square = (k.whole.double() for k in (w, dw, m, v))
            mean = 0.9 * mean + 0.1 * slope
            square = 0.999 * square + 0.001 * slope**2
            root = (square / (1 - 0.999**3)).sqrt() + 1e-8
            moved = x * (1 - 0.1 * 0.01) - 0.1 * (mean / (1 - 0.9**3)) / root
            pairs = ((w, news[0], moved), (m, news[1], mean), (v, news[2], square))
        for old, handle, whole in pairs:
            exact = whole.detach().to(w.handle.dtype)
            known = Known(handle, exact, True, max(w.error, dw.error))
            self.known.append(known)
            self.kinked.add(known.handle.id)
            if draw.random() < 0.7:
                self.output(known, reuse=old)

    def like(self, w: Known, least: float | None = None) -> Known:
        """A new input that lies like another one."""
        assert w.whole is not None
        whole = self.values(list(w.whole.shape), w.handle.dtype).detach()
        if least is not None:
            whole = whole.abs() + least
        known = self.add(whole, list(w.whole.shape), self.layouts[w.handle.id])
        return known

    # -- outputs -----------------------------------------------------------------------------------

    def output(self, known: Known, reuse: Known | None = None, order: Any = None) -> None:
        """Make a value an output, unless the definition refuses it."""
        if order is not None or known.handle.stride_order_requirement is not None:
            reuse = None  # a run refuses an input that does not lie in that order
        place = None if reuse is None else self.fd.inputs.index(reuse.handle.id)
        try:
            into = None if reuse is None else reuse.handle
            self.fd.add_output(known.handle, stride_order=order, reuse=into)
        except MdfuseError:
            return
        self.outputs.append(Output(known, place))

    def drawn_output(self) -> None:
        draw = self.draw
        if not self.known:
            return
        known = draw.choice(self.known[-6:] if draw.random() < 0.8 else self.known)
        if known.whole is None or not known.handle.is_tensor:
            return
        if self.outputs and draw.random() < 0.1:
            known = draw.choice(self.outputs).known  # once more, as a value of its own
            handle = self.fd.ops.set(known.handle)
            known = Known(handle, known.whole, known.is_rough, known.error)
        order = None
        if draw.random() < 0.1:
            order = draw.sample(range(known.handle.ndim), known.handle.ndim)
        reuse = None
        if draw.random() < 0.1:
            alike = [k for k in self.known if k.handle.id in self.fd.inputs
                     and k.handle.dtype == known.handle.dtype and k.handle.ndim == known.handle.ndim
                     and k is not known]  # fmt: skip
            reuse = draw.choice(alike) if alike else None
        self.output(known, reuse, order)

    # -- the whole ---------------------------------------------------------------------------------

    def define(self) -> Whole:
        """Draw the definition."""
        with self.fd:
            if self.kind == "pipeline":
                self.define_stages()
            else:
                self.define_plain()
            for n in range(4):
                if self.piece(f"output {n}") and (not n or self.draw.random() < 0.5):
                    try_(self.drawn_output)
        return self

    def define_plain(self) -> None:
        for n in range(2):
            if self.piece(f"input {n}"):
                try_(self.first_input)
        for n in range(self.length):
            if self.piece(f"step {n}"):
                try_(self.any_step)
            if len(self.meshes) > 1 and n == self.length // 2 and self.known:
                self.go_to(self.meshes[1], f"go {n}")
        self.follow()

    def first_input(self) -> None:
        shape = [
            self.draw.choice(EXTENTS) for _ in range(self.draw.choice((0, 1, 2, 2, 2, 3, 3, 4)))
        ]
        if self.known and self.draw.random() < 0.5 and self.known[0].whole is not None:
            shape = list(self.known[0].whole.shape)
        if math.prod(shape) > MOST:
            shape = shape[:2]
        if self.kind == "symbolic" and shape:
            shape[0] = self.rows
        self.input(shape, self.dtype)

    def go_to(self, mesh: DeviceMesh, name: str) -> None:
        """Set the last value on another mesh, where the program goes on."""
        self.begin(name)
        self.here = [mesh]
        self.move(is_stage=True)
        self.known = self.known[-1:]

    def follow(self) -> None:
        if self.has_gradients and self.piece("gradients"):
            try_(self.gradients)
        for name, share in (("optimizer", 0.4), ("other optimizer", 0.3)):
            if self.slopes and self.piece(name) and self.draw.random() < share:
                try_(self.optimizer)
        if self.has_gradients and self.piece("after") and self.draw.random() < 0.3:
            try_(self.any_step)

    def define_stages(self) -> None:
        self.begin("input 0")
        self.count = self.draw.choice((1, 2, 2, 3, 4))
        shape = [
            self.rows,
            *(self.draw.choice((1, 2, 3, 4)) for _ in range(self.draw.choice((1, 1, 2)))),
        ]
        self.batch.append(len(self.inputs))
        last = self.input(shape, self.dtype)
        for stage, mesh in enumerate(self.meshes):
            if stage:
                self.go_to(mesh, f"go {stage}")
            self.begin(f"stage {stage}")
            for n in range(self.draw.randint(1, 3)):
                if self.piece(f"stage {stage} step {n}"):
                    kept, self.known = self.known, [last] if stage == n == 0 else self.known[-1:]
                    try_(self.family)
                    self.known = [*kept, *(k for k in self.known if k not in kept)]
        self.follow()
        self.begin("schedule")
        for _, slope in self.slopes[:2]:
            self.output(slope)
        self.schedule = self.draw.choice(SCHEDULES if self.slopes else (None, "forward"))


def torch_makes(function: Callable[..., Any], operands: list[Tensor | None]) -> list[Tensor] | None:
    """What torch's own functions make; None where they refuse."""
    try:
        made = function(*(x.clone() if x is not None else None for x in operands))
    except Exception:
        return None
    parts = list(made) if isinstance(made, tuple | list) else [made]
    return parts if all(type(x) is Tensor for x in parts) else None
