"""The cost of same bits: an MLP forward, and its step of training, beside default options.

python benchmarks/same_bits.py                     # one process, or one GPU
launch/torchrun 2 benchmarks/same_bits.py          # ranks split the rows, on gloo, or two GPUs
python benchmarks/same_bits.py --quick             # only to see that it runs
python benchmarks/same_bits.py --full              # 8,192 rows of 4096 -> 16384 -> 4096, in bf16

Both run in turns on the same inputs, without overlap; on CPUs the time of the processor counts, so
that other work on the machine does not. Results are compared with those of default options before.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from _measure import Contender, Report, Row, device_time, interleave, processor_time, show
from _ranks import Ranks, start_or_alone
from torch import Tensor

import mdfuse as mf
from mdfuse import Shard
from mdfuse.cli import screen

_RESULTS = Path(__file__).parent / "results"

#: How many times as long a GPU may take.
_LIMIT = 1.3

#: Rows, width and inner width, and the dtype.
_SIZES = {
    "quick": (64, 16, 32, torch.float32),
    "usual": (2048, 256, 1024, torch.float32),
    "full": (8192, 4096, 16384, torch.bfloat16),
}


def program(ranks: Ranks, size: str, trains: bool, options: mf.Options) -> mf.Program:
    """An MLP whose rows ranks split; with `trains` its step of SGD, else the forward."""
    rows, width, inner, dtype = _SIZES[size]
    with mf.FusionDefinition("step" if trains else "forward") as fd:
        x = fd.define_tensor([rows, width], dtype, mesh=ranks.mesh, layout={"tp": Shard(0)})
        w = fd.define_tensor([inner, width], dtype, mesh=ranks.mesh)
        v = fd.define_tensor([width, inner], dtype, mesh=ranks.mesh)
        y = fd.ops.linear(fd.ops.gelu(fd.ops.linear(x, w)), v)
        if not trains:
            fd.add_output(y)
        else:
            loss = (y * y).mean()
            for weight, slope in zip((w, v), mf.grad(loss, [w, v]), strict=True):
                fd.add_output(weight - slope * 1e-3)
            fd.add_output(loss)
    return mf.compile(fd, options)


def inputs(ranks: Ranks, size: str) -> list[Tensor]:
    """This rank's rows, and the matrices."""
    rows, width, inner, dtype = _SIZES[size]
    generator = torch.Generator().manual_seed(0)
    shapes = ((rows, width), (inner, width), (width, inner))
    x, w, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    x = mf.shard_tensor(x, ranks.mesh, {"tp": Shard(0)}, rank=ranks.comm.rank)
    return [part.clone().to(ranks.comm.device) for part in (x, w * width**-0.5, v * inner**-0.5)]


def rows_of(ranks: Ranks, size: str, rounds: int) -> Iterator[Row]:
    """Yield the times of both programs, and the bytes that a rank receives.

    Raises:
        AssertionError: results differ by more than rounding.
    """
    given, is_gpu = inputs(ranks, size), ranks.comm.device.type == "cuda"
    count, width, inner, dtype = _SIZES[size]
    sizes = f"{count} rows, {width} -> {inner} -> {width}, {str(dtype).removeprefix('torch.')}"
    for trains in (False, True):
        name = "a step of training" if trains else "forward"
        same, usual = (
            program(ranks, size, trains, mf.Options(same_bits=flag, overlap="never"))
            for flag in (True, False)
        )
        for a, b in zip(same.run(*given), usual.run(*given), strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
        times = interleave(
            {
                "same": Contender(call=partial(same.run, *given)),
                "usual": Contender(call=partial(usual.run, *given)),
            },
            rounds=rounds,
            batch=1,
            settle=ranks.settle,
            stopwatch=device_time if is_gpu else processor_time,
        )
        yield Row(
            name=f"{name} on {ranks.comm.size} rank{'s' * (ranks.comm.size > 1)}",
            sizes=sizes,
            unit="ms",
            ours=times["same"],
            against=times["usual"],
            alternative="default options",
            limit=_LIMIT if is_gpu and size == "full" and not trains else None,
        )
        yield Row(
            name=f"{name}: bytes that a rank receives",
            sizes=sizes,
            unit="MiB",
            ours=[float(same.bytes_received(ranks.comm.rank))],
            against=[float(usual.bytes_received(ranks.comm.rank))],
            alternative="default options",
            kind="added",
            limit=None,
        )


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path, help="by default in benchmarks/results")
    parser.add_argument("--quick", action="store_true", help="only to see that it runs")
    parser.add_argument("--full", action="store_true", help="the sizes of the limit, on GPUs")
    arguments = parser.parse_args()
    size = "quick" if arguments.quick else "full" if arguments.full else "usual"
    torch.set_grad_enabled(False)
    ranks = start_or_alone(None)
    comm = ranks.comm
    all_rows = [*rows_of(ranks, size, 2 if arguments.quick else arguments.rounds)]
    where = {"backend": comm.backend, "ranks": comm.size, "device": comm.device.type}
    if comm.rank == 0:
        path = arguments.output or _RESULTS / f"same_bits-{comm.size}-{comm.device.type}.json"
        show(screen.output(), "what same bits cost", all_rows)
        given = {k: v for k, v in vars(arguments).items() if k != "output"}
        Report(benchmark="same_bits", arguments=given, rows=all_rows, where=where).write(path)
        screen.output().print(f"written: {path}", soft_wrap=True)


if __name__ == "__main__":
    main()
