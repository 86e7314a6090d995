"""Drawn definitions: any operation with any arguments, on any mesh; beside torch on one device.

What is refused is refused by an error of mdfuse. What compiles is run on the simulator, where the
extents are small and known, and gives what torch's own function gives for the same arguments.
"""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, FusionDefinition, Layout, MdfuseError, Partial, Replicate, Shard
from mdfuse.extents.extent import is_symbolic
from mdfuse.frontend import ops as frontend
from mdfuse.frontend.handle import Handle

NAMES = sorted(frontend.BY_NAME)
DTYPES = (*(torch.float64,) * 6, torch.float32, torch.float32, torch.int64, torch.int32,
          torch.bool, torch.uint8, torch.bfloat16, torch.float16, torch.complex128,
          torch.complex64, torch.int8)  # fmt: skip
MESHES = (
    DeviceMesh([0]), DeviceMesh.arange(tp=2), DeviceMesh.arange(tp=3), DeviceMesh([3, 1]),
    DeviceMesh.arange(dp=2, tp=2), DeviceMesh([[4, 0, 2], [1, 3, 5]], axes=("a", "b")),
)  # fmt: skip

#: Errors of torch that depend on values.
BY_VALUES = ("ZeroDivisionError", "index out of range in self", "is out of bounds for dimension")

#: Elements of a value that is no longer compared.
LARGE = 10**6

#: Arguments that nobody would write. None of them is kept by what it is passed to.
STRANGE: tuple[Callable[[], Any], ...] = (
    lambda: None, lambda: True, lambda: False, lambda: 1.5, lambda: -1, lambda: 10**20,
    lambda: -(2**63), lambda: 2**63, lambda: 10**5000, lambda: "x", lambda: "", lambda: b"x",
    list, lambda: (), dict, lambda: [[1]], lambda: [1, 2], lambda: (0, 0),
    lambda: float("nan"), lambda: float("inf"), lambda: 1 + 2j, lambda: object(), lambda: print,
    lambda: slice(None), lambda: ..., lambda: np.int64(1), lambda: np.float32(0.5),
    lambda: np.bool_(True), lambda: np.ones(2), lambda: np.array(1), lambda: torch.ones(2),
    lambda: torch.tensor(1), lambda: torch.ones(2).to_sparse(), lambda: torch.float32,
    lambda: torch.complex64, lambda: torch.Size([1, 2]), lambda: DeviceMesh([0]),
    lambda: Shard(0), lambda: {"tp": Shard(0)}, lambda: range(2), lambda: iter([0]),
    lambda: type("Number", (), {"__index__": lambda self: 1})(), lambda: -0.0, lambda: {1},
    lambda: 2**40, lambda: [0, 1.0], lambda: [None], lambda: -7,
)  # fmt: skip


def clamped(x: Tensor, min: Any = None, max: Any = None) -> Tensor:
    """torch's own with limits that are tensors: torch 2.11 forgets a number that is NaN."""
    ends = [torch.tensor(x) if isinstance(x, int | float) else x for x in (min, max)]
    has_nan = any(isinstance(x, float) and math.isnan(x) for x in (min, max))
    return torch.clamp(x, *(ends if has_nan else (min, max)))


#: Operations without an equal of the same name in torch, and those that some torch gets wrong.
OWN: dict[str, Callable[..., Any]] = {
    "set": lambda x: x,
    "clamp": clamped,
    "clip": clamped,
    "cast": lambda x, dtype: x.to(dtype),
    "slice": lambda x, a, b, s=None: x[tuple(map(slice, a, b, s or [1] * x.ndim))],
    "stride_order": lambda x, order: x,
    "embedding": lambda indices, weight: F.embedding(indices, weight),
    "mod": torch.remainder,
    "adaptive_max_pool1d": F.adaptive_max_pool1d,  # torch's own gives the places, too
    "softmin": lambda x, dim=-1, dtype=None: F.softmin(x, dim, dtype=dtype),  # torch guesses a dim
}
#: Numbers that are drawn here, and other meanings of a name.
NOT_COMPARED = {
    "uniform", "dropout", "broadcast", "broadcast_in_dim", "empty", "empty_like", "new_empty",
    "empty_strided",
}  # fmt: skip

#: What makes no rounding error of multiples of 1/4 that are not large.
EXACT = {
    "abs", "absolute", "add", "sub", "subtract", "rsub", "mul", "multiply", "neg", "negative",
    "maximum", "minimum", "amax", "amin", "max", "min", "clamp", "clip", "clamp_min", "clamp_max",
    "where", "masked_fill", "sum", "relu", "set", "clone", "detach", "cat", "concat",
    "concatenate", "stack", "permute", "transpose", "t", "movedim", "moveaxis", "swapaxes",
    "swapdims", "reshape", "view", "view_as", "reshape_as", "flatten", "ravel", "unflatten",
    "unsqueeze", "squeeze", "expand", "expand_as", "broadcast_to", "repeat", "repeat_interleave",
    "contiguous", "stride_order", "slice", "select", "narrow", "split", "chunk", "unbind", "full",
    "zeros", "ones", "arange", "tensor", "full_like", "zeros_like", "ones_like", "new_full",
    "new_zeros", "new_ones",
}  # fmt: skip
#: What is continuous: of operands with rounding errors their results may be compared.
SMOOTH = (EXACT - {"max", "min"}) | {
    "mean", "exp", "sin", "cos", "tanh", "sigmoid", "matmul", "mm", "mv", "bmm", "dot", "outer",
    "linear", "addmm", "addmv", "baddbmm", "softmax", "log_softmax", "softmin", "gelu", "silu",
    "mse_loss", "l1_loss", "square", "erf", "erfc", "atan", "asinh", "addcmul", "lerp",
    "hardtanh", "leaky_relu", "elu", "softsign", "softplus", "logsigmoid",
}  # fmt: skip


@dataclass(eq=False)
class Known:
    """A value of the definition, what torch has for it, and whether it has rounding errors.

    `whole` is None where torch's result says nothing.
    """

    handle: Handle
    whole: Tensor | None
    is_rough: bool = False
    #: the relative error that it may have, from its own dtype and those of its operands
    error: float = 0.0


#: dtype -> the relative error that results of several operations may have.
ERRORS = {
    torch.float64: 1e-7, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 0.3,
    torch.complex128: 1e-7, torch.complex64: 1e-3,
}  # fmt: skip


def is_of_example(used: list[Known], parts: list[Any], wholes: list[Tensor]) -> bool:
    """Whether results are of another form than torch's, as extents of a run decide it.

    The definition has what follows from the example; for one row, `squeeze` and what is behind it
    are lowered again, or refused.
    """
    is_other = [p.ndim for p in parts] != [x.ndim for x in wholes]
    return is_other and any(is_symbolic(k.handle.shape) for k in used)


class Drawn:
    """One definition under construction."""

    #: how many of the results are placed
    laws = 0.2

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.fd = FusionDefinition(draw.choice(("f", "a.b", "long_name", "fusion")))
        self.known: list[Known] = []
        self.inputs: list[Tensor] = []
        self.is_small = True
        self.meshes = draw.choices(MESHES, k=draw.choice((1, 1, 2)))

    # -- inputs ----------------------------------------------------------------------------------

    def tensor(self) -> None:
        draw = self.draw
        rank = draw.choice((0, 1, 2, 2, 2, 3))
        shape = [draw.choice((0, 1, 2, 3, 4, 4, 5)) for _ in range(rank)]
        if self.known and draw.random() < 0.5:
            shape = list(draw.choice(self.known).handle.shape)
        if not all(type(n) is int and 0 <= n < 100 for n in shape) or math.prod(shape) > 10**4:
            shape = [2, 3]
        whole = self.values(shape, draw.choice(DTYPES))
        said: list[Any] = list(shape)
        if draw.random() < 0.06 and said:
            at = draw.randrange(len(said))
            said[at] = draw.choice(
                (-1, -1, 2**40, 10**9, *(() if draw.random() < 0.7 else (2**62,)))
            )
            self.is_small = False
        self.add(whole, said, self.layout(len(said), whole.dtype, is_input=True))

    def add(self, whole: Tensor, said: list[Any], layout: Layout | None) -> Known:
        """Define an input: its value, its extents as the definition says them, and its layout."""
        draw = self.draw
        order = draw.sample(range(len(said)), len(said)) if draw.random() < 0.1 else None
        name = draw.choice(("x", "y", "w_1", "µ", "x", None, None, None))
        handle = self.fd.define_tensor(said, whole.dtype, layout, stride_order=order, name=name)
        error = ERRORS.get(whole.dtype, 0.0)
        self.known.append(Known(handle, whole if self.is_small else None, error=error))
        self.inputs.append(whole)
        return self.known[-1]

    def values(self, shape: list[int], dtype: torch.dtype) -> Tensor:
        generator = torch.Generator().manual_seed(self.draw.randrange(10**6))
        x = torch.randint(-8, 9, shape, generator=generator)
        if dtype == torch.bool:
            return x > 0
        if dtype.is_complex:
            return torch.complex(x / 4, x.flip([*range(x.ndim)]) / 2).to(dtype)
        if dtype.is_floating_point:
            return x.to(dtype) / 4
        return x.to(dtype) if dtype.is_signed and self.draw.random() < 0.3 else x.abs().to(dtype)

    def layout(self, rank: int, dtype: torch.dtype, is_input: bool = False) -> Layout | None:
        draw = self.draw
        if draw.random() < 0.25:
            return None
        mesh = draw.choice(self.meshes)
        kinds: list[Any] = [Replicate(), *(Shard(d) for d in range(rank))]
        if draw.random() < 0.02:
            kinds += [Shard(rank), Partial("max"), Partial("sum")]
        return Layout(mesh, {axis: draw.choice(kinds) for axis in mesh.axes})

    # -- operations ------------------------------------------------------------------------------

    def step(self) -> None:
        """One operation, by its name or as a method."""
        draw = self.draw
        name = draw.choice(NAMES)
        function = frontend.BY_NAME[name]
        given = self.arguments(name, function)
        handles = [self.mapped(x, lambda k: k.handle) for x in given.values()]
        positional = (
            draw.randrange(1, prefix(function, given) + 1) if prefix(function, given) else 0
        )
        keys = list(given)[positional:]
        args, kwargs = handles[:positional], dict(zip(keys, handles[positional:], strict=True))
        try:
            if (
                args
                and isinstance(args[0], Handle)
                and hasattr(Handle, name)
                and name != "where"  # whose condition is the method's first argument
                and draw.random() < 0.5
            ):
                result = getattr(args[0], name)(*args[1:], **kwargs)
            else:
                result = function(*args, **kwargs)
        except MdfuseError:
            return
        self.keep(name, given, result)

    def keep(self, name: str, given: dict[str, Any], result: Any) -> None:
        parts = list(result) if isinstance(result, tuple) else [result]
        used = [k for x in given.values() for k in (x if isinstance(x, list) else [x])
                if isinstance(k, Known)]  # fmt: skip
        is_known = all(k.whole is not None for k in used) and name not in NOT_COMPARED
        is_rough = any(k.is_rough for k in used)
        is_known = is_known and all(
            part.is_tensor and math.prod(part.shape) <= LARGE for part in parts
        )
        wholes = plain(name, given) if is_known and (not is_rough or name in SMOOTH) else None
        if wholes is not None and is_of_example(used, parts, wholes):
            return
        if wholes is not None and len(wholes) != len(parts):
            raise AssertionError(f"{name}: {len(parts)} results, torch has {len(wholes)}")
        self.keep_parts(name, used, parts, wholes, is_rough or name not in EXACT)

    def keep_parts(
        self,
        name: str,
        used: list[Known],
        parts: list[Any],
        wholes: list[Tensor] | None,
        is_rough: bool,
    ) -> None:
        """Keep the results of an operation, of which torch has `wholes`, and place some of them."""
        for part, whole in zip(parts, wholes or [None] * len(parts), strict=True):
            assert isinstance(part, Handle), part
            known = Known(part, whole, is_rough)
            known.error = max([ERRORS.get(part.dtype, 0.0), *(k.error for k in used)])
            if whole is not None:
                assert part.ndim == whole.ndim, (name, used, part.shape)
                numbers = [n if type(n) is int else m
                           for n, m in zip(part.shape, whole.shape, strict=True)]  # fmt: skip
                assert numbers == [*whole.shape], (name, used, part.shape)
                assert part.dtype == whole.dtype, (name, used, part.dtype, whole.dtype)
                known.is_rough |= bool((whole.to(wide(whole)).abs() > 1e6).any())
            if self.draw.random() < self.laws:
                layout = self.layout(part.ndim, part.dtype)
                if layout is not None and part.is_tensor:
                    try_(lambda part=part, layout=layout: part.on(layout))
            self.known.append(known)

    def mapped(self, x: Any, take: Callable[[Known], Any]) -> Any:
        if isinstance(x, Known):
            return take(x)
        return [self.mapped(y, take) for y in x] if isinstance(x, list) else x

    def arguments(self, name: str, function: Callable[..., Any]) -> dict[str, Any]:
        """Arguments by parameter; `Known` for values."""
        draw, given = self.draw, {}
        first: Known | None = None
        for p in inspect.signature(function).parameters.values():
            is_left_out = p.default is not p.empty and draw.random() < 0.6
            if is_left_out or p.kind is p.VAR_POSITIONAL:
                if p.kind is p.POSITIONAL_OR_KEYWORD and len(given) and draw.random() < 0.7:
                    continue
                if p.kind is not p.POSITIONAL_OR_KEYWORD:
                    continue
            if p.name == "dims" and "dim" in given:
                continue
            x = self.argument(name, p.name, first)
            first = x if first is None and isinstance(x, Known) else first
            given[p.name] = x
        return given

    def argument(self, name: str, key: str, first: Known | None) -> Any:
        draw = self.draw
        if draw.random() < 0.06:
            return draw.choice(STRANGE)()
        shape = tuple(first.handle.shape) if first is not None else (4, 3)
        if key in ("tensors",):
            return [self.value() for _ in range(draw.choice((1, 2, 3)))]
        if key in ("dim", "dims", "dim0", "dim1", "start_dim", "end_dim", "source", "destination"):
            one = draw.randrange(-len(shape) - 1, len(shape) + 1)
            return [one, draw.randrange(len(shape) + 1)] if draw.random() < 0.15 else one
        if key in ("shape", "sizes", "normalized_shape", "repeats", "strides", "order",
                   "start_indices", "end_indices", "broadcast_dims", "split_size"):  # fmt: skip
            return self.extents(key, shape)
        if key in ("start", "length", "index", "chunks", "end") or key == "step":
            return draw.choice((0, 1, 1, 2, 3, 5, -1))
        if key in ("keepdim", "is_causal", "enable_gqa", "training", "unbiased"):
            return draw.random() < 0.5
        if key == "dtype":
            return draw.choice(DTYPES)
        if key in ("approximate", "reduction", "rounding_mode"):
            return draw.choice(("none", "tanh", "mean", "sum", "floor", "trunc"))
        if key in ("mesh",):
            return draw.choice(self.meshes)
        if key == "layout":
            return self.layout(draw.choice((1, 2)), torch.float32)
        if key == "data":
            return draw.choice((1, 2.5, [1, 2], [[True], [False]], [[1.5, 2], [3, 4]]))
        numbers = (0, 1, 2, -1, 0.5, 1.5, -0.25, True, 3)
        if key in ("x", "condition", "mask", "weight", "query", "key", "tensor") or (
            key not in ("alpha", "beta", "p", "eps", "seed", "scale", "correction", "fill_value")
            and draw.random() < 0.7
        ):
            return self.value(first)
        return draw.choice(numbers)

    def extents(self, key: str, shape: tuple[Any, ...]) -> Any:
        draw = self.draw
        way = draw.randrange(6)
        if key == "order":
            return draw.sample(range(len(shape)), len(shape))
        if way == 0:
            return [-1]
        if way == 1 and all(type(n) is int for n in shape):
            return [math.prod(shape)]
        if way == 2:
            return tuple(draw.sample(shape, len(shape)))
        if way == 3:
            return [draw.choice((0, 1, 2, 3)) for _ in range(len(shape) + draw.randrange(2))]
        if way == 4:
            return [draw.choice((2, 3)), *shape]
        return draw.choice((1, 2, 3)) if key not in ("shape",) else list(shape)

    def value(self, like: Known | None = None) -> Known:
        """A value; often one of the shape of another."""
        if like is not None and self.draw.random() < 0.5:
            same = [k for k in self.known if k.handle.ndim == like.handle.ndim]
            return self.draw.choice(same)
        return self.draw.choice(self.known)


def try_(act: Callable[[], Any]) -> None:
    """What is refused leaves no trace."""
    try:
        act()
    except MdfuseError:
        return


def plain(name: str, given: dict[str, Any]) -> list[Tensor] | None:
    """What torch's own function gives for the arguments; None where it refuses, or has none."""

    def taken(x: Any) -> Any:
        if isinstance(x, Known):
            return x.whole.clone() if x.whole is not None else None
        if isinstance(x, np.generic):
            return x.item()  # torch itself takes a bool of numpy for a float
        return [taken(y) for y in x] if isinstance(x, list) else x

    signature = inspect.signature(frontend.BY_NAME[name]).parameters
    # of losses torch has others besides, which take a reduction as a number, or none by default
    places = (F, torch, Tensor) if "reduction" in signature else (torch, F, Tensor)
    function = OWN.get(name) or next((getattr(p, name) for p in places if hasattr(p, name)), None)
    ends = [given[key] for key in ("min", "max") if given.get(key) is not None]
    if name in ("clamp", "clip") and len({isinstance(end, Known) for end in ends}) > 1:
        return None  # a tensor beside a number: torch reads it as a number of Python
    if function is None or any(key in given for key in ("dims", "mesh", "layout")):
        return None
    if name in ("sub", "subtract", "rsub") and given.get("alpha") == -(2**63):
        return None  # torch adds with its negative, which 64 bits do not have
    args = [taken(x) for key, x in given.items() if signature[key].kind.name != "KEYWORD_ONLY"]
    kwargs = {k: taken(x) for k, x in given.items() if signature[k].kind.name == "KEYWORD_ONLY"}
    said = [key for key in given if signature[key].kind.name != "KEYWORD_ONLY"]
    by_name = [n for n, key in enumerate(said) if key in ("dtype", "reduction", "approximate")]
    first = min(prefix(frontend.BY_NAME[name], given), *by_name, len(said))
    kwargs |= dict(zip(said[first:], args[first:], strict=True))
    args = args[:first]
    try:
        result = function(*args, **kwargs)
    except Exception:
        return None
    parts = list(result) if isinstance(result, tuple | list) else [result]
    if (
        name == "pow"
        and parts[0].dtype == torch.bool
        and all(isinstance(x, Known) for x in given.values())
    ):
        return None  # torch has no powers of bool by bool, but of no elements
    return parts if all(type(p) is Tensor for p in parts) else None


def prefix(function: Callable[..., Any], given: dict[str, Any]) -> int:
    """How many arguments may be passed by place: those before the first that is left out."""
    known = inspect.signature(function).parameters.values()
    names = [p.name for p in known if p.kind is p.POSITIONAL_OR_KEYWORD]
    return next((n for n, key in enumerate(names) if key not in given), len(names))


def fuzz(draw: random.Random) -> None:
    """Draw a definition, compile it, run it, compare."""
    made = Drawn(draw)
    with made.fd as fd:
        made.tensor()
        for _ in range(draw.randrange(1, 7)):
            if draw.random() < 0.25:
                try_(made.tensor)
            made.step()
        outputs = []
        for _ in range(draw.randrange(1, 4)):
            known = draw.choice(made.known[-6:])
            reuse = draw.choice(made.known).handle if draw.random() < 0.1 else None
            try:
                fd.add_output(known.handle, reuse=reuse)
            except MdfuseError:
                continue
            outputs.append(known)
    if not outputs:
        return
    program = mf.compile(fd)
    if draw.random() < 0.2:
        again = mf.hir.parse(str(program.host))
        assert again == program.host or "nan" in str(program.host)  # no NaN equals itself
    if not made.is_small or len(made.inputs) != len(fd.inputs):
        return
    if sum(math.prod(k.handle.shape) for k in made.known) > LARGE:
        return
    try:
        results = mf.simulate(program, made.inputs).outputs
    except (RuntimeError, IndexError) as error:
        # what only the values tell: integers divided by zero, rows that a table does not have
        if any(said in str(error) for said in BY_VALUES):
            return
        raise
    for known, result in zip(outputs, results, strict=True):
        if known.whole is not None:
            compare(known, result, lambda: f"{fd}\n{program}")


def wide(x: Tensor) -> torch.dtype:
    return torch.complex128 if x.is_complex() else torch.float64


def compare(known: Known, result: Tensor, text: Callable[[], str]) -> None:
    whole = known.whole
    assert whole is not None
    assert result.shape == whole.shape and result.dtype == whole.dtype, text()
    exact = whole.to(wide(whole))
    scale = float(exact[exact.isfinite()].abs().max()) if exact.isfinite().any() else 1.0
    error = known.error
    torch.testing.assert_close(
        result.to(wide(whole)), exact, rtol=error, atol=error * max(scale, 1.0), equal_nan=True,
        msg=lambda m: f"{m}\n{result}\nexpected\n{whole}\n{text()}",
    )  # fmt: skip
