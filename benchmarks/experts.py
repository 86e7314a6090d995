"""A layer of experts whose rows a run counts: mdfuse beside a dispatch by hand.

./launch/torchrun 2 benchmarks/experts.py                                  # 64 experts, 6 per token
./launch/torchrun 2 benchmarks/experts.py --layer qwen3-30b-a3b --skew 1   # others, uneven
./launch/torchrun 2 benchmarks/experts.py --carrier symmetric              # mdfuse's backend
./launch/torchrun 2 benchmarks/experts.py --device cpu --small --compiler aot_eager

Tokens and experts are split over the ranks. By hand, ranks exchange counts, and rows by
`all_to_all_single`; experts multiply by `grouped_mm`; eager, and under torch.compile (which stops
at the counts). `forward` is the layer, `step` also has the gradients of the input and of all
weights, and `rows` has the two ways of the rows without experts; its rate counts bytes that leave
a rank. All are compared with a loop over experts in f64.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _measure import Contender, Report, Row, device_time, host_time, interleave, show
from _ranks import Ranks, start_or_alone
from _rows_by_hand import layer, ways
from torch import Tensor

import mdfuse as mf
from mdfuse import Shard
from mdfuse.cli import screen

_RESULTS = Path(__file__).parent / "results"

#: The largest error of a result, relative to its norm; 16 bits choose other experts now and then.
_TOLERANCE = 4e-2

#: What is measured -> the largest multiple of the time by hand.
_LIMITS = {"forward": 1.0, "step": 1.0, "rows": None}

#: Calls between two looks at the clock.
_BATCH = 3


@dataclass(frozen=True, kw_only=True)
class Size:
    """The extents of a layer, and the tokens of each rank."""

    width: int = 2048
    units: int = 1408
    experts: int = 64
    choices: int = 6
    tokens: int = 8192

    def __str__(self) -> str:
        return (
            f"{self.tokens} tokens of {self.width} per rank, {self.choices} of {self.experts} "
            f"experts of {self.units}"
        )


#: By name; `--small` takes the last one.
LAYERS = {
    "64": Size(),
    "qwen3-30b-a3b": Size(units=768, experts=128, choices=8),
    "small": Size(width=32, units=48, experts=8, choices=2, tokens=60),
}


@dataclass(kw_only=True)
class Case:
    """A layer and its numbers.

    Attributes:
        weights: [experts or words, width] of the router, and the matrices of all experts.
        x: the tokens of all ranks.
        seed: the gradient of the output.
    """

    ranks: Ranks
    size: Size
    weights: list[Tensor]
    x: Tensor
    seed: Tensor

    @property
    def parts(self) -> int:
        return self.ranks.comm.size

    def mine(self, whole: Tensor) -> Tensor:
        """Return this rank's part of tokens, or of experts."""
        return whole.chunk(self.parts)[self.ranks.comm.rank].contiguous()

    @property
    def given(self) -> list[Tensor]:
        """The router, whole, and this rank's experts."""
        return [self.weights[0], *map(self.mine, self.weights[1:])]


def drawn(ranks: Ranks, size: Size, skew: float) -> Case:
    """Draw a layer, alike on all ranks.

    Args:
        ranks: the ranks that share it.
        size: its extents.
        skew: how much likelier the first experts are: e^(bias) of expert n is (n + 1)^-skew.
    """
    generator: Any = torch.Generator(ranks.device).manual_seed(0)
    shape = size.experts, size.width, size.units
    shapes = (size.experts, size.width), shape, shape, (shape[0], shape[2], shape[1])

    def numbers(of: Sequence[int], scale: float) -> Tensor:
        x = torch.empty(of, device=ranks.device).normal_(0, scale, generator=generator)
        return x.to(torch.bfloat16)

    weights = [numbers(of, of[-1] ** -0.5) for of in shapes]
    x, seed = (numbers((size.tokens * ranks.comm.size, size.width), 1.0) for _ in range(2))
    x[:, 0] = 1
    weights[0][:, 0] = -skew * torch.arange(1, size.experts + 1, device=ranks.device).log()
    return Case(ranks=ranks, size=size, weights=weights, x=x, seed=seed)


# -- mdfuse ----------------------------------------------------------------------------------------


def _layer(fd: Any, case: Case, x: Any, router: Any, *experts: Any) -> Any:
    """Define the layer; without experts, rows come back as they went."""
    size, mesh = case.size, mf.DeviceMesh.arange(ep=case.parts)
    weights, ids = F.linear(x, router).float().softmax(-1).topk(size.choices, -1)
    n = fd.ops.counts(ids, experts=size.experts, parts=case.parts)
    rows = fd.ops.set(fd.ops.group_rows(x, ids, n)).on(mesh, {"ep": Shard(1)})
    if experts:
        gate, up, down = experts
        rows = F.silu(fd.ops.grouped_mm(rows, gate)) * fd.ops.grouped_mm(rows, up)
        rows = fd.ops.grouped_mm(rows, down)
    back = fd.ops.set(rows).on(mesh, {"ep": Shard(0)})
    return fd.ops.ungroup_rows(back, ids, weights.to(torch.bfloat16))


def _program(case: Case, what: str) -> mf.Program:
    mesh, split = mf.DeviceMesh.arange(ep=case.parts), {"ep": Shard(0)}
    with mf.FusionDefinition(f"experts_{what}") as fd:
        tensor = partial(fd.define_tensor, dtype=torch.bfloat16, mesh=mesh)
        x = tensor(case.x.shape, layout=split)
        router = tensor(case.weights[0].shape)
        of = () if what == "rows" else case.weights[1:]
        experts = [tensor(w.shape, layout=split) for w in of]
        y = _layer(fd, case, x, router, *experts)
        fd.add_output(y)
        if what == "step":
            seed = tensor(case.seed.shape, layout=split)
            for gradient in mf.grad(y, [x, router, *experts], seed=seed):
                fd.add_output(gradient)
    return mf.compile(fd)


def _ours(case: Case, what: str) -> Callable[[], list[Tensor]]:
    program, router, *experts = _program(case, what), *case.given
    given = [case.mine(case.x), router, *(() if what == "rows" else experts)]
    given += [case.mine(case.seed)] if what == "step" else []
    return lambda: program.run(*given)


# -- by hand ---------------------------------------------------------------------------------------


def _by_hand(case: Case, what: str, compiler: str | None) -> Callable[[], list[Tensor]]:
    function = ways if what == "rows" else layer
    if compiler is not None:
        function = torch.compile(function, backend=compiler, dynamic=True)
    call = partial(function, size=case.size, parts=case.parts)
    leaves = [case.mine(case.x), *(case.given[:1] if what == "rows" else case.given)]
    leaves = [x.clone().requires_grad_(what == "step") for x in leaves]
    seed = case.mine(case.seed)

    def run() -> list[Tensor]:
        if what != "step":
            return [call(*leaves)]
        with torch.enable_grad():
            y = call(*leaves)
            gradients = [*torch.autograd.grad(y, leaves, seed)]
        torch.distributed.all_reduce(gradients[1])  # of the router, which all have
        return [y.detach(), *gradients]

    return run


# -- values ----------------------------------------------------------------------------------------


def reference(case: Case, what: str) -> list[Tensor]:
    """Return this rank's part of all results: one expert after the other, in f64."""
    size, (router, *matrices) = case.size, case.weights
    x, seed = case.x.double(), case.seed.double()
    logits = F.linear(case.x, router).double().requires_grad_()
    with torch.enable_grad():
        scores, ids = logits.softmax(-1).topk(size.choices, -1)
    weights, inputs = scores.detach().requires_grad_(), x.clone().requires_grad_()
    y, of_matrices = torch.zeros_like(x), [torch.zeros_like(w) for w in matrices]
    for e in range(size.experts):
        tokens, places = (ids == e).nonzero(as_tuple=True)
        of = [w[e].double().requires_grad_() for w in matrices]
        with torch.enable_grad():
            h = inputs[tokens]
            if what != "rows":
                h = (F.silu(h @ of[0]) * (h @ of[1])) @ of[2]
            h = h * weights[tokens, places].unsqueeze(-1)
        y.index_add_(0, tokens, h.detach())
        if what == "step":
            h.backward(seed[tokens])
            for whole, w in zip(of_matrices, of, strict=True):
                whole[e] = w.grad
    results = [y]
    if what == "step":
        scores.backward(weights.grad)
        assert logits.grad is not None and inputs.grad is not None
        results.append(inputs.grad + logits.grad @ router.double())
        results += [logits.grad.T @ x, *of_matrices]
    return [case.mine(r) if n != 2 else r for n, r in enumerate(results)]


def _errors(got: Sequence[Tensor], want: Sequence[Tensor]) -> list[float]:
    """Return the error of each result, relative to its norm."""
    norm, errors = torch.linalg.vector_norm, list[float]()
    for a, b in zip(got, want, strict=True):
        size = float(norm(b.double()))
        errors.append(float(norm(a.double() - b)) / size if size else float(norm(a.double())))
    return errors


# -- the run ---------------------------------------------------------------------------------------


def _leaving(case: Case) -> int:
    """Return the bytes of rows that leave this rank on one way."""
    x, (router, *_) = case.mine(case.x), case.weights
    ids = F.linear(x, router).float().softmax(-1).topk(case.size.choices, -1).indices
    elsewhere = ids // (case.size.experts // case.parts) != case.ranks.comm.rank
    return int(elsewhere.sum()) * case.size.width * case.x.itemsize


def rows(
    case: Case, what: str, arguments: argparse.Namespace, world: dict[str, Any]
) -> Iterator[Row]:
    """Measure mdfuse beside both kinds of dispatch by hand."""
    on_gpu, want = case.ranks.device.type == "cuda", reference(case, what)
    calls = {"mdfuse": _ours(case, what)}
    calls |= {"hand": _by_hand(case, what, None)}
    calls |= {"hand-compiled": _by_hand(case, what, arguments.compiler)}
    for name, call in [*calls.items()]:
        for _ in range(3):  # those behind the second one replay
            call()
        errors = _errors(call(), want)
        worst = torch.tensor(max(errors), device=case.ranks.device)
        torch.distributed.all_reduce(worst, torch.distributed.ReduceOp.MAX)  # ranks choose alike
        world["errors"][f"{what}: {name}"] = max(errors)
        if float(worst) < _TOLERANCE:
            continue
        said = f"{what}, {name}: relative errors of {[f'{e:.2g}' for e in errors]}"
        if name in ("mdfuse", "hand"):
            raise AssertionError(said)
        del calls[name]  # torch 2.11 loses gradients of experts there: no time of wrong numbers
        screen.output().print(f"left out: {said}", markup=False, soft_wrap=True)
    del want
    times = interleave(
        {name: Contender(call=call) for name, call in calls.items()},
        rounds=arguments.rounds,
        batch=_BATCH,
        settle=case.ranks.settle,
        stopwatch=device_time if on_gpu else host_time,
    )
    if what == "rows":
        moved = 2 * _leaving(case)
        rates = {name: moved / statistics.median(t) for name, t in times.items()}
        world["GB/s that leave rank 0"] = rates
    for name in [*calls][1:]:
        yield Row(
            name=what, sizes=str(case.size), unit="ms", ours=times["mdfuse"],
            against=times[name], alternative=name, limit=_LIMITS[what],
        )  # fmt: skip


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layer", choices=[*LAYERS], default="64")
    parser.add_argument("--what", help=f"some of {','.join(_LIMITS)}; by default all")
    parser.add_argument("--tokens", type=int, help="of each rank")
    parser.add_argument("--skew", type=float, default=0.0, help="0: all experts are as likely")
    parser.add_argument("--carrier", help="mdfuse's backend, where it is another one than torch's")
    parser.add_argument("--compiler", default="inductor", help="the backend of torch.compile")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="a GPU if there is one")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--small", action="store_true", help="a layer of some thousand weights")
    parser.add_argument("--output", type=Path, help="by default in benchmarks/results")
    return parser.parse_args()


def main() -> None:
    """Measure, print, store."""
    arguments = _arguments()
    chosen = [*_LIMITS] if arguments.what is None else arguments.what.split(",")
    if wrong := [name for name in chosen if name not in _LIMITS]:
        screen.fail(f"--what {', '.join(wrong)}: there are {', '.join(_LIMITS)}")
    ranks = start_or_alone(arguments.device, arguments.carrier)
    size = LAYERS["small" if arguments.small else arguments.layer]
    size = replace(size, tokens=arguments.tokens or size.tokens)
    if size.experts % ranks.comm.size:
        screen.fail(f"{size.experts} experts by hand are for ranks that divide them")
    case = drawn(ranks, size, arguments.skew)
    name = arguments.carrier or ranks.comm.backend
    path: Path = arguments.output or _RESULTS / f"experts-{name}-{ranks.comm.size}.json"
    settings = {k: v and str(v) for k, v in vars(arguments).items() if k != "output"}
    world: dict[str, Any] = {"device": str(ranks.device), "ranks": ranks.comm.size, "errors": {}}
    measured: list[Row] = []
    for what in chosen:
        measured += rows(case, what, arguments, world)
    if ranks.comm.rank == 0:
        show(screen.output(), f"experts on {ranks.name}, skew {arguments.skew:g}", measured)
        for contender, rate in world.get("GB/s that leave rank 0", {}).items():
            screen.output().print(f"rows, {contender}: {rate:.3g} GB/s leave rank 0")
        Report(benchmark="experts", arguments=settings, rows=measured, where=world).write(path)
        screen.output().print(f"written: {path}", soft_wrap=True)
    ranks.close()


if __name__ == "__main__":
    main()
