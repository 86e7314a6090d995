"""Programs of many small instructions, and the best that a careful person writes for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from _ranks import Ranks
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

import mdfuse as mf
from mdfuse import Layout, Partial, Shard

#: Rows of each rank, and columns per rank: small, so that time is the host's.
_ROWS, _COLUMNS = 4, 8


@dataclass(frozen=True, kw_only=True)
class Case:
    """A program, the same written out by hand, and what both must give.

    Attributes:
        name: what it is.
        sizes: shapes.
        instructions: how many calls do the work.
        definition: the program.
        inputs: this rank's.
        hand: the same calls written out in a loop.
        want: this rank's part of the result, float64.
    """

    name: str
    sizes: str
    instructions: int
    definition: mf.FusionDefinition
    inputs: list[Tensor]
    hand: Callable[..., Tensor]
    want: Tensor


def communicating(ranks: Ranks, steps: int) -> Case:
    """Steps of all-gather, matmul, reduce-scatter: y = x w, where rows of x and of w are split."""
    size, mesh, rows = ranks.comm.size, ranks.mesh, {"tp": Shard(0)}
    width = _COLUMNS * size
    with mf.FusionDefinition(f"chain{steps}") as fd:
        x = fd.define_tensor([_ROWS * size, width], torch.float32, mesh, rows)
        w = fd.define_tensor([width, width], torch.float32, mesh, rows)
        y = x
        for _ in range(steps):
            product = fd.ops.set(y).on(mesh, {}) @ w
            product.on(mesh, {"tp": Partial("sum")})
            y = fd.ops.set(product).on(mesh, rows)
        fd.add_output(y)
    whole, weight = _random(_ROWS * size, width), _random(width, width) / width**0.5
    want = whole.double()
    for _ in range(steps):
        want = want @ weight.double()
    layout = Layout(mesh, rows)
    return Case(
        name=f"{steps} x (all-gather, matmul, reduce-scatter)",
        sizes=f"{3 * steps} instructions, f32 [{_ROWS}, {width}] per rank",
        instructions=3 * steps,
        definition=fd,
        inputs=[ranks.local(whole, layout), ranks.local(weight, layout)],
        hand=HandChain(ranks, steps, width),
        want=mf.shard_tensor(want, mesh, rows, rank=ranks.comm.rank),
    )


def local(ranks: Ranks, steps: int) -> Case:
    """Steps of matmul, add, tanh, without any communication."""
    height, width = 32, 64
    with mf.FusionDefinition(f"local{steps}") as fd:
        x = fd.define_tensor([height, width], torch.float32, ranks.mesh, {})
        w = fd.define_tensor([width, width], torch.float32, ranks.mesh, {})
        b = fd.define_tensor([width], torch.float32, ranks.mesh, {})
        y = x
        for _ in range(steps):
            y = fd.ops.tanh(y @ w + b)
        fd.add_output(y)
    inputs = [_random(height, width), _random(width, width) / width**0.5, _random(width)]
    want, weight, bias = (t.double() for t in inputs)
    for _ in range(steps):
        want = torch.tanh(want @ weight + bias)
    return Case(
        name=f"{steps} x (matmul, add, tanh)",
        sizes=f"{3 * steps} instructions, f32 [{height}, {width}]",
        instructions=3 * steps,
        definition=fd,
        inputs=[t.to(ranks.device) for t in inputs],
        hand=HandLocal(ranks, steps, height, width),
        want=want,
    )


class HandChain:
    """`communicating` by hand: the library's methods, prebuilt options, buffers made once.

    Args:
        ranks: whose process group is used.
        steps: of all-gather, matmul, reduce-scatter.
        width: columns of x.
    """

    def __init__(self, ranks: Ranks, steps: int, width: int) -> None:
        size, rank = ranks.comm.size, ranks.comm.rank
        self.steps, self.is_flat = steps, ranks.has_flat_posts
        self.gather: Any = ranks.group._allgather_base
        self.scatter: Any = ranks.group._reduce_scatter_base
        self.gather_options, self.scatter_options = (
            _options(AllgatherOptions),
            _options(dist.ReduceScatterOptions),
        )
        gathered = torch.empty(_ROWS * size, width, device=ranks.device)
        self.product = torch.empty_like(gathered)
        self.own_columns = gathered.narrow(1, rank * _COLUMNS, _COLUMNS)
        self.gathered, self.partial = self._posted(gathered), self._posted(self.product)
        self.rows = self._posted(torch.empty(_ROWS, width, device=ranks.device))

    def __call__(self, x: Tensor, w: Tensor) -> Tensor:
        """This rank's rows of the result, in a new tensor."""
        y = torch.empty_like(x)
        source, last = self._posted(x), self._posted(y)
        for step in range(self.steps):
            work = self.gather(self.gathered, source, self.gather_options)
            if work is not None:  # None: NCCL's order on the current stream is all there is
                work.wait()
            torch.mm(self.own_columns, w, out=self.product)
            source = self.rows if step < self.steps - 1 else last
            work = self.scatter(source, self.partial, self.scatter_options)
            if work is not None:
                work.wait()
        return y

    def _posted(self, tensor: Tensor) -> Tensor:
        return tensor.view(-1) if self.is_flat else tensor


class HandLocal:
    """`local` by hand: two buffers that take turns."""

    def __init__(self, ranks: Ranks, steps: int, height: int, width: int) -> None:
        self.steps = steps
        self.product = torch.empty(height, width, device=ranks.device)
        self.shifted = torch.empty_like(self.product)
        self.hidden = torch.empty_like(self.product)

    def __call__(self, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        y = torch.empty_like(x)
        for step in range(self.steps):
            torch.mm(x, w, out=self.product)
            torch.add(self.product, b, out=self.shifted)
            x = self.hidden if step < self.steps - 1 else y
            torch.tanh(self.shifted, out=x)
        return y


def _options(make: Callable[[], Any]) -> Any:
    """On the caller's own stream, where the library has one: no event is recorded."""
    options = make()
    if hasattr(options, "asyncOp"):
        options.asyncOp = False
    return options


def _random(*shape: int) -> Tensor:
    """The same on all ranks."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
