"""A training step of whole layers: mdfuse against torch's autograd and fused AdamW.

python benchmarks/training.py                                              # one GPU
python benchmarks/training.py --model llama3-8b --tokens 4096              # some
python benchmarks/training.py --device cpu --small --compiler aot_eager    # to see that it runs

A step is a layer's forward, its backward from a given gradient of the output to that of the input
and of all weights, and AdamW's update of the weights in place; weights and moments have 16 bits on
a GPU. Contenders: eager (autograd, `torch.optim.AdamW(fused=True)`), compiled (the layer under
torch.compile); and where the name ends in graph, the whole step captured by hand as a CUDA graph.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _layers_figures import Limits, Plan, Ready, bench, figures, settled
from _layers_models import MODELS, Case, cases
from _layers_peers import PEERS, Bench, by_hand, options
from _measure import Report, Row, show
from _ranks import start_or_alone
from torch import Tensor

import mdfuse as mf
from mdfuse.cli import screen

_RESULTS = Path(__file__).parent / "results"
_LIMITS = Limits(times={"compiled-graph": 1.03, "graph": 1.0}, host_us=40.0, inputs=None)
_PEERS = ("mdfuse", "eager", "graph", "compiled", "compiled-graph")
_LR, _BETAS, _EPS, _DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.01

#: dtype -> the largest error of any tensor of a step, relative to its norm.
_TOLERANCE = {torch.bfloat16: 4e-2, torch.float32: 1e-4}


@dataclass(frozen=True, kw_only=True)
class _Step:
    """A contender.

    Attributes:
        call: one step; output and gradient of the input.
        state: what it reads and writes: weights, and moments as `name.mean`, `name.square`.
        steps: how many steps there were, where a tensor counts them, for each weight or for all.
        first: the number of the first one.
    """

    call: Callable[[], tuple[Tensor, Tensor]]
    state: Mapping[str, Tensor]
    steps: Sequence[Tensor]
    first: float

    def reset(self, layer: Bench) -> None:
        """Go back to the state before the first step, in place."""
        for name, x in self.state.items():
            x.zero_() if name not in layer.parts else x.copy_(layer.parts[name])
        for x in self.steps:
            x.fill_(self.first)


def _weights(layer: Bench) -> list[str]:
    """What is trained: not the keys' bias, whose gradient is 0, and anything when rounded."""
    return [name for name in layer.parts if name not in ("x", "cos", "sin", "k_bias")]


def _gradient(layer: Bench) -> Tensor:
    """Of the output: random, the same for everybody."""
    x = layer.parts["x"]
    generator = torch.Generator(x.device).manual_seed(1)
    return torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device)


def _ours(layer: Bench) -> _Step:
    """The whole step as one program."""
    case, mesh, dtype = layer.case, layer.ranks.mesh, layer.parts["x"].dtype
    names = _weights(layer)
    with mf.FusionDefinition("training") as fd:
        w: dict[str, Any] = {
            name: fd.define_tensor(shape, dtype, mesh, name=name)
            for name, (shape, _) in case.shapes().items()
        }
        seed = fd.define_tensor(w["x"].shape, dtype, mesh, name="seed")
        step = fd.define_tensor([], torch.float32, mesh, name="step")
        y = case.layer(w, lambda name, x: F.linear(x, w[name], w.get(f"{name}_bias")))
        dx, *gradients = mf.grad(y, [w["x"], *(w[name] for name in names)], seed=seed)
        fd.add_output(y)
        fd.add_output(dx)
        for name, gradient in zip(names, gradients, strict=True):
            moments = (f"{name}.mean", f"{name}.square")
            mean, square = (fd.define_tensor(w[name].shape, dtype, mesh, name=m) for m in moments)
            old = w[name], mean, square
            new = mf.optim.adamw(
                w[name], gradient, mean, square, step,
                lr=_LR, betas=_BETAS, eps=_EPS, weight_decay=_DECAY,
            )  # fmt: skip
            for before, after in zip(old, new, strict=True):
                fd.add_output(after, reuse=before)
        fd.add_output(step + 1.0, reuse=step)
    state = {name: layer.parts[name].clone() for name in names}
    state |= {f"{n}.{m}": torch.zeros_like(state[n]) for n in names for m in ("mean", "square")}
    count = torch.ones((), device=layer.ranks.device)
    taking = mf.Step(mf.compile(fd, layer.options), {**state, "step": count})
    others = [x for name, x in layer.parts.items() if name not in names]
    call = partial(taking, *others, _gradient(layer))
    return _Step(call=call, state=state, steps=[count], first=1.0)


def _theirs(layer: Bench, function: Callable[..., Any]) -> _Step:
    """Autograd through a function of the layer, and torch's optimizer."""
    device, names = layer.ranks.device, _weights(layer)
    leaves = {name: part.clone() for name, part in layer.parts.items()}
    for name in ("x", *names):
        leaves[name].requires_grad_()
    optimizer = torch.optim.AdamW(
        [leaves[name] for name in names],
        lr=_LR, betas=_BETAS, eps=_EPS, weight_decay=_DECAY,
        fused=True, capturable=device.type == "cuda",
    )  # fmt: skip
    for name in names:
        leaves[name].grad = torch.zeros_like(leaves[name])
    optimizer.step()  # makes the moments
    optimizer.zero_grad(set_to_none=True)
    x, seed = leaves["x"], _gradient(layer)

    def call() -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            y = function(leaves)
            torch.autograd.backward(y, seed)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        dx, x.grad = x.grad, None
        assert dx is not None
        return y.detach(), dx

    state, moments = {name: leaves[name].detach() for name in names}, optimizer.state
    for name in names:
        state[f"{name}.mean"] = moments[leaves[name]]["exp_avg"]
        state[f"{name}.square"] = moments[leaves[name]]["exp_avg_sq"]
    steps = [moments[leaves[name]]["step"] for name in names]
    return _Step(call=call, state=state, steps=steps, first=0.0)


def _made(layer: Bench, name: str) -> _Step:
    if name == "mdfuse":
        return _ours(layer)
    function = by_hand(layer)
    if name.startswith("compiled"):
        function = torch.compile(function, backend=layer.compiler, dynamic=False, fullgraph=True)
    return _theirs(layer, function)


def _reference(layer: Bench) -> dict[str, Tensor]:
    """What the first step makes, in float64 (arXiv:1711.05101, algorithm 2)."""
    leaves = {name: part.double() for name, part in layer.parts.items()}
    names = _weights(layer)
    for name in ("x", *names):
        leaves[name].requires_grad_()
    with torch.enable_grad():
        y = by_hand(layer)(leaves)
        torch.autograd.backward(y, _gradient(layer).double())
    found = {"y": y.detach(), "dx": leaves["x"].grad}
    for name in names:
        w, g = leaves[name].detach(), leaves[name].grad
        assert g is not None
        found[f"{name}.mean"] = g * (1 - _BETAS[0])
        found[f"{name}.square"] = g * g * (1 - _BETAS[1])
        found[name] = w * (1 - _LR * _DECAY) - _LR * g / (g.abs() + _EPS)
    return {name: x for name, x in found.items() if x is not None}


def _error(layer: Bench, step: _Step, call: Callable[[], Any], want: Mapping[str, Tensor]) -> float:
    """The largest one of a first step, taken as all others will be.

    Raises:
        AssertionError: something is wrong.
    """
    for x in call():
        x.fill_(torch.nan)  # the memory that the next results get, as a rule
    step.reset(layer)
    y, dx = call()
    got, largest = {**step.state, "y": y, "dx": dx}, 0.0
    for name, right in want.items():
        norm = torch.linalg.vector_norm
        error = float(norm(got[name].double() - right) / norm(right))
        if not error < _TOLERANCE[layer.parts["x"].dtype]:
            raise AssertionError(f"{layer.case.name}: a relative error of {error:.2g} in {name}")
        largest = max(largest, error)
    return largest


def rows(plan: Plan, case: Case) -> Iterator[Row]:
    """The figures of one layer: mdfuse against every other contender."""
    torch.compiler.reset()  # else the layers before count as recompilations
    layer = bench(plan, case)
    want, ready = _reference(layer), {}
    steps = {name: _made(layer, name) for name in plan.peers}  # graphs do not keep what they read
    for name, step in steps.items():
        step.reset(layer)
        steady, peak = settled(plan, step.call, PEERS[name].steady)
        ready[name] = Ready(call=steady, peak=peak, error=_error(layer, step, steady, want))
    yield from figures(plan, case, ready)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=[m.name for m in MODELS], nargs="+", help="some of them")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--peers", help=f"some of {','.join(_PEERS[1:])}; by default all")
    parser.add_argument("--compile", choices=("auto", "never", "always"), help="mdfuse's option")
    parser.add_argument("--compiler", default="inductor", help="the backend of torch.compile")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="a GPU if there is one")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--small", action="store_true", help="layers of some thousand weights")
    parser.add_argument("--output", type=Path, help="by default in benchmarks/results")
    return parser.parse_args()


def main() -> None:
    """Measure, print, store."""
    arguments = _arguments()
    ranks = start_or_alone(arguments.device)
    if ranks.comm.size > 1:
        screen.fail("a training step is measured on one rank: python benchmarks/training.py")
    is_gpu = ranks.device.type == "cuda"
    possible = [name for name in _PEERS if is_gpu or not name.endswith("graph")]
    peers = possible if arguments.peers is None else ["mdfuse", *arguments.peers.split(",")]
    if wrong := [name for name in peers if name not in possible]:
        screen.fail(f"peers {', '.join(wrong)}: here there are {', '.join(possible[1:])}")
    plan = Plan(
        ranks=ranks,
        rounds=arguments.rounds,
        peers=tuple(peers),
        options=options(arguments.compile),
        compiler=arguments.compiler,
        limits=_LIMITS,
    )
    path: Path = arguments.output or _RESULTS / f"training-{ranks.name}.json"
    given = {k: v and str(v) for k, v in vars(arguments).items() if k != "output"}
    where = {"device": str(ranks.device), "dtype": "bfloat16" if is_gpu else "float32"}
    found: list[Row] = []
    models = arguments.model or [m.name for m in MODELS if m.family == "llama"]
    for case in cases(models, "prefill", arguments.tokens, 0, is_small=arguments.small):
        of_case = list(rows(plan, case))
        found += of_case
        show(screen.output(), f"{case.name}, a training step on {ranks.name}", of_case)
        Report(benchmark="training", arguments=given, rows=found, where=where).write(path)
        mf.FusionCache.reset()  # plans own buffers and graphs
        gc.collect()
        if is_gpu:
            torch.cuda.empty_cache()
    screen.output().print(f"written: {path}", soft_wrap=True)
    ranks.close()


if __name__ == "__main__":
    main()
