"""A training step of a whole model: mdfuse, and its peers of plain torch."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from _positions import Attention, positions, ring, ring_attention
from _whole_nets import Block, Case, Llama, Size, Style, angles, empty, filled, loss_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import mdfuse as mf
from mdfuse import DeviceMesh, Shard

LR, DECAY, CLIP = 1e-4, 0.1, 1.0

#: Makes a step with ids and labels; returns the loss.
_Take = Callable[[Tensor, Tensor], Any]


@dataclass(kw_only=True)
class Running:
    """A contender that trains.

    Attributes:
        take: makes a step.
        batches: ids and labels, which follow each other in turns.
        stages: seconds of the parts of its start.
        program: mdfuse's.
        averages: the loss is of this rank's sequences alone.
    """

    take: _Take
    batches: Iterator[tuple[Tensor, Tensor]]
    stages: dict[str, float] = field(default_factory=dict)
    program: mf.Program | None = None
    averages: bool = False

    def __call__(self) -> Any:
        with torch.enable_grad():
            return self.take(*next(self.batches))

    def loss(self) -> float:
        """Make a step, and return the loss of all ranks."""
        x = self()
        x = (x[0] if isinstance(x, tuple) else x).detach().double().reshape(())
        if self.averages:
            dist.all_reduce(x)
            x = x / dist.get_world_size()
        return float(x)


def _running(case: Case, take: _Take, **others: Any) -> Running:
    return Running(take=take, batches=itertools.cycle(case.batches), **others)


# -- mdfuse ----------------------------------------------------------------------------------------

_HEADS = {
    "emb": "rowwise", "layers.*.[qkvgu]": "colwise", "layers.*.[od]": "rowwise", "head": "colwise",
}  # fmt: skip


def ours(case: Case, options: mf.Options) -> Running:
    """Import the module, define the step, compile it."""
    size, comm, stages = case.size, case.ranks.comm, dict[str, float]()
    mesh = DeviceMesh.arange(**case.axes)
    split = {next(iter(case.axes)): Shard(0)} if case.splits_batches else {}
    split = {"cp": Shard(1, zigzag=True)} if case.style == "cp" else split
    spread = next((axis for axis in ("fsdp", "cp") if axis in case.axes), None)
    how: dict[str, Any] = {"gather": spread} if spread else {}
    how |= {"recompute": "layers.*"} if case.recompute else {}
    with _timed(stages, "import"):
        module = empty(size).to(torch.bfloat16)
        layouts = {"input:*": split, "*": {spread: Shard(0)} if spread else {}}
        if "tp" in case.axes:
            heads = mf.from_plan(module, _HEADS, sequence=1)["layouts"]
            layouts = _both(layouts, heads)
        rows = case.whole_rows, size.tokens
        ids = mf.TensorSpec(rows, torch.int64)
        known = {name: x.to(torch.bfloat16) for name, x in angles(size).items()}
        model = mf.from_torch(module, (ids,), mesh=mesh, layouts=layouts, buffers=known, **how)
    with _timed(stages, "step"):
        step = model.training_step(
            lambda y, labels: mf.ops.cross_entropy(y.flatten(0, 1).float(), labels.flatten()),
            extra={"labels": mf.TensorSpec(rows, torch.int64, mesh, split or None)},
            optimizer=partial(mf.optim.adamw, weight_decay=DECAY, lr=LR),
            clip=CLIP,
            master=case.style != "tp",
        )
    with _timed(stages, "load"):
        weights = model.load(case.numbers, comm=comm)
    with _timed(stages, "compile"):
        run = step.start(weights, options)
    return _running(case, run, stages=stages, program=run.step.program)


def _both(shared: dict[str, Any], heads: dict[str, Any]) -> dict[str, Any]:
    """Return layouts along both axes: those of heads, beside those of all names of their kind."""
    both = dict(shared)
    for name, layout in heads.items():
        kind = "input:*" if name.startswith("activation:") else "*"
        both[name] = {**shared[kind], **layout}
    return both


@contextmanager
def _timed(stages: dict[str, float], name: str) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    stages[name] = time.perf_counter() - begin


# -- torch -----------------------------------------------------------------------------------------


def _fsdp2(case: Case, is_compiled: bool) -> Running:
    """`fully_shard` of each layer: f32 parts, gathered in bf16, gradients reduced in f32."""
    net = _net(case)
    for layer in net.layers if is_compiled else ():
        layer.compile(backend=case.compiler)
    return _running(case, _sharded(case, net, is_compiled), averages=True)


def _sharded(case: Case, net: Llama, is_compiled: bool) -> _Take:
    """Return a step of a model whose parameters are split; its layers may be compiled before."""
    mesh = init_device_mesh(case.ranks.device.type, (case.ranks.comm.size,))
    kind = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (*net.layers, net):
        fully_shard(part, mesh=mesh, mp_policy=kind)
    loss = _loss(case, is_compiled)
    return _stepping(net, lambda ids, labels: loss(net(ids), labels), _adamw(case, net))


def _split(case: Case) -> Case:
    """Return the case of ranks that split parameters only: the same sequences of all ranks."""
    return replace(case, style="fsdp", heads_split=1, batches=[])


class _Gathering(Block):
    """A layer that gathers the keys of all positions, in zigzag order, and masks later ones."""

    def averaged(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ranks, size = dist.get_world_size(), q.shape[2] * dist.get_world_size()
        each = [positions(size, ranks, rank, is_zigzag=True) for rank in range(ranks)]
        seen = each[dist.get_rank()].unsqueeze(-1) >= torch.cat(each)
        k, v = (_gathered(x, 2) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)


def _fsdp2_of_positions(case: Case, is_compiled: bool, way: Attention | None) -> Running:
    """FSDP2 where ranks have positions of each sequence, in zigzag order."""
    net, ranks = _net(case, Block if way else _Gathering), case.ranks.comm
    at = positions(case.size.tokens, ranks.size, ranks.rank, is_zigzag=True).to(net.cos.device)
    net.cos, net.sin = (x[at] for x in (net.cos, net.sin))
    device = case.ranks.device
    mesh = init_device_mesh(device.type, (ranks.size,))
    for layer in net.layers if way else ():  # torch.compile would not see what replaces attention
        layer.averaged = torch.compiler.disable(way)
    for layer in net.layers if is_compiled else ():  # a checkpoint would hide breaks of graphs
        layer.inside = torch.compile(layer.inside, backend=case.compiler)
    take = _sharded(case, net, is_compiled)

    def around(ids: Tensor, labels: Tensor) -> Any:
        with ring(mesh, device) if way else nullcontext():
            return take(ids, labels)

    return _running(case, around, averages=True)


def _ddp(case: Case, is_compiled: bool) -> Running:
    """`DistributedDataParallel` under autocast."""
    net: Any = DistributedDataParallel(_net(case), gradient_as_bucket_view=True)
    optimizer = _adamw(case, net)
    called = torch.compile(net, backend=case.compiler) if is_compiled else net
    return _running(case, _autocast(case, net, called, optimizer, is_compiled), averages=True)


def _alone(case: Case, is_compiled: bool) -> Running:
    """One rank under autocast."""
    net = _net(case)
    called = torch.compile(net, backend=case.compiler) if is_compiled else net
    return _running(case, _autocast(case, net, called, _adamw(case, net), is_compiled))


def _autocast(case: Case, net: nn.Module, called: Any, optimizer: Any, is_compiled: bool) -> _Take:
    loss, device = _loss(case, is_compiled), case.ranks.device.type

    def forward(ids: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            return loss(called(ids), labels)

    return _stepping(net, forward, optimizer)


def _masters(case: Case, is_compiled: bool) -> Running:
    """One rank: weights and gradients in bf16, masters in f32, cast after each update."""
    net = _net(case).to(torch.bfloat16)
    narrow, device = [*net.parameters()], case.ranks.device
    wide = [nn.Parameter(case.numbers[n].to(device, copy=True)) for n, _ in net.named_parameters()]
    optimizer = torch.optim.AdamW(wide, **_adamw_numbers(case))
    called = torch.compile(net, backend=case.compiler) if is_compiled else net
    loss = _loss(case, is_compiled)

    def take(ids: Tensor, labels: Tensor) -> Tensor:
        value = loss(called(ids), labels)
        value.backward()
        for w, master in zip(narrow, wide, strict=True):
            assert w.grad is not None
            master.grad, w.grad = w.grad.float(), None
        nn.utils.clip_grad_norm_(wide, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(narrow, wide)
        return value

    return _running(case, take)


def _net(case: Case, block: type[Block] = Block) -> Llama:
    device = case.ranks.device
    numbers = {name: x.to(device, copy=True) for name, x in case.numbers.items()}
    return filled(case.size, numbers, case.recompute, block)


def _loss(case: Case, is_compiled: bool) -> Callable[[Tensor, Tensor], Tensor]:
    return torch.compile(loss_of, backend=case.compiler) if is_compiled else loss_of


def _adamw(case: Case, net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), **_adamw_numbers(case))


def _adamw_numbers(case: Case) -> dict[str, Any]:
    return {"lr": LR, "weight_decay": DECAY, "fused": case.ranks.device.type == "cuda"}


def _stepping(net: nn.Module, forward: _Take, optimizer: torch.optim.Optimizer) -> _Take:
    parameters = [*net.parameters()]

    def take(ids: Tensor, labels: Tensor) -> Tensor:
        value: Tensor = forward(ids, labels)
        value.backward()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return value

    return take


# -- heads and units split by hand (arXiv:2205.05198) ----------------------------------------------


def _with_gradient(kind: str) -> Callable[..., Tensor]:
    """Return a collective of torch's; its name is another one since torch 2.12."""
    names = (f"{kind}_single_autograd", f"{kind}_tensor_autograd")
    call: Callable[..., Tensor] = next(
        getattr(functional, name) for name in names if hasattr(functional, name)
    )
    return call


_ALL_GATHER, _REDUCE_SCATTER = map(_with_gradient, ("all_gather", "reduce_scatter"))


def _gathered(x: Tensor, dim: int = 1) -> Tensor:
    return _ALL_GATHER(x, gather_dim=dim, group=dist.group.WORLD)


def _scattered(x: Tensor) -> Tensor:
    return _REDUCE_SCATTER(x, "sum", scatter_dim=1, group=dist.group.WORLD)


class _Sum(torch.autograd.Function):
    """Add up what the ranks have; the gradient is alike on all of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y: Tensor = functional.all_reduce(x, "sum", dist.group.WORLD)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class _Split(Block):
    """A layer for some heads and units of all tokens; between its matrices ranks have tokens."""

    def entered(self, x: Tensor) -> Tensor:
        return _gathered(x)

    def left(self, x: Tensor) -> Tensor:
        return _scattered(x)


#: Matrices that are split by rows, and by columns.
_CUT = {**dict.fromkeys(("q", "k", "v", "g", "u", "emb", "head"), 0), "o": 1, "d": 1}


def _by_hand(case: Case, is_compiled: bool) -> Running:
    """Megatron's sequence parallelism: all weights in bf16, without masters."""
    rank, device = case.ranks.comm.rank, case.ranks.device
    numbers = {}
    for name, x in case.numbers.items():
        dim = _CUT.get(name.split(".")[-2])
        part = x if dim is None else x.chunk(case.ranks.comm.size, dim)[rank]
        numbers[name] = part.to(device, torch.bfloat16, copy=True).contiguous()
    net = filled(case.size, numbers, case.recompute, _Split)
    first, last = partial(_looked_up, rank), partial(_split_loss, rank)
    if is_compiled:
        first, last = (torch.compile(f, backend=case.compiler) for f in (first, last))
        for layer in net.layers:
            layer.compile(backend=case.compiler)
    optimizer = _adamw(case, net)

    def take(ids: Tensor, labels: Tensor) -> Tensor:
        x = net.through(first(ids, net.emb.weight))
        value: Tensor = last(x, net.head.weight, net.norm.weight, labels)
        value.backward()
        _clipped(net)
        optimizer.step()
        optimizer.zero_grad()
        return value

    return _running(case, take)


def _looked_up(rank: int, ids: Tensor, weight: Tensor) -> Tensor:
    """Return rows of a table whose rows are split; ranks then have tokens."""
    index, is_mine = _mine(rank, ids, weight)
    return _scattered(torch.where(is_mine.unsqueeze(-1), F.embedding(index, weight), 0.0))


def _mine(rank: int, ids: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return places among this rank's rows, and whether they are among them."""
    index = ids - rank * weight.shape[0]
    is_mine = (index >= 0) & (index < weight.shape[0])
    return torch.where(is_mine, index, 0), is_mine


def _split_loss(rank: int, x: Tensor, weight: Tensor, norm: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss of logits whose words are split."""
    rows = _gathered(F.rms_norm(x, (x.shape[-1],), norm, 1e-5))
    logits = F.linear(rows, weight).flatten(0, 1).float()
    index, is_mine = _mine(rank, labels.flatten(), weight)
    largest = functional.all_reduce(logits.detach().amax(-1), "max", dist.group.WORLD)
    total: Any = _Sum.apply((logits - largest[:, None]).exp().sum(-1))
    chosen = logits.gather(1, index[:, None])[:, 0]
    right: Any = _Sum.apply(torch.where(is_mine, chosen, 0.0))
    loss: Tensor = (total.log() + largest - right).mean()
    return loss


def _clipped(net: Llama) -> None:
    """Add up gradients of norms, whose tokens are split, and scale all by their norm together."""
    named = dict(net.named_parameters())
    shared = [w for name, w in named.items() if w.ndim == 1]
    flat = torch.cat([w.grad for w in shared if w.grad is not None])
    dist.all_reduce(flat)
    for w, summed in zip(shared, flat.split([w.numel() for w in shared]), strict=True):
        w.grad = summed
    split: Any = [w.grad for w in named.values() if w.ndim > 1]
    square = torch.stack(torch._foreach_norm(split)).float().square().sum()
    dist.all_reduce(square)
    square += flat.float().square().sum()
    scale = (CLIP / (square.sqrt() + 1e-6)).clamp(max=1.0).to(flat.dtype)
    torch._foreach_mul_([w.grad for w in named.values()], scale)


# -- all of them -----------------------------------------------------------------------------------

#: Makes a peer of a case; it is told whether to compile.
_Make = Callable[[Case, bool], Running]

#: By style: peer -> the function that makes it.
_PEERS: dict[Style, dict[str, _Make]] = {
    "fsdp": {"FSDP2": _fsdp2},
    "tp": {"sequence parallelism by hand": _by_hand},
    "fsdp_tp": {
        "FSDP2 along all ranks": lambda case, is_compiled: _fsdp2(_split(case), is_compiled)
    },
    "ddp": {"DDP": _ddp},
    "alone": {"autocast": _alone, "bf16, f32 masters": _masters},
}


def peers(case: Case) -> dict[str, _Make]:
    """Return the functions that make the peers of a case; torch's ring has no kernels for CPUs."""
    if case.style != "cp":
        return _PEERS[case.style]
    if case.ranks.device.type == "cpu":
        return {"FSDP2, keys gathered": partial(_fsdp2_of_positions, way=None)}
    size = case.size
    way = ring_attention(case.ranks, torch.bfloat16, size.heads, size.kv_heads, size.head)
    return {"FSDP2, context_parallel": partial(_fsdp2_of_positions, way=way)} if way else {}


__all__ = ["Running", "Size", "ours", "peers"]
