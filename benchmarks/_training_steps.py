"""Training steps: mdfuse; torch's autograd and optimizer, alone, by hand and as DDP."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from _layers_peers import PEERS, by_hand
from _stacks import Stack
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import mdfuse as mf
from mdfuse import DeviceMesh, Layout, Shard
from mdfuse.config import options_from_environment

Style = Literal["alone", "dp", "tp"]

LR, BETAS, EPS, DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.01

#: Bytes of a bucket: those that DDP has without being asked.
BUCKET = 25 << 20


@dataclass(frozen=True, kw_only=True)
class Net:
    """A stack on the ranks.

    Attributes:
        stack: what it computes.
        style: how it is spread.
        mesh: with an axis of that name, and tp for one alone.
        wholes: input, seed, angles and weights by name.
        layouts: of each of them.
        parts: this rank's.
    """

    stack: Stack
    style: Style
    mesh: DeviceMesh
    wholes: Mapping[str, Tensor]
    layouts: Mapping[str, Layout]
    parts: Mapping[str, Tensor]

    @property
    def trained(self) -> list[str]:
        """The weights but the keys' bias, whose gradient is 0, and anything when rounded."""
        weights = [name for name in self.wholes if "." in name]
        return [name for name in weights if not name.startswith("k_bias.")]


def net_of(stack: Stack, style: Style) -> Net:
    """Place a stack: by sequences, or by heads and hidden units."""
    ranks = stack.ranks
    mesh = DeviceMesh.arange(**{"dp" if style == "dp" else "tp": ranks.comm.size})
    wholes = {"x": stack.x, "seed": stack.seed, **stack.angles}
    rows = Layout(mesh, {"dp": Shard(0)} if style == "dp" else {})
    layouts = {"x": rows, "seed": rows, **{name: Layout(mesh, {}) for name in stack.angles}}
    split = {} if style == "dp" else stack.layer.case.layouts(mesh)
    for n, weights in enumerate(stack.weights):
        for name, w in weights.items():
            wholes[f"{name}.{n}"] = w
            layouts[f"{name}.{n}"] = split.get(name, Layout(mesh, {}))
    parts = {name: ranks.local(x, layouts[name]).clone() for name, x in wholes.items()}
    return Net(stack=stack, style=style, mesh=mesh, wholes=wholes, layouts=layouts, parts=parts)


@dataclass(frozen=True, kw_only=True)
class Step:
    """A contender.

    Attributes:
        call: one step; output and gradient of the input.
        state: what it reads and writes: weights, and moments as `name.mean`, `name.square`.
        steps: how many steps there were, where a tensor counts them, for each weight or for all.
        first: the number of the first one.
        times: how many times the gradient of the input is what it should be.
    """

    call: Callable[[], tuple[Tensor, Tensor]]
    state: Mapping[str, Tensor]
    steps: Sequence[Tensor]
    first: float
    times: float = 1.0

    def reset(self, net: Net) -> None:
        """Go back to the state before the first step, in place."""
        for name, x in self.state.items():
            x.copy_(net.parts[name]) if name in net.parts else x.zero_()
        for x in self.steps:
            x.fill_(self.first)


# -- mdfuse ----------------------------------------------------------------------------------------


def _fusion(net: Net) -> mf.FusionDefinition:
    """The whole step in one definition."""
    names, function = net.trained, net.stack.function(by_hand(net.stack.layer))
    with mf.FusionDefinition("training") as fd:
        w: dict[str, Any] = {
            name: fd.define_tensor(x.shape, x.dtype, net.mesh, net.layouts[name], name=name)
            for name, x in net.wholes.items()
        }
        step = fd.define_tensor([], torch.float32, net.mesh, name="step")
        y = function(w)
        dx, *gradients = mf.grad(y, [w["x"], *(w[name] for name in names)], seed=w["seed"])
        fd.add_output(y)
        fd.add_output(dx)
        for name, gradient in zip(names, gradients, strict=True):
            weight, where = w[name], net.layouts[name]
            old = (
                weight,
                *(
                    fd.define_tensor(
                        weight.shape, weight.dtype, net.mesh, where, name=f"{name}.{moment}"
                    )
                    for moment in ("mean", "square")
                ),
            )
            new = mf.optim.adamw(
                weight, gradient, *old[1:], step, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY
            )
            for before, after in zip(old, new, strict=True):
                fd.add_output(after, reuse=before)
        fd.add_output(step + 1.0, reuse=step)
    return fd


def _ours(net: Net, bucket: int = BUCKET) -> Step:
    options = options_from_environment(net.stack.layer.options)
    if net.style == "dp":
        options = replace(options, bucket_bytes=bucket)
    names = net.trained
    state = {name: net.parts[name].clone() for name in names}
    state |= {f"{n}.{m}": torch.zeros_like(state[n]) for n in names for m in ("mean", "square")}
    count = torch.ones((), device=net.stack.ranks.device)
    program = mf.compile(_fusion(net), options)
    net.stack.layer.programs.append(program)
    taking = mf.Step(program, {**state, "step": count})
    others = [x for name, x in net.parts.items() if name not in names]
    return Step(call=partial(taking, *others), state=state, steps=[count], first=1.0)


# -- torch -----------------------------------------------------------------------------------------


class _Forward(Protocol):
    """From the leaves of a net to what computes its output of them."""

    def __call__(self, net: Net, leaves: Mapping[str, Tensor]) -> Callable[[], Tensor]: ...


class _Join(torch.autograd.Function):
    """Add up what the ranks have; what comes back is everybody's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, add: Callable[[Tensor], Tensor]) -> Tensor:
        return add(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _Enter(torch.autograd.Function):
    """Read what everybody has; what comes back is added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, add: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.add = add
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.add(gradients[0]), None


def _added(x: Tensor) -> Tensor:
    """In a tensor that nobody else reads: a product, or the sum of several gradients."""
    summed = x.contiguous()
    dist.all_reduce(summed)
    return summed


def _added_in_graph(x: Tensor) -> Tensor:
    world: Any = dist.group.WORLD
    summed: Tensor = functional.wait_tensor(functional.all_reduce(x, "sum", world.group_name))
    return summed


def _layers(net: Net, add: Callable[[Tensor], Tensor]) -> Callable[[Mapping[str, Any]], Tensor]:
    """The stack for parts of heads and hidden units (arXiv:1909.08053, section 3)."""
    if net.style != "tp":
        return net.stack.function(by_hand(net.stack.layer))
    join = partial(_apply, _Join, add)
    return net.stack.function(by_hand(net.stack.layer, join, partial(_apply, _Enter, add)))


def _apply(of: Any, add: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    y: Tensor = of.apply(x, add)
    return y


def _eager(net: Net, leaves: Mapping[str, Tensor]) -> Callable[[], Tensor]:
    return partial(_layers(net, _added), leaves)


def _compiled(net: Net, leaves: Mapping[str, Tensor]) -> Callable[[], Tensor]:
    """In one piece: what dynamo cannot trace is an error."""
    function, backend = _layers(net, _added_in_graph), net.stack.layer.compiler
    return partial(torch.compile(function, backend=backend, dynamic=False, fullgraph=True), leaves)


class _Module(nn.Module):
    """The stack as a module of its weights."""

    def __init__(self, net: Net, leaves: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.names = [name for name in net.wholes if "." in name]
        self.weights = nn.ParameterList(leaves[name] for name in self.names)
        self.angles = {name: leaves[name] for name in net.stack.angles}
        self.function = _layers(net, _added)

    def forward(self, x: Tensor) -> Tensor:
        weights = dict(zip(self.names, self.weights, strict=True))
        return self.function({**weights, **self.angles, "x": x})


def _ddp(net: Net, leaves: Mapping[str, Tensor], is_compiled: bool = False) -> Callable[[], Tensor]:
    """Gradients are reduced in buckets, in whose memory they lie, while others are computed."""
    module: Any = DistributedDataParallel(_Module(net, leaves), gradient_as_bucket_view=True)
    if is_compiled:
        module = torch.compile(module, backend=net.stack.layer.compiler, dynamic=False)
    return partial(module, leaves["x"])


def _theirs(net: Net, forward: _Forward) -> Step:
    """Autograd through a function of the layers, and torch's optimizer."""
    names, is_gpu = net.trained, net.stack.ranks.device.type == "cuda"
    leaves: dict[str, Any] = {name: part.clone() for name, part in net.parts.items()}
    for name in leaves:
        if "." in name:
            leaves[name] = nn.Parameter(leaves[name], requires_grad=name in names)
    leaves["x"].requires_grad_()
    optimizer = torch.optim.AdamW(
        [leaves[name] for name in names],
        lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True, capturable=is_gpu,
    )  # fmt: skip
    for name in names:
        leaves[name].grad = torch.zeros_like(leaves[name])
    optimizer.step()  # makes the moments
    optimizer.zero_grad(set_to_none=True)
    # torch's data parallelism takes the mean of what the ranks have
    times = float(net.stack.ranks.comm.size) if net.style == "dp" else 1.0
    x, seed = leaves["x"], leaves["seed"] * times
    with torch.enable_grad():
        function = forward(net, leaves)

    def call() -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            y = function()
            torch.autograd.backward(y, seed)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        dx, x.grad = x.grad, None
        return y.detach(), dx

    state: dict[str, Tensor] = {name: leaves[name].detach() for name in names}
    for name in names:
        of: Any = optimizer.state[leaves[name]]
        state |= {f"{name}.mean": of["exp_avg"], f"{name}.square": of["exp_avg_sq"]}
    steps = [optimizer.state[leaves[name]]["step"] for name in names]
    return Step(call=call, state=state, steps=steps, first=0.0, times=times)


# -- all of them -----------------------------------------------------------------------------------

_BY_HAND: dict[str, Callable[[Net], Step]] = {
    "mdfuse": _ours,
    "eager": partial(_theirs, forward=_eager),
    "graph": partial(_theirs, forward=_eager),
    "compiled": partial(_theirs, forward=_compiled),
    "compiled-graph": partial(_theirs, forward=_compiled),
}

#: By style and name, in the order of the table. Where it ends in graph, it is captured by hand.
STEPS: dict[Style, dict[str, Callable[[Net], Step]]] = {
    "alone": _BY_HAND,
    "tp": _BY_HAND,
    "dp": {
        "mdfuse": _ours,
        "unbucketed": partial(_ours, bucket=0),
        "ddp": partial(_theirs, forward=_ddp),
        "ddp-compiled": partial(_theirs, forward=partial(_ddp, is_compiled=True)),
    },
}


def steady_of(name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Make of a contender's call what is timed."""
    return PEERS["graph" if name.endswith("graph") else "eager"].steady


# -- what is right ---------------------------------------------------------------------------------


def reference(net: Net) -> dict[str, Tensor]:
    """This rank's part of what a first step makes on one device, in float64 (arXiv:1711.05101)."""
    leaves = {name: x.double() for name, x in net.wholes.items()}
    names = net.trained
    for name in ("x", *names):
        leaves[name].requires_grad_()
    with torch.enable_grad():
        y = net.stack.function(by_hand(net.stack.layer))(leaves)
        torch.autograd.backward(y, leaves["seed"])

    def mine(x: Tensor | None, name: str) -> Tensor:
        assert x is not None
        return net.stack.ranks.local(x.detach(), net.layouts[name]).clone()

    tensors = {"y": mine(y, "x"), "dx": mine(leaves["x"].grad, "x")}
    for name in names:
        w, g = mine(leaves[name], name), mine(leaves[name].grad, name)
        leaves[name].grad = None
        tensors[f"{name}.mean"] = g * (1 - BETAS[0])
        tensors[f"{name}.square"] = g * g * (1 - BETAS[1])
        tensors[name] = w * (1 - LR * DECAY) - LR * g / (g.abs() + EPS)
    return tensors
