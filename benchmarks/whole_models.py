"""Training steps of a whole model: an imported Llama of 1.2 or 8 billion parameters beside torch.

./launch/torchrun 2 benchmarks/whole_models.py --rows fsdp         # beside FSDP2, layers compiled
./launch/torchrun 2 benchmarks/whole_models.py --rows tp,ddp       # Megatron's by hand; DDP
./launch/torchrun 8 benchmarks/whole_models.py --model llama3-8b --rows fsdp,fsdp_tp --tp 4
./launch/torchrun 2 benchmarks/whole_models.py --rows cp           # beside context_parallel
python benchmarks/whole_models.py                                  # one GPU: torch.compile
./launch/torchrun 2 benchmarks/whole_models.py --device cpu --small --compiler aot_eager

A step is forward, mean loss in f32, backward, clipping and AdamW, in bf16 with f32 masters (heads
split: bf16 alone). Each row runs as it is, and with each layer computed again in the backward
(`--recompute`): `recompute="layers.*"` beside `torch.utils.checkpoint` around each layer. Where
ranks split positions (`cp`), of one sequence of 65,536 unless `--tokens` says so, layers are
computed again alone: both sides together have no room for more.

A start is the time from the module in f32 on the host to the end of the first step. `cold`: no
kernel of it, nor its lowered program, is in the compiler's folder. `warm`: all are, in the same
process. CUDA's libraries are loaded before, once for all. Memory at the peak counts from before the
start to steady steps; working memory is the peak from the second step on, which captures a graph,
beyond the memory that is kept between steps.
Losses: how far the first steps' are from the peer's, beside how far the peer's are apart from its
own without compilation.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch
from _measure import (
    Contender,
    Report,
    Row,
    Spread,
    device_time,
    eagerly,
    host_time,
    interleave,
    origins,
    show,
)
from _ranks import Ranks, start_or_alone
from _whole_nets import SIZES, SMALL, Case, Size, Style, drawn_numbers
from _whole_steps import Running, ours, peers

import mdfuse as mf
from mdfuse.cli import screen

_RESULTS = Path(__file__).parent / "results"
_OURS = "mdfuse"

#: Steps between two looks at the clock.
_BATCH = 3

#: Steps before memory in a steady state is measured: captures, moments.
_SETTLED = 4

#: Positions of the sequence that ranks split.
_POSITIONS = 65_536

#: The largest relative difference of first losses.
_TOLERANCE = 2e-2


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Multiples of the peer's figures that mdfuse must not exceed; None: any."""

    time: float | None = 1.0
    working: float | None = 1.0
    peak: float | None = None
    cold: float | None = None
    warm: float | None = None


#: As multiples of each peer's.
_LIMITS: dict[Style, Limits] = {
    "fsdp": Limits(cold=1.5, warm=1.0),
    "tp": Limits(),
    "fsdp_tp": Limits(),
    "ddp": Limits(),
    "cp": Limits(),
    "alone": Limits(time=0.97, working=None, peak=1.0),
}

#: Losses of 50 steps: times what the peer's are apart.
_LOSSES = 2.0


@dataclass(kw_only=True)
class Figures:
    """A contender's figures; times in nanoseconds, memory in bytes.

    Attributes:
        cold, warm: of a start; no warm one where it was not asked for.
        stages: seconds of a cold start's parts, then of a warm one's.
        held: between steps.
        working: at the peak of a steady step, beyond what is held.
        peak: from before the start on.
        losses: of the first steps.
        times: a step in each round.
    """

    cold: float = 0.0
    warm: float | None = None
    stages: list[dict[str, float]] = field(default_factory=list)
    held: int = 0
    working: int = 0
    peak: int = 0
    losses: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The way in which rows are measured.

    Attributes:
        rounds: turns of each contender.
        losses: steps whose losses are compared; with 0 no eager peer runs.
        warm: whether starts are measured again.
        options: mdfuse's, by style.
        world: told beside the rows, filled while measuring.
    """

    ranks: Ranks
    rounds: int
    losses: int
    warm: bool
    options: Mapping[Style, mf.Options]
    world: dict[str, Any]

    @property
    def is_gpu(self) -> bool:
        return self.ranks.device.type == "cuda"


_Make = Callable[[], Running]


# -- one contender ---------------------------------------------------------------------------------


def _started(plan: Plan, make: _Make) -> tuple[Running, float, float]:
    """Start a contender; return it, the nanoseconds until its first step ended, and its loss."""
    gc.collect()
    plan.ranks.settle()
    begin = time.perf_counter_ns()
    running = make()
    before = time.perf_counter()
    loss = running.loss()
    plan.ranks.settle()
    running.stages["first step"] = time.perf_counter() - before
    return running, float(time.perf_counter_ns() - begin), loss


def _entered(plan: Plan, make: _Make, steps: int) -> tuple[Running, Figures]:
    """Start a contender, take its first steps, and measure its memory."""
    gc.collect()
    before = _allocated(plan, reset=True)
    running, cold, loss = _started(plan, make)
    figures = Figures(cold=cold, stages=[running.stages], losses=[loss])
    first = _peak(plan)
    # The second step captures; later ones allocate nothing, though the graph needs its memory.
    _allocated(plan, reset=True)
    for _ in range(max(steps - 1, _SETTLED)):
        figures.losses.append(running.loss())
    gc.collect()
    held = _allocated(plan, reset=False)
    for _ in range(_SETTLED):
        running()
    plan.ranks.settle()
    figures.held, figures.working = held - before, _peak(plan) - held
    figures.peak = max(first, _peak(plan)) - before
    return running, figures


def _allocated(plan: Plan, reset: bool) -> int:
    plan.ranks.settle()
    if not plan.is_gpu:
        return 0
    if reset:
        torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _peak(plan: Plan) -> int:
    return torch.cuda.max_memory_allocated() if plan.is_gpu else 0


def _forgotten(plan: Plan) -> None:
    """Drop what processes keep of programs, so that a start compiles, or reads its files."""
    mf.debug.FusionCache.reset()
    torch.compiler.reset()
    gc.collect()
    if plan.is_gpu:
        torch.cuda.empty_cache()


# -- one row ---------------------------------------------------------------------------------------


def measured(plan: Plan, case: Case) -> dict[str, Figures]:
    """Run all contenders of a row in turns.

    Raises:
        AssertionError: first losses differ.
    """
    makes: dict[str, _Make] = {_OURS: lambda: ours(case, plan.options[case.style])}
    makes |= {name: lambda m=m: m(case, True) for name, m in peers(case).items()}
    running, figures = dict[str, Running](), dict[str, Figures]()
    for name, make in makes.items():
        running[name], figures[name] = _entered(plan, make, plan.losses)
        _say(f"{case.name}, {name}: {_start_text(figures[name])}")
        if (program := running[name].program) is not None:
            lines = [f"{case.name}: {line}" for line in origins(program)]
            plan.world["functions"] += lines
            _say("; ".join(lines) or f"{case.name}: no function was compiled")
    _check(case, figures)
    times = interleave(
        {name: Contender(call=one) for name, one in running.items()},
        rounds=plan.rounds,
        batch=_BATCH,
        settle=plan.ranks.settle,
        stopwatch=device_time if plan.is_gpu else host_time,
    )
    for name, rounds in times.items():
        figures[name].times = rounds
    program = running[_OURS].program if _OURS in running else None
    if program is not None:
        plan.world["eager"] += [f"{case.name}: {line}" for line in eagerly(program)]
    del program
    running.clear()
    _forgotten(plan)
    for name, make in makes.items() if plan.warm else ():
        one, figures[name].warm, _ = _started(plan, make)
        figures[name].stages.append(one.stages)
        del one
        _forgotten(plan)
    if plan.losses:
        for name, make_of in peers(case).items():
            eager = make_of(case, False)
            figures[f"{name}, eager"] = Figures(losses=[eager.loss() for _ in range(plan.losses)])
            del eager
            _forgotten(plan)
    return figures


def _check(case: Case, figures: Mapping[str, Figures]) -> None:
    """Raise AssertionError unless all contenders begin with one loss."""
    first = {name: x.losses[0] for name, x in figures.items()}
    right = [*first.values()][-1]
    if wrong := {n: x for n, x in first.items() if not abs(x - right) < _TOLERANCE * right}:
        raise AssertionError(f"{case.name}: losses of the first step are {first}: {wrong}")


def rows(plan: Plan, case: Case, figures: Mapping[str, Figures]) -> Iterator[Row]:
    """The rows beside each peer."""
    mine, limits = figures[_OURS], _LIMITS[case.style]
    for name in peers(case):
        peer = figures[name]
        if mine.times:
            yield _row(case, "time of a step", "ms", name, mine.times, peer.times, limits.time)
        if plan.is_gpu:
            for what, limit in (("working", limits.working), ("peak", limits.peak)):
                pair = [getattr(mine, what)], [getattr(peer, what)]
                yield _row(case, f"{what} memory", "MiB", name, *pair, limit)
        yield _row(case, "start, cold", "ms", name, [mine.cold], [peer.cold], limits.cold)
        if mine.warm is not None and peer.warm is not None:
            yield _row(case, "start, warm", "ms", name, [mine.warm], [peer.warm], limits.warm)
        if plan.losses:
            eager = figures[f"{name}, eager"].losses
            pair = [_apart(mine, peer.losses)], [_apart(peer, eager)]
            yield _row(case, f"losses of {plan.losses} steps", "of 1", name, *pair, _LOSSES)


def _row(
    case: Case, what: str, unit: Any, peer: str,
    mine: Sequence[float], theirs: Sequence[float], limit: float | None,
) -> Row:  # fmt: skip
    is_limited = case.ranks.device.type == "cuda"
    return Row(
        name=f"{case.name}: {what}", sizes=case.sizes, unit=unit, ours=mine, against=theirs,
        alternative=peer, limit=limit if is_limited else None,
    )  # fmt: skip


def _apart(one: Figures, losses: Sequence[float]) -> float:
    """Return the mean distance of losses, relative to the other's; at least a rounding of f32."""
    pairs = zip(one.losses, losses, strict=False)
    return max(statistics.fmean(abs(a - b) / abs(b) for a, b in pairs), 2.0**-24)


# -- lines -----------------------------------------------------------------------------------------


def _say(line: str) -> None:
    if screen.is_first():
        screen.output().print(line, markup=False, soft_wrap=True)


def _start_text(x: Figures) -> str:
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in x.stages[0].items())
    memory = (
        f"; held {x.held / 2**30:.2f} GiB, working {x.working / 2**30:.2f}, peak "
        f"{x.peak / 2**30:.2f}" if x.peak else ""
    )  # fmt: skip
    return f"start, cold {x.cold / 1e9:.1f} s ({parts}){memory}; first loss {x.losses[0]:.4f}"


def _show_plan(plan: Plan, case: Case, figures: Mapping[str, Figures]) -> None:
    """Store each contender's figures, and print a line of each."""
    for name, x in figures.items():
        stored = asdict(x)
        if x.times:
            spread = Spread.of(x.times)
            seconds = spread.median * 1e-9
            share = case.utilisation(seconds)
            tokens = case.size.rows * case.size.tokens / seconds
            tokens /= case.shared_by
            stored |= {"utilisation": share, "tokens per second and rank": tokens}
            share_text = "" if share is None else f", {share:.1%} of the device's products"
            warm = "" if x.warm is None else f", start, warm {x.warm / 1e9:.1f} s"
            _say(
                f"{case.name}, {name}: {seconds * 1e3:.2f} ms "
                f"({spread.least * 1e-6:.2f} – {spread.most * 1e-6:.2f}), "
                f"{tokens:,.0f} tokens/s of a rank{share_text}{warm}"
            )
        plan.world["contenders"][f"{case.name}: {name}"] = stored


# -- the run ---------------------------------------------------------------------------------------


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", help="some of fsdp,tp,fsdp_tp,ddp,cp; on one rank there is alone")
    parser.add_argument("--model", choices=[*SIZES], default="llama-1b")
    parser.add_argument("--tp", type=int, help="ranks that split heads in fsdp_tp; by default half")
    parser.add_argument(
        "--recompute", choices=("no", "yes", "both"),
        help="layers computed again; both by default, with positions split yes",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--losses", type=int, default=50, help="steps; 0: no eager peers")
    parser.add_argument("--no-warm", action="store_true", help="starts are measured once")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tokens", type=int, help="of a sequence")
    parser.add_argument("--sequences", type=int, help="of a rank; tp, cp: of all ranks")
    parser.add_argument("--prefetch", type=_bytes, default="layer", help="mdfuse's prefetch_bytes")
    parser.add_argument("--bucket", type=_bytes, default="layer", help="mdfuse's bucket_bytes")
    parser.add_argument("--overlap", choices=("auto", "never", "measure"), default="auto")
    parser.add_argument("--compiler", default="inductor", help="the backend of torch.compile")
    parser.add_argument("--cache", type=Path, help="the compiler's folder; by default a new one")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="a GPU if there is one")
    parser.add_argument("--small", action="store_true", help="layers of some thousand weights")
    parser.add_argument("--output", type=Path, help="by default in benchmarks/results")
    return parser.parse_args()


def _folder(given: Path | None) -> Path:
    """Set the compiler's folder, which all ranks share; return it."""
    run = os.environ.get("TORCHELASTIC_RUN_ID") or str(os.getpid())
    folder = given or Path(tempfile.gettempdir()) / f"whole_models-{run}"
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder.absolute())
    os.environ["TRITON_CACHE_DIR"] = str(folder.absolute() / "triton")
    return folder


def _size(arguments: argparse.Namespace, style: Style) -> Size:
    """The sequences of one rank alone are half of those of one among others, as memory has it."""
    given = {"layers": arguments.layers, "tokens": arguments.tokens, "rows": arguments.sequences}
    usual = asdict(SMALL if arguments.small else SIZES[arguments.model])
    usual |= {"rows": 1} if style in ("alone", "cp") else {}
    usual |= {"tokens": _POSITIONS} if style == "cp" and not arguments.small else {}
    return Size(**usual | {name: x for name, x in given.items() if x})


def _again(arguments: argparse.Namespace, style: Style) -> list[bool]:
    """Return whether layers are computed again, for each case of a row."""
    said = arguments.recompute or ("yes" if style == "cp" else "both")
    return {"no": [False], "yes": [True], "both": [False, True]}[said]


def _chosen(arguments: argparse.Namespace, ranks: Ranks) -> list[Style]:
    """The rows that these ranks can run."""
    possible = ["alone"] if ranks.comm.size == 1 else ["fsdp", "tp", "fsdp_tp", "ddp", "cp"]
    chosen = (
        [x for x in possible if x not in ("fsdp_tp", "cp")]
        if arguments.rows is None
        else arguments.rows.split(",")
    )
    if wrong := [name for name in chosen if name not in get_args(Style)]:
        screen.fail(f"rows {', '.join(wrong)}: there are {', '.join(get_args(Style))}")
    if wrong := [name for name in chosen if name not in possible]:
        count = f"{ranks.comm.size} rank{'s' * (ranks.comm.size > 1)}"
        screen.fail(f"rows {', '.join(wrong)}: on {count} there are {', '.join(possible)}")
    return chosen


def _heads_split(arguments: argparse.Namespace, style: Style, ranks: int) -> int:
    tp: int = arguments.tp or max(ranks // 2, 1)
    if style == "fsdp_tp" and ranks % tp:
        screen.fail(f"--tp {tp}: it divides the number of ranks, {ranks}")
    return {"fsdp_tp": tp, "tp": ranks}.get(style, 1)


def _options(arguments: argparse.Namespace) -> dict[Style, mf.Options]:
    plain: dict[str, Any] = {"overlap": arguments.overlap, "bucket_bytes": arguments.bucket}
    spread: dict[str, Any] = {"reduce_dtype": torch.float32}
    return {
        "fsdp": mf.Options(**plain, **spread, prefetch_bytes=arguments.prefetch),
        # the peer adds activations up in bf16, too
        "tp": mf.Options(**plain, prefetch_bytes=arguments.prefetch),
        "fsdp_tp": mf.Options(**plain, **spread, prefetch_bytes=arguments.prefetch),
        # the peer has all logits at once: 16 chunks add up a gradient that 64 would read and write
        "cp": mf.Options(
            **plain, **spread, prefetch_bytes=arguments.prefetch, logits_bytes=1 << 30
        ),
        "ddp": mf.Options(**{**plain, "bucket_bytes": _of_ddp(arguments.bucket)}, **spread),
        "alone": mf.Options(**plain),
    }


def _bytes(text: str) -> int | str:
    return text if text == "layer" else int(text)


def _of_ddp(bucket: int | str) -> int:
    """Nothing is gathered by layers there: buckets are those of DDP unless bytes are given."""
    return bucket if isinstance(bucket, int) and bucket else 25 << 20


def _warmed(plan: Plan, compiler: str) -> None:
    """Load compilers and libraries before any clock runs, with kernels that no contender has.

    The first contender, mdfuse, would else load cuBLAS and the kernels of attention for all.
    """
    with torch.enable_grad():
        if plan.is_gpu:
            y = torch.ones(1, 2, 64, 64, device=plan.ranks.device, dtype=torch.bfloat16)
            y.requires_grad_()
            (torch.nn.functional.scaled_dot_product_attention(y, y, y) @ y).sum().backward()
        x = torch.ones(3, 5, device=plan.ranks.device, requires_grad=True)
        torch.compile(lambda x: (x.sin() * 3).sum(), backend=compiler)(x).backward()
    module = torch.nn.Linear(3, 5)
    model = mf.from_torch(module, (torch.zeros(2, 3),), mesh=mf.DeviceMesh([0]))
    model.training_step(lambda y: y.sum(), optimizer=mf.optim.sgd).compile()
    _forgotten(plan)


def main() -> None:
    """Measure, print, store."""
    arguments = _arguments()
    folder = _folder(arguments.cache)
    is_new = not any(folder.iterdir())
    ranks = start_or_alone(arguments.device)
    chosen = _chosen(arguments, ranks)
    path: Path = arguments.output or _RESULTS / f"whole_models-{ranks.name}.json"
    sizes = {style: _size(arguments, style) for style in chosen}
    world: dict[str, Any] = {
        "device": str(ranks.device), "ranks": ranks.comm.size,
        "sizes": {style: asdict(size) for style, size in sizes.items()},
        "starts with an empty folder": is_new, "functions": [], "eager": [], "contenders": {},
    }  # fmt: skip
    plan = Plan(
        ranks=ranks, rounds=arguments.rounds, losses=arguments.losses, world=world,
        warm=not arguments.no_warm, options=_options(arguments),
    )  # fmt: skip
    given = {k: v if v is None else str(v) for k, v in vars(arguments).items() if k != "output"}
    _warmed(plan, arguments.compiler)
    numbers = drawn_numbers(sizes[chosen[0]], ranks.device)  # alike, whatever the tokens are
    all_rows: list[Row] = []
    for style, size in sizes.items():
        for recompute in _again(arguments, style):
            case = Case(
                ranks=ranks, style=style, size=size, recompute=recompute,
                compiler=arguments.compiler, numbers=numbers,
                heads_split=_heads_split(arguments, style, ranks.comm.size),
            )  # fmt: skip
            figures = measured(plan, case)
            of_case = [*rows(plan, case, figures)]
            all_rows += of_case
            _show_plan(plan, case, figures)
            if ranks.comm.rank == 0:
                if of_case:
                    show(screen.output(), f"{case.name} on {ranks.name}", of_case)
                report = Report(
                    benchmark="whole_models", arguments=given, rows=all_rows, where=world
                )
                report.write(path)
    for line in world["eager"]:
        _say(f"not compiled or captured: {line}")
    _say(f"written: {path}")
    ranks.settle()
    if ranks.comm.rank == 0 and arguments.cache is None:
        shutil.rmtree(folder, ignore_errors=True)
    ranks.close()


if __name__ == "__main__":
    main()
