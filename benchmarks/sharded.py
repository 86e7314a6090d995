"""Training steps of parameters that the ranks share (FSDP): mdfuse against torch's `fully_shard`.

./launch/torchrun 2 benchmarks/sharded.py                                     # two GPUs
./launch/torchrun 2 benchmarks/sharded.py --model llama-1b --layers 8         # others
./launch/torchrun 2 benchmarks/sharded.py --device cpu --small --peers ''     # to see that it runs

A step is forward, backward from a given gradient of the output to those of all weights, and AdamW's
update in place; each rank has sequences of its own, and a part of each weight and of its moments.
Weights are gathered for each layer, and again in the backward. Contenders: mdfuse with one layer's
weights gathered ahead, and with nothing ahead; torch's `fully_shard` of each layer with fused
AdamW, eager and with each layer under torch.compile.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _layers_figures import Limits, Plan, Ready, bench, figures, settled
from _layers_models import MODELS, Case, cases
from _layers_peers import by_hand
from _measure import Report, show
from _ranks import start_or_alone
from _stacks import Stack, stacked
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import mdfuse as mf
from mdfuse import DeviceMesh, Shard
from mdfuse.cli import screen

_RESULTS = Path(__file__).parent / "results"
_LIMITS = Limits(times={}, host_us=0.0, inputs=0)
_LR, _BETAS, _EPS, _DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.01
_PEERS = ("unraised", "fsdp", "fsdp-compiled")

#: dtype -> the largest error of a result, relative to its norm, for each layer.
_TOLERANCE = {torch.bfloat16: 4e-2, torch.float32: 1e-4}


# -- mdfuse ----------------------------------------------------------------------------------------


def _program(net: Stack, ahead: int) -> mf.Program:
    """The whole step as one program."""
    case, size = net.layer.case, net.ranks.comm.size
    mesh, dtype = DeviceMesh.arange(dp=size), net.x.dtype
    rows = {"dp": Shard(0)}
    with mf.FusionDefinition("sharded") as fd:
        h, seed = (fd.define_tensor(net.x.shape, dtype, mesh, rows, name=n) for n in ("x", "seed"))
        angles = {n: fd.define_tensor(v.shape, dtype, mesh, name=n) for n, v in net.angles.items()}
        step = fd.define_tensor([], torch.float32, mesh, name="step")
        parts = {
            f"{name}.{n}": fd.define_tensor(w.shape, dtype, mesh, rows, name=f"{name}.{n}")
            for n, weights in enumerate(net.weights)
            for name, w in weights.items()
        }
        for n, weights in enumerate(net.weights):
            with mf.recompute():
                whole = {name: fd.ops.set(parts[f"{name}.{n}"]).on(mesh, {}) for name in weights}
            values = {**whole, **angles, "x": h}
            h = case.layer(values, lambda name, x, w=whole: F.linear(x, w[name]))
        fd.add_output(h)
        gradients = mf.grad(h, list(parts.values()), seed=seed)
        for (name, w), gradient in zip(parts.items(), gradients, strict=True):
            moments = (f"{name}.mean", f"{name}.square")
            old = w, *(fd.define_tensor(w.shape, dtype, mesh, rows, name=m) for m in moments)
            new = mf.optim.adamw(
                w, gradient, *old[1:], step, lr=_LR, betas=_BETAS, eps=_EPS, weight_decay=_DECAY
            )
            for before, after in zip(old, new, strict=True):
                fd.add_output(after, reuse=before)
        fd.add_output(step + 1.0, reuse=step)
    program = mf.compile(fd, mf.Options(prefetch_bytes=ahead, overlap="never"))
    net.layer.programs.append(program)
    return program


def _ours(net: Stack, ahead: int) -> mf.Step:
    state: dict[str, Any] = {}
    for n, weights in enumerate(net.weights):
        for name, w in weights.items():
            part = net.mine(w)
            state[f"{name}.{n}"] = part
            state |= {f"{name}.{n}.{m}": torch.zeros_like(part) for m in ("mean", "square")}
    state["step"] = torch.ones((), device=net.ranks.device)
    return mf.Step(_program(net, ahead), state)


# -- torch -----------------------------------------------------------------------------------------


class _Layer(nn.Module):
    """A layer as a module."""

    def __init__(self, net: Stack, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterDict({n: nn.Parameter(w.clone()) for n, w in weights.items()})
        self.angles, self.function = net.angles, by_hand(net.layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.function({**self.weights, **self.angles, "x": x})


def _theirs(net: Stack, is_compiled: bool) -> Callable[[], Tensor]:
    """`fully_shard` of each layer, and the optimizer on its parts."""
    mesh = init_device_mesh(net.ranks.device.type, (net.ranks.comm.size,))
    with torch.enable_grad():
        layers = nn.Sequential(*(_Layer(net, weights) for weights in net.weights))
        for layer in layers:
            if is_compiled:
                layer.compile(backend=net.layer.compiler, dynamic=False)
            fully_shard(layer, mesh=mesh)
        fully_shard(layers, mesh=mesh)
        optimizer = torch.optim.AdamW(
            layers.parameters(), lr=_LR, betas=_BETAS, eps=_EPS, weight_decay=_DECAY, fused=True
        )

    x, seed = net.mine(net.x), net.mine(net.seed)

    def call() -> Tensor:
        with torch.enable_grad():
            y: Tensor = layers(x)
            y.backward(seed)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return y.detach()

    return call


# -- measuring -------------------------------------------------------------------------------------


def _error(net: Stack, step: mf.Step, call: Callable[[], Any]) -> float:
    """The largest one of mdfuse's first step: of the output, and of the means of gradients.

    Raises:
        AssertionError: something is wrong.
    """
    for n, weights in enumerate(net.weights):
        for name, w in weights.items():
            step.state[f"{name}.{n}"].copy_(net.mine(w))
            for moment in ("mean", "square"):
                step.state[f"{name}.{n}.{moment}"].zero_()
    step.state["step"].fill_(1.0)
    y = call()
    function = by_hand(net.layer)
    wide = [{n: w.double().requires_grad_() for n, w in weights.items()} for weights in net.weights]
    angles = {n: v.double() for n, v in net.angles.items()}
    with torch.enable_grad():
        h = net.mine(net.x).double()
        for weights in wide:
            h = function({**weights, **angles, "x": h})
        h.backward(net.mine(net.seed).double())
    norm, largest = torch.linalg.vector_norm, float((y - h).norm() / h.norm())
    for n, weights in enumerate(wide):
        for name, w in weights.items():
            assert w.grad is not None
            torch.distributed.all_reduce(w.grad)
            want = net.mine(w.grad) * (1 - _BETAS[0])
            got = step.state[f"{name}.{n}.mean"].double()
            largest = max(largest, float(norm(got - want) / norm(want)))
    if not largest < _TOLERANCE[net.x.dtype] * net.count:
        raise AssertionError(f"{net.layer.case.name}: a relative error of {largest:.2g}")
    return largest


def _ready(plan: Plan, net: Stack) -> dict[str, Ready]:
    one_layer = sum(w.nbytes for w in net.weights[0].values())
    contenders: dict[str, Ready] = {}
    for name, ahead in (("mdfuse", one_layer), ("unraised", 0)):
        if name in plan.peers:
            step = _ours(net, ahead)
            given = net.mine(net.x), net.mine(net.seed), *net.angles.values()
            call = partial(_first, step, given)
            steady, peak = settled(plan, call)
            contenders[name] = Ready(call=steady, peak=peak, error=_error(net, step, steady))
    for name in ("fsdp", "fsdp-compiled"):
        if name in plan.peers:
            theirs = _theirs(net, name == "fsdp-compiled")
            theirs()  # makes the moments, which are no part of the peak
            steady, peak = settled(plan, theirs)
            contenders[name] = Ready(call=steady, peak=peak, error=0.0)
    return contenders


def _first(step: mf.Step, given: tuple[Tensor, ...]) -> Tensor:
    loss: Tensor = step(*given)[0]
    return loss


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    llamas = [m.name for m in MODELS if m.family == "llama"]
    parser.add_argument("--model", choices=llamas, default="llama3-8b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, help="of each rank")
    parser.add_argument("--peers", help=f"some of {','.join(_PEERS)}; by default all")
    parser.add_argument("--compiler", default="inductor", help="the backend of torch.compile")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="a GPU if there is one")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--small", action="store_true", help="layers of some thousand weights")
    parser.add_argument("--output", type=Path, help="by default in benchmarks/results")
    return parser.parse_args()


def main() -> None:
    """Measure, print, store."""
    arguments = _arguments()
    ranks = start_or_alone(arguments.device)
    if ranks.comm.size == 1:
        screen.fail("parameters are shared by ranks: ./launch/torchrun 2 benchmarks/sharded.py")
    given = _PEERS if arguments.peers is None else tuple(filter(None, arguments.peers.split(",")))
    if wrong := [name for name in given if name not in _PEERS]:
        screen.fail(f"peers {', '.join(wrong)}: there are {', '.join(_PEERS)}")
    plan = Plan(
        ranks=ranks, rounds=arguments.rounds, peers=("mdfuse", *given), options=None,
        compiler=arguments.compiler, limits=_LIMITS,
    )  # fmt: skip
    path: Path = arguments.output or _RESULTS / f"sharded-{ranks.name}.json"
    case: Case
    (case,) = cases([arguments.model], "prefill", arguments.tokens, 0, is_small=arguments.small)
    net = stacked(bench(plan, case), arguments.layers, ranks.comm.size)
    rows = list(figures(plan, case, _ready(plan, net)))
    if ranks.comm.rank == 0:
        settings = {k: v and str(v) for k, v in vars(arguments).items() if k != "output"}
        where = {"device": str(ranks.device), "dtype": str(net.x.dtype).removeprefix("torch.")}
        title = f"{arguments.layers} layers of {case.name}, sharded, on {ranks.name}"
        show(screen.output(), title, rows)
        Report(benchmark="sharded", arguments=settings, rows=rows, where=where).write(path)
        for line in plan.lines():
            screen.output().print(line, markup=False, soft_wrap=True)
        screen.output().print(f"written: {path}", soft_wrap=True)
    ranks.close()


if __name__ == "__main__":
    main()
