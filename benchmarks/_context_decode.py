"""A token that attends to a long cache: its positions split over ranks, beside all on one device.

| row | what a step is |
|---|---|
| attention | a query of each head, of which all positions are seen |
| layer | a layer of a decode: it writes a position, and sees those up to it; weights are whole |
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from _measure import Contender, Row, device_time, host_time, interleave
from _ranks import Ranks
from _serving_models import CachingBlock
from _whole_nets import Size
from torch import Tensor, nn

import mdfuse as mf
from mdfuse import Shard

#: Ranks -> the largest share of one device's time.
_LIMITS = {2: 0.55}

_OURS, _ALONE, _TORCH = "mdfuse", "one device, mdfuse", "one device, torch"


class Attention(nn.Module):
    """A query of each head, over all positions of a cache."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        shape = size.rows, size.kv_heads, size.tokens, size.head
        for name in ("kc", "vc"):
            self.register_buffer(name, torch.zeros(shape))

    def forward(self, q: Tensor) -> Tensor:
        """Return the averages of values, [rows, heads, 1, head], as q."""
        return F.scaled_dot_product_attention(q, self.kc, self.vc, enable_gqa=True)


class Layer(CachingBlock):
    """A layer with caches of `size.tokens` positions."""

    def forward(self, x: Tensor, at: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Compute a token, [rows, 1, hidden], at a position, [1], with its angles, [1, head]."""
        seen = torch.arange(self.kc.shape[2], device=x.device) <= at
        return self.token(x, at, cos, sin, seen[None, None, None])


#: Computes a token of each row.
Step = Callable[..., Tensor]


@dataclass(frozen=True, kw_only=True)
class Decode:
    """A cache, and who attends to it.

    Attributes:
        ranks: those that split its positions.
        size: of the layer; `tokens` are the positions of the cache, `rows` the requests.
        dtype: of values and weights.
        compiler: the backend of torch.compile on CPUs.
        world: told beside the rows, filled while measuring.
    """

    ranks: Ranks
    size: Size
    dtype: torch.dtype
    compiler: str
    world: dict[str, Any]

    @property
    def is_gpu(self) -> bool:
        return self.ranks.device.type == "cuda"

    def module(self, kind: type[Attention | Layer]) -> nn.Module:
        """Return the module on the device, with numbers that are alike on all ranks."""
        generator: Any = torch.Generator(self.ranks.device).manual_seed(0)
        with self.ranks.device:
            net = kind(self.size).to(self.dtype)
        with torch.no_grad():
            for x in net.buffers():
                x.normal_(generator=generator)
            for x in net.parameters():
                if x.ndim > 1:
                    x.normal_(0, x.shape[1] ** -0.5, generator=generator)
        return net.requires_grad_(False)

    def given(self, kind: type[Attention | Layer], back: int) -> list[Tensor]:
        """Return the inputs of a token, so many positions before the last one."""
        size, device = self.size, self.ranks.device
        generator: Any = torch.Generator(device).manual_seed(1 + back)
        shape = (size.heads, 1, size.head) if kind is Attention else (1, size.hidden)
        x = torch.empty(size.rows, *shape, device=device).normal_(generator=generator)
        if kind is Attention:
            return [x.to(self.dtype)]
        at = torch.tensor([size.tokens - 1 - back], device=device)
        turns = at.double() * 500000.0 ** -(
            torch.arange(size.head, device=device).remainder(size.head // 2) * 2 / size.head
        )
        angles = [turns.cos(), turns.sin()]
        return [x.to(self.dtype), at, *(a.unsqueeze(0).to(self.dtype) for a in angles)]


# -- contenders ------------------------------------------------------------------------------------


def _ours(case: Decode, kind: type[Attention | Layer], is_split: bool) -> Step:
    """Import the module; without a split each rank computes all of it."""
    comm = case.ranks.comm
    split = {"cp": Shard(2)} if is_split else {}
    module, given = case.module(kind), case.given(kind, 0)
    model = mf.from_torch(
        module, tuple(given), mesh=mf.DeviceMesh.arange(cp=comm.size),
        layouts={"kc": split, "vc": split},
    )  # fmt: skip
    program = model.compile()
    parts = model.load(rank=comm.rank, device=case.ranks.device)
    loaded = dict(zip(model.fusion.inputs, parts, strict=False))
    if is_split:
        case.world["bytes"][kind.__name__] = program.bytes_received(comm.rank)
    written = {*model.fusion.reuse.values()}
    if not written:
        return lambda *given: program.run(*loaded.values(), *given)[0]
    step = mf.Step(program, {n: x for n, x in loaded.items() if n in written})
    return partial(step, *(x for n, x in loaded.items() if n not in written))


def _torch(case: Decode, kind: type[Attention | Layer]) -> Step:
    """Return the module as torch has it: a kernel of attention, or a compiled layer."""
    module = case.module(kind)
    if kind is Attention:
        return module
    how: dict[str, Any] = {"mode": "reduce-overhead"} if case.is_gpu else {"backend": case.compiler}
    return torch.compile(module, **how)


def _makes(case: Decode, kind: type[Attention | Layer]) -> dict[str, Callable[[], Step]]:
    return {
        _OURS: partial(_ours, case, kind, is_split=True),
        _ALONE: partial(_ours, case, kind, is_split=False),
        _TORCH: partial(_torch, case, kind),
    }


# -- values ----------------------------------------------------------------------------------------


def check(case: Decode, few: int, tolerance: float) -> dict[str, float]:
    """Return the largest relative error of each contender: two tokens, of which one sees the other.

    Args:
        case: whose values are compared with f64.
        few: positions of each rank.
        tolerance: of errors.

    Raises:
        AssertionError: an error is larger.
    """
    case = replace(case, size=replace(case.size, tokens=few * case.ranks.comm.size), world={})
    case.world["bytes"], errors = {}, dict[str, float]()
    for kind in (Attention, Layer):
        tokens = [case.given(kind, back) for back in (1, 0)]
        right = copy.deepcopy(case.module(kind)).double()
        want = [right(*_wide(x)) for x in tokens]
        for name, make in _makes(case, kind).items():
            step = make()
            pairs = zip([step(*x).double() for x in tokens], want, strict=True)
            norm, label = torch.linalg.vector_norm, f"{kind.__name__}: {name}"
            errors[label] = max(float(norm(a - b) / norm(b)) for a, b in pairs)
            if not errors[label] < tolerance:
                raise AssertionError(f"{label}: a relative error of {errors[label]:.2g}")
    return errors


def _wide(given: Sequence[Tensor]) -> list[Tensor]:
    return [x.double() if x.is_floating_point() else x for x in given]


# -- measuring -------------------------------------------------------------------------------------


def rows(case: Decode, rounds: int) -> Iterator[Row]:
    """Measure attention, then a layer, all contenders in turns."""
    case.world["bytes"] = {}
    for kind in (Attention, Layer):
        given = case.given(kind, 0)
        calls = {name: partial(make(), *given) for name, make in _makes(case, kind).items()}
        times = interleave(
            {name: Contender(call=call) for name, call in calls.items()},
            rounds=rounds,
            batch=20 if case.is_gpu else 2,
            settle=case.ranks.settle,
            stopwatch=device_time if case.is_gpu else host_time,
        )
        calls.clear()
        mf.debug.FusionCache.reset()
        gc.collect()
        size, count = case.size, case.ranks.comm.size
        limit = _LIMITS.get(count) if kind is Attention and case.is_gpu else None
        for peer in (_ALONE, _TORCH):
            yield Row(
                name=f"decode, {kind.__name__.lower()}", unit="us", ours=times[_OURS],
                sizes=f"{size.rows} x {size.tokens} positions, {size.hidden} wide",
                against=times[peer], alternative=peer, limit=limit,
            )  # fmt: skip
