"""One layer of a language model whose positions are split: mdfuse beside others on the same ranks.

./launch/torchrun 2 benchmarks/context.py                                  # 131,072 positions
./launch/torchrun 4 benchmarks/context.py --tokens 262144 --alone 131072   # one GPU holds half
./launch/torchrun 2 benchmarks/context.py --what decode                    # 524,288 in a cache
./launch/torchrun 2 benchmarks/context.py --device cpu --small --compiler aot_eager

`layer`: a layer of Llama-3-8B, forward and backward from a given gradient to those of the input and
of all weights, which ranks add up. mdfuse imports the module, positions in zigzag order, once for
each form of `--forms`, which `Options(context=)` takes. Beside it: Ulysses by hand (all-to-all to
heads and back), torch's `context_parallel` (GPUs only), and the share of one device alone: its time
divided by the ranks. Where one device does not hold all positions, `--alone` has fewer, and the
time of all is that of a parabola through two lengths: products grow with positions, attention with
their square.

`decode`: a token of a request that attends to a cache (`--cache`) whose positions are split, beside
the same on one device, by mdfuse and by torch: attention alone, and a layer with its products.

Results at 64 positions per rank are compared with f64.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import _context_decode
import torch
import torch.distributed as dist
from _context_decode import Decode
from _measure import Contender, Report, Row, device_time, host_time, interleave, show
from _positions import positions, ring, ring_attention
from _ranks import Ranks, start_or_alone
from _whole_nets import SMALL, Block, Size, angles
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import mdfuse as mf
from mdfuse import Shard
from mdfuse.cli import screen

_RESULTS = Path(__file__).parent / "results"

#: A layer of Llama-3-8B.
_LLAMA = Size(hidden=4096, heads=32, kv_heads=8, units=14_336, rows=1, tokens=131_072)

#: Positions of the cache of a decode.
_CACHE = 524_288

#: Positions of each rank where results are compared with f64.
_FEW = 64

#: dtype -> the largest error of a result, relative to its norm.
_TOLERANCE = {torch.bfloat16: 4e-2, torch.float32: 1e-4}

#: Peer -> the largest multiple of its time.
_LIMITS = {"ulysses": 1.0, "context_parallel": 1.0, "alone": 1.05}

#: A step: this rank's part of x and of the gradient of y -> y, and gradients of x and all weights.
Step = Callable[[Tensor, Tensor], list[Tensor]]


class Layer(nn.Module):
    """A block with the angles of the positions that it is given."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.block = Block(size, recompute=False)
        for name, numbers in angles(size).items():
            self.register_buffer(name, numbers, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.block(x, self.cos.to(x.dtype), self.sin.to(x.dtype))
        return y


class _Heads(torch.autograd.Function):
    """All-to-all of heads and positions, [1, heads, positions, head]; gradients go the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gathered: int, split: int) -> Tensor:
        """Split one dim over the ranks, and gather another."""
        ctx.dims = gathered, split
        return _exchanged(x, gathered, split)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Split what was gathered."""
        gathered, split = ctx.dims
        return _exchanged(gradients[0], split, gathered), None, None


def _exchanged(x: Tensor, gathered: int, split: int) -> Tensor:
    given = torch.stack(x.chunk(dist.get_world_size(), split))
    taken = torch.empty_like(given)
    dist.all_to_all_single(taken, given)
    return torch.cat([*taken], gathered)


class UlyssesBlock(Block):
    """The block by hand, with positions split outside of attention, and heads inside of it."""

    def averaged(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend to all positions, by this rank's heads."""
        q, k, v = (_Heads.apply(x.contiguous(), 2, 1) for x in (q, k, v))
        y: Tensor = _Heads.apply(super().averaged(q, k, v).contiguous(), 1, 2)
        return y


@dataclass(kw_only=True)
class Case:
    """A layer, and the numbers of its weights.

    Attributes:
        ranks: the ranks that share it.
        size: its extents.
        dtype: of values and weights.
        compiler: the backend of torch.compile.
    """

    ranks: Ranks
    size: Size
    dtype: torch.dtype
    compiler: str

    def layer(self, dtype: torch.dtype | None = None) -> Layer:
        """Return the layer on the device, with numbers that are alike on all ranks."""
        device = self.ranks.device
        with device:
            layer = Layer(self.size)
        generator: Any = torch.Generator(device).manual_seed(0)
        with torch.no_grad():
            for x in layer.parameters():
                if x.ndim > 1:
                    x.normal_(0, x.shape[1] ** -0.5, generator=generator)
        return layer.to(device, self.dtype).to(dtype or self.dtype)

    def drawn(self) -> tuple[Tensor, Tensor]:
        """Return the whole input and the gradient of the output, alike on all ranks."""
        generator: Any = torch.Generator(self.ranks.device).manual_seed(1)
        shape = 1, self.size.tokens, self.size.hidden
        x, seed = (
            torch.empty(shape, device=self.ranks.device).normal_(generator=generator)
            for _ in range(2)
        )
        return x.to(self.dtype), seed.to(self.dtype)

    @property
    def mesh(self) -> mf.DeviceMesh:
        return mf.DeviceMesh.arange(cp=self.ranks.comm.size)


# -- contenders ------------------------------------------------------------------------------------


def _ours(case: Case, form: Any) -> Step:
    """Import the module, and take gradients of it."""
    mesh, split = case.mesh, {"cp": Shard(1, zigzag=True)}
    shape = 1, case.size.tokens, case.size.hidden
    module = case.layer()
    names = {name for name, _ in module.named_parameters()}
    given = torch.empty(shape, dtype=case.dtype, device=case.ranks.device)
    model = mf.from_torch(module, (given,), mesh=mesh, layouts={"input:x": split})
    with mf.FusionDefinition("layer") as fd:
        x, seed = (fd.define_tensor(shape, case.dtype, mesh, split, name=n) for n in ("x", "seed"))
        y, weights = model.record(x, name="layer")
        trained = [w for n, w in weights.items() if n.partition(".")[2] in names]
        of_x, *of_weights = mf.grad(y, [x, *trained], seed=seed)
        results = [(y, split), (of_x, split), *((w, {}) for w in of_weights)]
        for value, layout in results:
            fd.add_output(fd.ops.set(value).on(mesh, layout))
    program = mf.compile(fd, mf.Options(context=form))
    parts = model.load(rank=case.ranks.comm.rank, device=case.ranks.device)
    held = dict(zip(weights, parts, strict=True))
    order = [*program.fusion.inputs]
    return lambda x, seed: program.run(*({**held, "x": x, "seed": seed}[n] for n in order))


def _by_hand(case: Case, layer: Layer, compiler: str | None, is_split: bool) -> Step:
    """Return a step of a module under torch.compile; ranks add up the gradients of weights."""
    function = torch.compile(layer, backend=compiler) if compiler else layer
    weights = [*layer.parameters()]

    def step(x: Tensor, seed: Tensor) -> list[Tensor]:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            y = function(leaf)
            of_x, *of_weights = torch.autograd.grad(y, [leaf, *weights], seed)
        for gradient in of_weights if is_split else ():
            dist.all_reduce(gradient)
        return [y.detach(), of_x, *of_weights]

    return step


def _ulysses(case: Case) -> Step:
    """Return the layer by hand, on positions in their order."""
    layer, ranks = case.layer(), case.ranks.comm
    block = UlyssesBlock(case.size, recompute=False)
    layer.block = _with_weights_of(block, layer.block)
    at = positions(case.size.tokens, ranks.size, ranks.rank, is_zigzag=False)
    layer.cos, layer.sin = (x[at.to(x.device)].contiguous() for x in (layer.cos, layer.sin))
    return _by_hand(case, layer, case.compiler, is_split=True)


def _with_weights_of(block: Block, other: Block) -> Block:
    for name, weight in other.named_parameters():
        owner, _, leaf = name.rpartition(".")
        setattr(block.get_submodule(owner), leaf, weight)
    return block


def _context_parallel(case: Case) -> Step:
    """Return torch's ring, whose attention is patched while it runs; it balances positions."""
    device = case.ranks.device
    mesh = init_device_mesh(device.type, (case.ranks.comm.size,))
    layer, size = case.layer(), case.ranks.comm.size
    at = positions(case.size.tokens, size, case.ranks.comm.rank, is_zigzag=True)
    layer.cos, layer.sin = (x[at.to(x.device)].contiguous() for x in (layer.cos, layer.sin))
    of = case.size
    way = ring_attention(case.ranks, case.dtype, of.heads, of.kv_heads, of.head)
    if way is None:
        raise RuntimeError("torch has no kernels for it")
    layer.block.averaged = way
    step = _by_hand(case, layer, None, is_split=True)  # torch.compile does not see the patch

    def run(x: Tensor, seed: Tensor) -> list[Tensor]:
        with ring(mesh, device):
            return step(x, seed)

    return run


def contenders(case: Case, forms: Sequence[str]) -> dict[str, tuple[Callable[[], Step], bool]]:
    """Return what makes each contender's step, and whether its positions are in zigzag order."""
    makes: dict[str, tuple[Callable[[], Step], bool]] = {
        f"mdfuse, {form}": (partial(_ours, case, form), True) for form in forms
    }
    if case.size.kv_heads % case.ranks.comm.size == 0:
        makes["ulysses"] = partial(_ulysses, case), False
    if case.ranks.device.type == "cuda":
        makes["context_parallel"] = partial(_context_parallel, case), True
    return makes


# -- values ----------------------------------------------------------------------------------------


def _mine(case: Case, whole: Tensor, is_zigzag: bool) -> Tensor:
    comm = case.ranks.comm
    at = positions(case.size.tokens, comm.size, comm.rank, is_zigzag).to(whole.device)
    return whole[:, at].contiguous()


def check(case: Case, forms: Sequence[str]) -> dict[str, float]:
    """Return the largest error of each contender at few positions.

    A version of torch may lack a kernel for its own way: it is named, and left out.

    Raises:
        AssertionError: an error is too large.
    """
    case = replace(case, size=replace(case.size, tokens=_FEW * case.ranks.comm.size))
    x, seed = case.drawn()
    wide = case.layer(torch.float64)
    want = _by_hand(case, wide, None, is_split=False)(x.double(), seed.double())
    norm, errors = torch.linalg.vector_norm, dict[str, float]()
    for name, (make, is_zigzag) in contenders(case, forms).items():
        mine = partial(_mine, case, is_zigzag=is_zigzag)
        try:
            step = make()
            for _ in range(3):  # the third one replays
                got = step(mine(x), mine(seed))
        except (RuntimeError, NotImplementedError) as error:
            if name != "context_parallel":
                raise
            screen.output().print(f"left out: {name}: {error}", markup=False, soft_wrap=True)
            continue
        right = [mine(want[0]), mine(want[1]), *want[2:]]
        each = [float(norm(a.double() - b) / norm(b)) for a, b in zip(got, right, strict=True)]
        errors[name] = max(each)
        if not errors[name] < _TOLERANCE[case.dtype]:
            raise AssertionError(f"{name}: relative errors of {[f'{x:.2g}' for x in each]}")
    return errors


# -- measuring -------------------------------------------------------------------------------------


def _entered(case: Case, make: Callable[[], Callable[[], object]]) -> tuple[Any, int]:
    """Return a call, and the bytes at its peak with all that it holds; 0 on CPUs."""
    gc.collect()
    is_gpu = case.ranks.device.type == "cuda"
    before = torch.cuda.memory_allocated() if is_gpu else 0
    call = make()
    for _ in range(2):  # the second one captures
        call()
    case.ranks.settle()
    if is_gpu:
        torch.cuda.reset_peak_memory_stats()
    call()
    case.ranks.settle()
    return call, torch.cuda.max_memory_allocated() - before if is_gpu else 0


def _timed(
    case: Case, calls: Mapping[str, Callable[[], object]], rounds: int
) -> dict[str, list[float]]:
    return interleave(
        {name: Contender(call=call) for name, call in calls.items()},
        rounds=rounds,
        batch=1,
        settle=case.ranks.settle,
        stopwatch=device_time if case.ranks.device.type == "cuda" else host_time,
        warm=2,
    )


def alone(case: Case, tokens: int, rounds: int) -> tuple[list[float], int]:
    """Return nanoseconds that all positions take one device, and its bytes at the peak.

    Args:
        case: of all positions.
        tokens: positions that one device holds.
        rounds: how often it is measured.
    """
    lengths = [tokens] if tokens == case.size.tokens else [tokens // 2, tokens]
    times, peak = list[list[float]](), 0
    for n in lengths:
        fewer = replace(case, size=replace(case.size, tokens=n))

        def make(fewer: Case = fewer) -> Callable[[], object]:
            step = _by_hand(fewer, fewer.layer(), case.compiler, is_split=False)
            return partial(step, *fewer.drawn())

        call, peak = _entered(case, make)
        times.append(_timed(case, {"alone": call}, rounds)["alone"])
        del call
    if len(lengths) == 1:
        return times[0], peak
    (n, m), whole = lengths, case.size.tokens
    totals = []
    for a, b in zip(*times, strict=True):
        square = (b / m - a / n) / (m - n)
        totals.append(whole * (a / n + square * (whole - n)))
    return totals, peak * whole // m


def rows(case: Case, arguments: argparse.Namespace, world: dict[str, Any]) -> Iterator[Row]:
    """Measure all contenders in turns, and one device alone behind them."""
    forms = arguments.forms.split(",")
    world["errors"] |= check(case, forms)
    x, seed = case.drawn()
    calls, peaks = dict[str, Callable[[], object]](), dict[str, int]()
    for name, (make, is_zigzag) in contenders(case, forms).items():
        if name not in world["errors"]:
            continue

        def with_inputs(make: Callable[[], Step] = make, order: bool = is_zigzag) -> Any:
            return partial(make(), _mine(case, x, order), _mine(case, seed, order))

        calls[name], peaks[name] = _entered(case, with_inputs)
    times = _timed(case, calls, arguments.rounds)
    calls.clear()
    mf.debug.FusionCache.reset()
    gc.collect()
    whole, peak = alone(case, arguments.alone or case.size.tokens, arguments.rounds)
    count = case.ranks.comm.size
    times["alone"], peaks["alone"] = [t / count for t in whole], peak
    world["peaks"] = peaks
    sizes = f"{case.size.tokens} positions, {case.size.hidden} wide"
    for name in (n for n in times if n.startswith("mdfuse")):
        for peer in (n for n in times if not n.startswith("mdfuse")):
            against = f"1/{count} of one device" if peer == "alone" else peer
            yield Row(
                name=name, sizes=sizes, unit="ms", ours=times[name], against=times[peer],
                alternative=against, limit=_LIMITS[peer] if name == "mdfuse, auto" else None,
            )  # fmt: skip
        if peak:
            yield Row(
                name=f"{name}, peak", sizes=sizes, unit="MiB", ours=[peaks[name]],
                against=[peak], alternative="one device", limit=0.55 if count == 2 else None,
            )  # fmt: skip


def decoded(case: Case, arguments: argparse.Namespace, world: dict[str, Any]) -> Iterator[Row]:
    """Measure a token that attends to a cache."""
    size = replace(case.size, tokens=arguments.cache or (256 if arguments.small else _CACHE))
    decode = Decode(
        ranks=case.ranks, size=replace(size, rows=arguments.requests), dtype=case.dtype,
        compiler=case.compiler, world=world,
    )  # fmt: skip
    world["errors"] |= _context_decode.check(decode, _FEW, _TOLERANCE[case.dtype])
    yield from _context_decode.rows(decode, arguments.rounds)


#: What is measured -> by what.
_PARTS = {"layer": rows, "decode": decoded}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--what", default="layer", help="some of layer,decode")
    parser.add_argument("--cache", type=int, help="positions of a cache; by default 524,288")
    parser.add_argument("--requests", type=int, default=1, help="whose tokens are decoded at once")
    parser.add_argument("--tokens", type=int, help="positions of all ranks")
    parser.add_argument("--alone", type=int, help="positions of one device alone; by default all")
    parser.add_argument("--forms", default="auto", help="some of auto,gather,heads,ring")
    parser.add_argument("--compiler", default="inductor", help="the backend of torch.compile")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="a GPU if there is one")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--small", action="store_true", help="a layer of some thousand weights")
    parser.add_argument("--output", type=Path, help="by default in benchmarks/results")
    return parser.parse_args()


def main() -> None:
    """Measure, print, store."""
    arguments = _arguments()
    ranks = start_or_alone(arguments.device)
    is_gpu = ranks.device.type == "cuda"
    size = replace(SMALL, rows=1, tokens=256) if arguments.small else _LLAMA
    size = replace(size, tokens=arguments.tokens or size.tokens)
    if ranks.comm.size == 1 or size.tokens % (2 * ranks.comm.size):
        screen.fail(f"{size.tokens} positions for {ranks.comm.size} ranks: two equal parts of each")
    case = Case(
        ranks=ranks, size=size, dtype=torch.bfloat16 if is_gpu else torch.float32,
        compiler=arguments.compiler,
    )  # fmt: skip
    path: Path = arguments.output or _RESULTS / f"context-{ranks.name}.json"
    settings = {k: v and str(v) for k, v in vars(arguments).items() if k != "output"}
    parts = arguments.what.split(",")
    if wrong := [x for x in parts if x not in _PARTS]:
        screen.fail(f"--what {', '.join(wrong)}: there are {', '.join(_PARTS)}")
    world: dict[str, Any] = {"device": str(ranks.device), "ranks": ranks.comm.size, "errors": {}}
    measured = [row for x in parts for row in _PARTS[x](case, arguments, world)]
    if ranks.comm.rank == 0:
        show(screen.output(), f"a layer with split positions on {ranks.name}", measured)
        Report(benchmark="context", arguments=settings, rows=measured, where=world).write(path)
        screen.output().print(f"written: {path}", soft_wrap=True)
    ranks.close()


if __name__ == "__main__":
    main()
