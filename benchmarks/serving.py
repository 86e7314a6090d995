"""Serving: a token of a decode, host time of it, requests at once, batch sizes, sums over ranks.

python benchmarks/serving.py                                  # one GPU, all rows
python benchmarks/serving.py --rows decode                    # some of them
python benchmarks/serving.py --rows together --requests 32    # fewer requests, in less time
python benchmarks/serving.py --device cpu --small --rounds 2  # only to see that it runs
launch/torchrun 2 benchmarks/serving.py --rows decode,sums    # two GPUs, which split heads
launch/torchrun 2 benchmarks/serving.py --rows decode --carrier symmetric

decode    a Llama with caches as buffers, beside torch.compile(mode="reduce-overhead") of it; of
          several ranks each has some of the heads, beside the same by hand with all-reduces
together  requests at once, by `mf.generate`, beside transformers' continuous batching
sizes     a layer for each of many batch sizes in turn, beside one CUDA graph per power of two
token     a token of one request by `mf.generate`, beside a copy of as many bytes as are read for
          it; and the host's time of it, beside the replay of its graph
sums      of several ranks: a sum over them, added to a residual, and a norm of rows, in a chain of
          32 in one graph, by `symmetric`, in one kernel and apart, and by NCCL, beside it by hand

Numbers are drawn. Before the clock runs, tokens are judged by logits in float64: a token of either
side lies no further behind the largest logit than roundings of its dtype explain.

Phases of `together` are printed as they end; there are as many rounds as `--seconds` has room for.
"""

from __future__ import annotations

import argparse
import copy
import gc
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

import _serving_sums
import torch
from _graphs import HandGraph
from _measure import (
    Contender,
    Report,
    Row,
    Stopwatch,
    eagerly,
    host_time,
    interleave,
    processor_time,
    show,
)
from _ranks import Ranks, start_or_alone
from _replays_stand_in import stand_in
from _serving_models import (
    HEADS,
    behind_causal,
    behind_decoder,
    causal,
    decoder,
    layer,
    layer_shapes,
    split_decoder,
)
from _whole_nets import SIZES, SMALL, Size
from torch import Tensor

import mdfuse as mf
from mdfuse.backends.symmetric.cuda_memory import ask_for_queues
from mdfuse.cli import screen
from mdfuse.plan.graphs import GraphPlan

_RESULTS = Path(__file__).parent / "results"

#: How far a token may lie behind the most probable one, in deviations of its logits.
_BEHIND = {torch.float32: 1e-3, torch.bfloat16: 0.15}

#: How many times as far, where a token of the peer does.
_MOST_BEHIND = 2

#: The distances of two sides whose roundings differ may be so many times apart by chance.
_NOISE = 1.5

#: Bytes of one copy.
_COPY = 1 << 29


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The way in which rows are measured.

    Attributes:
        rounds: turns of each contender.
        compiler: the backend of torch.compile on a CPU.
        level: the `default_compile_level` of transformers' continuous batching.
        chunk: of the engine with several requests.
        requests: how many there are at once.
        answer: tokens that follow each of them.
        seconds: that the row of several requests takes, about; there is one round at least.
        options: of the decode.
        world: told beside the rows, filled while measuring.
    """

    ranks: Ranks
    is_small: bool
    rounds: int
    compiler: str
    level: int
    chunk: int
    requests: int
    answer: int
    seconds: float
    options: mf.Options
    world: dict[str, Any]

    @property
    def device(self) -> torch.device:
        return self.ranks.device

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.is_gpu else torch.float32

    def size(self, **usual: int) -> Size:
        """Llama 3's of 8 billion parameters, or a small one, with other extents."""
        if self.is_small:
            return replace(SMALL, rows=min(usual.pop("rows", 2), 4))
        return replace(SIZES["llama3-8b"], **usual)

    def timed(
        self,
        batch: int,
        rounds: int = 0,
        warm: int = 1,
        stopwatch: Stopwatch | None = None,
        **calls: Any,
    ) -> dict[str, list[float]]:
        """Nanoseconds of each call, until the device is done, unless there is a stopwatch."""
        contenders = {
            n: x if isinstance(x, Contender) else Contender(call=x) for n, x in calls.items()
        }
        rounds = rounds or self.rounds
        settle = self.ranks.settle
        return interleave(
            contenders, rounds=rounds, batch=batch, settle=settle, warm=warm,
            stopwatch=stopwatch or self.until_done,
        )  # fmt: skip

    def until_done(self, calls: Callable[[], None]) -> float:
        """Nanoseconds until the device has done it."""

        def waited() -> None:
            calls()
            if self.is_gpu:
                torch.cuda.synchronize()

        return host_time(waited)

    def emptied(self) -> None:
        """Give memory back that nobody uses."""
        gc.collect()
        if self.is_gpu:
            torch.cuda.empty_cache()

    def judged(self, what: str, **distances: float) -> None:
        """Store how far tokens lie behind the most probable ones.

        Raises:
            AssertionError: further than roundings explain, and than half as far again as those of
                the peer, or than twice as far: both are the largest of few roundings.
        """
        self.world["behind"][what] = distances
        usual = _BEHIND[self.dtype]
        limit = min(max(usual, _NOISE * distances.get("against", 0.0)), _MOST_BEHIND * usual)
        if not distances["ours"] <= limit:
            raise AssertionError(f"{what}: tokens lie behind the best by {distances}, over {limit}")

    def row(
        self, name: str, sizes: str, unit: Any, times: Any, against: str, limit: float, **how: Any
    ) -> Row:
        return Row(
            name=name, sizes=sizes, unit=unit, ours=times["ours"], against=times["against"],
            alternative=against, limit=limit if self.is_gpu and not self.is_small else None, **how,
        )  # fmt: skip

    def passed(self, row: str, began: float, what: str) -> float:
        """Print and store how many seconds a row has taken by now; return them."""
        seconds = perf_counter() - began
        screen.output().print(f"{row}: {what} after {seconds:.0f} s")
        self.world["seconds"].setdefault(row, {})[what] = seconds
        return seconds

    def told_of(self, name: str, program: mf.Program) -> None:
        self.world["eager"] += [f"{name}: {line}" for line in eagerly(program)]


# -- a decode --------------------------------------------------------------------------------------


class _Decode:
    """Feeds each token back; positions begin anew where the caches are full."""

    def __init__(self, step: Callable[[Tensor, Tensor], Tensor], size: Size, device: Any) -> None:
        self.step = step
        self.positions = [torch.tensor([n], device=device) for n in range(size.tokens)]
        self.first = torch.ones(size.rows, 1, dtype=torch.int64, device=device)
        self.n, self.ids = 0, self.first

    def __call__(self) -> None:
        self.ids = self.step(self.ids, self.positions[self.n])
        self.n = (self.n + 1) % len(self.positions)

    def tokens(self, count: int) -> Tensor:
        """The first tokens, [rows, count]."""
        self.n, self.ids, tokens = 0, self.first, [self.first]
        for _ in range(count - 1):
            self()
            tokens.append(self.ids.clone())
        return torch.cat(tokens, 1)


def _decode(plan: Plan) -> Iterator[Row]:
    size = plan.size(rows=4, tokens=2048, layers=6, words=32_000)
    net = decoder(size, plan.dtype, plan.device)
    given = torch.ones(size.rows, 1, dtype=torch.int64), torch.tensor([0])
    comm = plan.ranks.comm
    heads = {name: {"tp": mf.Shard(dim)} for name, dim in HEADS.items()} if comm.size > 1 else None
    model = mf.from_torch(net, given, mesh=plan.ranks.mesh, layouts=heads)
    program = model.compile(plan.options)
    loaded = dict(zip(model.fusion.inputs, model.load(comm=comm), strict=False))
    written = {*model.fusion.reuse.values()}
    step = mf.Step(program, {n: x for n, x in loaded.items() if n in written})
    others = [x for n, x in loaded.items() if n not in written]
    peer = whole = net.to(plan.device)
    if comm.size > 1:
        peer = split_decoder(whole, size, comm.rank, comm.size)
    how: Any = {"mode": "reduce-overhead"} if plan.is_gpu else {"backend": plan.compiler}
    compiled = torch.compile(peer, fullgraph=True, **how)
    ours = _Decode(lambda ids, at: step(*others, ids, at), size, plan.device)
    against = _Decode(lambda ids, at: compiled(ids, at).clone(), size, plan.device)
    pair = [x.tokens(min(32, size.tokens)) for x in (ours, against)]
    wide = copy.deepcopy(whole).double()
    plan.judged("decode", ours=behind_decoder(wide, pair[0]), against=behind_decoder(wide, pair[1]))
    plan.world["decode"] = {"same tokens": (pair[0] == pair[1]).float().mean().item()}
    del wide
    times = plan.timed(24, ours=ours, against=against)
    plan.told_of("decode", program)
    sizes = f"{size.layers} layers, {size.rows} rows, cache of {size.tokens}, {comm.size} ranks"
    limit = 1.0 if comm.size == 1 else 0.9
    yield plan.row("decode: a token", sizes, "ms", times, "reduce-overhead", limit)


# -- requests --------------------------------------------------------------------------------------


def _prompts(words: int, number: int, length: int, seed: int) -> list[list[int]]:
    drawn = torch.Generator().manual_seed(seed)
    return torch.randint(1, words, (number, length), generator=drawn).tolist()


def _answered(engine: Any, prompts: Sequence[list[int]], most: int) -> list[tuple[int, ...]]:
    """The tokens of the answers, of requests that come at once."""
    numbers = [engine.submit(x, max_tokens=most, stop=[]) for x in prompts]
    while engine.step():
        pass
    return [engine.result(n).tokens for n in numbers]


class _Continuous:
    """Transformers' continuous batching; its manager stays from call to call."""

    def __init__(self, net: Any, most: int, plan: Plan) -> None:
        from transformers import GenerationConfig
        from transformers.generation import ContinuousBatchingConfig

        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
        wanted = {"default_compile_level": plan.level, "auto_switch_to_flash": True}
        if plan.is_small:
            wanted |= {"num_blocks": 64, "max_batch_tokens": 64, "page_size": 16}
        known = {x.name for x in fields(ContinuousBatchingConfig)}
        self.net = net
        self.said = {
            "generation_config": GenerationConfig(
                max_new_tokens=most, do_sample=False, eos_token_id=-1, pad_token_id=0
            ),
            "continuous_batching_config": ContinuousBatchingConfig(
                **{name: x for name, x in wanted.items() if name in known}
            ),
            "persistent_manager": True,
        }

    def __call__(self, prompts: Sequence[list[int]]) -> list[tuple[int, ...]]:
        answers = [*self.net.generate_batch([*prompts], **self.said).values()]
        if len(answers) < len(prompts) or any(x.error for x in answers):
            raise AssertionError(f"continuous batching failed: {[x.error for x in answers]}")
        return [tuple(x.generated_tokens) for x in answers]

    def close(self) -> None:
        """Give its caches away."""
        self.net.destroy_cached_continuous_batching_manager()


def _together(plan: Plan) -> Iterator[Row]:
    began = perf_counter()
    requests, length, most = plan.requests, 512, plan.answer
    if plan.is_small:
        requests, length, most = 4, 9, 5
    passed = partial(plan.passed, "together", began)
    size = plan.size(rows=requests)
    net = causal(size, plan.dtype, plan.device)
    chunk = min(plan.chunk, length)
    engine = mf.generate(net, max_batch=requests, chunk=chunk, context=length + most)
    passed("an engine")
    seeds = count()

    def fresh() -> list[list[int]]:
        return _prompts(size.words, requests, length, next(seeds))

    def ours(prompts: Sequence[list[int]]) -> list[tuple[int, ...]]:
        return _answered(engine, prompts, most)

    prompts = fresh()
    mine = ours(prompts)  # plans and graphs, before the peer takes what memory there is
    passed("its first answers")
    net.to(plan.device)
    against = _Continuous(net, most, plan)
    theirs = against(prompts)
    passed("answers of continuous batching")
    against.close()  # its caches take most of the memory
    some = (0, requests - 1)
    plan.judged(
        "together",
        ours=behind_causal(net, [(prompts[n], mine[n]) for n in some], plan.device),
        against=behind_causal(net, [(prompts[n], theirs[n]) for n in some], plan.device),
    )
    plan.emptied()
    passed("logits that judge them")
    pairs = [(a, b) for x, y in zip(mine, theirs, strict=True) for a, b in zip(x, y, strict=True)]
    one = sum(plan.until_done(partial(x, fresh())) for x in (ours, against)) * 1e-9
    left = plan.seconds - passed("a round")
    times = plan.timed(
        1, rounds=max(1, min(plan.rounds, 5, int(left / one))), warm=0,
        ours=Contender(call=ours, fresh=fresh), against=Contender(call=against, fresh=fresh),
    )  # fmt: skip
    passed("all rounds")
    against.close()
    plan.world["together"] = {
        "same tokens": sum(a == b for a, b in pairs) / len(pairs), "chunk": chunk,
        "tokens per second": {k: requests * most / min(x) * 1e9 for k, x in times.items()},
    }  # fmt: skip
    for has_chunk, program in engine.programs.programs.items():
        plan.told_of(f"together, {'mixed' if has_chunk else 'decode'}", program)
    sizes = f"{requests} requests, prompts of {length}, answers of {most}"
    yield plan.row("together: all answers", sizes, "ms", times, "continuous batching", 1.0)


class _Request:
    """A step of an engine with one request, and another one where it is over."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def __call__(self) -> None:
        if not self.engine.step():
            self.engine.submit([1], stop=[])
            self.engine.step()


def _token(plan: Plan) -> Iterator[Row]:
    size, context = plan.size(rows=1), 64 if plan.is_small else 1024
    net = causal(size, plan.dtype, plan.device)
    engine = mf.generate(net, max_batch=1, chunk=0, context=context)
    (prompt,) = _prompts(size.words, 1, 8, 0)
    (mine,) = _answered(engine, [prompt], 24)
    plan.judged("token", ours=behind_causal(net, [(prompt, mine)], plan.device))
    plan.emptied()
    read = sum(x.nbytes for n, x in net.named_parameters() if "embed_tokens" not in n)
    read += engine.programs.cache_bytes
    copy = _copy_of(read, plan.device)
    times = plan.timed(32, ours=_Request(engine), against=copy)
    plan.told_of("token", engine.programs.programs[False])
    seconds = min(times["against"]) * 1e-9
    plan.world["token"] = {
        "bytes read": read, "bytes a second, copied": read / seconds,
        "tokens per second": 1e9 / min(times["ours"]),
    }  # fmt: skip
    sizes = f"{size.layers} layers, context of {context}"
    yield plan.row("token: of one request", sizes, "ms", times, "a copy", 1 / 0.85)
    if not plan.is_gpu:
        stand_in()
        engine = mf.generate(net, max_batch=1, chunk=0, context=context)
    yield _host(plan, engine, sizes)


def _copy_of(moved: int, device: torch.device) -> Callable[[], None]:
    """Copies that read and write so many bytes together."""
    parts = -(-moved // (2 * _COPY))
    source, target = (
        torch.zeros(moved // 2 // parts, dtype=torch.int8, device=device) for _ in "ab"
    )

    def copied() -> None:
        for _ in range(parts):
            target.copy_(source)

    return copied


def _host(plan: Plan, engine: Any, sizes: str) -> Row:
    """Time of a step beyond the replay of its graph; without a GPU a graph does nothing."""
    one, program = _Request(engine), engine.programs.programs[False]
    for _ in range(8):
        one()
    recent = program.plans.recent
    if not isinstance(recent, GraphPlan) or any(r.eager for r in recent.regions):
        raise AssertionError(f"token: not all of it is replayed\n{program.explain()}")
    replay = recent.replays()[-1].replay

    def alone() -> None:
        replay()
        if plan.is_gpu:
            torch.cuda.synchronize()

    times = interleave(
        {"ours": Contender(call=one), "against": Contender(call=alone)},
        rounds=plan.rounds, batch=32, settle=plan.ranks.settle,
        stopwatch=host_time if plan.is_gpu else processor_time,
    )  # fmt: skip
    return plan.row("token: of the host", sizes, "us", times, "replay alone", 25.0, kind="added")


# -- batch sizes -----------------------------------------------------------------------------------


class _ByHand:
    """A layer captured for each power of two; rows that fill up write into a slot of their own.

    Args:
        spare: inputs of that slot, as many rows as there are at most.
    """

    def __init__(self, step: Callable[..., Tensor], spare: Sequence[Tensor], is_gpu: bool) -> None:
        sizes = _powers(len(spare[0])) if is_gpu else ()
        self.graphs = {n: HandGraph(step, [x[:n] for x in spare]) for n in sizes}
        self.step, self.row = step, int(spare[1][0])

    def __call__(self, inputs: Sequence[Tensor]) -> Tensor:
        n = len(inputs[0])
        if not self.graphs:
            return self.step(*inputs)
        graph = self.graphs[1 << (n - 1).bit_length()]
        for static, given in zip(graph.inputs, inputs, strict=True):
            static[:n].copy_(given)
        graph.inputs[1][n:].fill_(self.row)
        graph.graph.replay()
        return graph.output[:n].clone()


def _sizes(plan: Plan) -> Iterator[Row]:
    most = 8 if plan.is_small else 128
    size = replace(plan.size(tokens=256), rows=most + 1)
    shapes = layer_shapes(size)
    drawn: Any = torch.Generator(plan.device).manual_seed(0)
    wide = {
        name: torch.zeros(shape, dtype=plan.dtype, device=plan.device)
        if name in "kv" else torch.empty(shape, dtype=plan.dtype, device=plan.device)
        .normal_(0, 0.02, generator=drawn)
        for name, shape in shapes.items()
    }  # fmt: skip
    program = mf.compile(_sized(size, shapes, plan), mf.Options(sizes={"x.0": _powers(most)}))
    mine = {n: x.clone() if n in "kv" else x for n, x in wide.items()}
    theirs = {n: x.clone() if n in "kv" else x for n, x in wide.items()}

    def ours(inputs: Sequence[Tensor]) -> Tensor:
        return program.run(*mine.values(), *inputs)[-1]

    def by_hand(*inputs: Tensor) -> Tensor:
        return layer(theirs, *inputs, size, lambda c, at, x: c.index_copy_(0, at, x))[-1]

    step: Any = by_hand
    if plan.is_gpu:
        torch._dynamo.config.recompile_limit = 2 * len(_powers(most))
        step = torch.compile(by_hand, dynamic=False, fullgraph=True)
    against = _ByHand(step, _inputs(size, most, plan, most), plan.is_gpu)
    batches = [_inputs(size, n, plan) for n in range(1, most + 1)]
    for x in (*mine.values(), *theirs.values()):
        if x.shape == shapes["k"]:
            x.zero_()
    reference = {n: x.double() for n, x in wide.items()}
    worst = {"ours": 0.0, "against": 0.0}
    for batch in batches:
        x, *others = batch
        *_, y = layer(
            reference, x.double(), *others, size, lambda c, at, x: c.index_copy_(0, at, x)
        )
        for name, call in (("ours", ours), ("against", against)):
            error = float((call(batch).double() - y).norm() / y.norm())
            worst[name] = max(worst[name], error)
    plan.world["sizes"] = {"errors": worst}
    if not all(x < (2e-2 if plan.is_gpu else 1e-5) for x in worst.values()):
        raise AssertionError(f"sizes: relative errors {worst}")
    times = plan.timed(
        1, ours=lambda: [ours(x) for x in batches], against=lambda: [against(x) for x in batches]
    )
    plan.told_of("sizes", program)
    sizes = f"1 to {most} rows, {size.hidden} wide, cache of {size.tokens} each"
    yield plan.row("sizes: each once", sizes, "ms", times, "graphs by hand", 1.2)


def _powers(most: int) -> tuple[int, ...]:
    return tuple(1 << n for n in range(most.bit_length()))


def _sized(size: Size, shapes: dict[str, tuple[int, int]], plan: Plan) -> mf.FusionDefinition:
    mesh, dtype = plan.ranks.mesh, plan.dtype
    with mf.FusionDefinition("slots") as fd:
        w: dict[str, Any] = {
            name: fd.define_tensor(shape, dtype, mesh, name=name) for name, shape in shapes.items()
        }
        x = fd.define_tensor([-1, size.hidden], dtype, mesh, name="x")
        n = x.shape[0]
        at = fd.define_tensor([n], torch.int64, mesh, name="at")
        rows = fd.define_tensor([n, size.tokens], torch.int64, mesh, name="rows")
        seen = fd.define_tensor([n, size.tokens], torch.bool, mesh, name="seen")
        results = layer(w, x, at, rows, seen, size, lambda c, at, x: c.index_copy(0, at, x))
        for name, cache in zip("kv", results[:2], strict=True):
            fd.add_output(cache, reuse=w[name])
        fd.add_output(results[2])
    return fd


def _inputs(size: Size, n: int, plan: Plan, slot: int | None = None) -> list[Tensor]:
    """The token of each of n slots, or of one slot n times."""
    drawn = torch.Generator().manual_seed(n)
    x = torch.randn(n, size.hidden, generator=drawn).to(plan.dtype)
    slots = torch.arange(n) if slot is None else torch.full((n,), slot)
    positions = torch.randint(size.tokens, (n,), generator=drawn) if slot is None else slots * 0
    rows = slots[:, None] * size.tokens + torch.arange(size.tokens)
    seen = torch.arange(size.tokens) <= positions[:, None]
    return [y.to(plan.device) for y in (x, slots * size.tokens + positions, rows, seen)]


# -- the run ---------------------------------------------------------------------------------------

#: In the order in which they run: graphs that do nothing, on CPUs, are for the last one.
_ROWS: dict[str, Callable[[Plan], Iterator[Row]]] = {
    "decode": _decode,
    "together": _together,
    "sizes": _sizes,
    "token": _token,
    "sums": _serving_sums.rows,
}

#: Those that several ranks share; the others are for one.
_SHARED = ("decode", "sums")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", help=f"some of {','.join(_ROWS)}; else all for so many ranks")
    parser.add_argument("--carrier", help="mdfuse's backend along tp: symmetric, or torch's")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a prompt in a step")
    parser.add_argument("--requests", type=int, default=64, help="how many at once")
    parser.add_argument("--answer", type=int, default=128, help="tokens behind each of them")
    parser.add_argument("--seconds", type=float, default=150, help="of the row of them, about")
    parser.add_argument("--level", type=int, default=0, help="transformers' default_compile_level")
    parser.add_argument("--compiler", default="eager", help="of torch.compile on a CPU")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="a GPU if there is one")
    parser.add_argument("--small", action="store_true", help="layers of some thousand weights")
    parser.add_argument("--output", type=Path, help="by default in benchmarks/results")
    return parser.parse_args()


def main() -> None:
    """Measure, print, store."""
    arguments = _arguments()
    chosen = _chosen(arguments.rows)
    ask_for_queues()  # for `symmetric`, before CUDA starts
    ranks = start_or_alone(arguments.device)
    comm = ranks.comm
    chosen = chosen or [name for name in _ROWS if (name in _SHARED) == (comm.size > 1)]
    name = torch.cuda.get_device_name().split()[1].lower() if ranks.device.type == "cuda" else "cpu"
    count = f"-{comm.size}" if comm.size > 1 else ""
    path: Path = arguments.output or _RESULTS / f"serving-{name}{count}.json"
    world: dict[str, Any] = {
        "device": str(ranks.device), "ranks": comm.size, "eager": [], "behind": {}, "seconds": {},
    }  # fmt: skip
    plan = Plan(
        ranks=ranks, is_small=arguments.small, rounds=arguments.rounds, level=arguments.level,
        compiler=arguments.compiler, chunk=arguments.chunk, requests=arguments.requests,
        answer=arguments.answer, seconds=arguments.seconds, world=world,
        options=mf.Options(backend=f"{comm.backend}, tp={arguments.carrier or comm.backend}"),
    )  # fmt: skip
    given = {k: v if v is None else str(v) for k, v in vars(arguments).items() if k != "output"}
    all_rows: list[Row] = []
    for row in (name for name in _ROWS if name in chosen):
        all_rows += _ROWS[row](plan)
        mf.debug.FusionCache.reset()
        torch.compiler.reset()
        plan.emptied()
        if comm.rank == 0:
            Report(benchmark="serving", arguments=given, rows=all_rows, where=world).write(path)
    if comm.rank == 0:
        show(screen.output(), f"serving ({name}{count})", all_rows)
        for line in world["eager"]:
            screen.output().print(f"not compiled or captured: {line}", soft_wrap=True, markup=False)
        screen.output().print(f"written: {path}", soft_wrap=True)
    ranks.close()


def _chosen(text: str | None) -> list[str]:
    """The rows that are asked for; none: all."""
    chosen = text.split(",") if text else []
    if wrong := [name for name in chosen if name not in _ROWS]:
        screen.fail(f"rows {', '.join(wrong)}: there are {', '.join(_ROWS)}")
    ranks, alone = int(os.environ.get("WORLD_SIZE", 1)), [x for x in chosen if x not in _SHARED]
    if ranks > 1 and alone:
        screen.fail(f"rows {', '.join(alone)} are for one rank")
    if "sums" in chosen and ranks < 2:
        screen.fail("row sums needs ranks: ./launch/torchrun 2 benchmarks/serving.py --rows sums")
    return chosen


if __name__ == "__main__":
    main()
