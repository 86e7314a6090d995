"""Backends against each other: the same communications by each of them, in turn, in one process.

./launch/torchrun 2 benchmarks/backends.py gloo ucx
./launch/mpirun 4 benchmarks/backends.py nccl mpi ucx

The first one is what the others are compared with. A time is that of one post and its wait, until
the device is done, on rank 0; in each turn the ranks begin together. Values are drawn, and checked.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from _measure import Contender, Report, Row, interleave, show
from torch import Tensor

import mdfuse as mf
from mdfuse.backends.base import Poster
from mdfuse.cli import screen
from mdfuse.cli.rich_tables import size_text
from mdfuse.layouts.call import Call

_RESULTS = Path(__file__).parent / "results"

#: Elements of each rank's own tensor.
_SIZES = (4, 64 << 10, 1 << 20, 16 << 20)

_Post = Callable[[], None]


def _drawn(rank: int, elements: int) -> Tensor:
    """A rank's values: small integers, whose sums are exact."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-99, 100, (elements,), generator=generator).float()


def _allreduce(call: Call, k: int) -> tuple[Call, Tensor]:
    return replace(call, reduce_op="sum"), torch.stack([_drawn(r, k) for r in call.team]).sum(0)


def _allgather(call: Call, k: int) -> tuple[Call, Tensor]:
    return call, torch.cat([_drawn(r, k) for r in call.team])


def _alltoall(call: Call, k: int) -> tuple[Call, Tensor]:
    n, i = len(call.team), call.team.index(call.rank)
    counts = tuple(k * (j + 1) // n - k * j // n for j in range(n))
    parts = [_drawn(r, k).split(counts)[i] for r in call.team]
    return replace(call, send_counts=counts, recv_counts=(counts[i],) * n), torch.cat(parts)


def _exchange(call: Call, k: int) -> tuple[Call, Tensor]:
    n, i = len(call.team), call.team.index(call.rank)
    before = call.team[i - 1]
    return replace(call, sends=(call.team[(i + 1) % n],), recvs=(before,)), _drawn(before, k)


#: kind -> (this rank's call, what it must bring), from a call without details and a size.
_KINDS: dict[str, Callable[[Call, int], tuple[Call, Tensor]]] = {
    "Allreduce": _allreduce,
    "Allgather": _allgather,
    "AllToAll": _alltoall,
    "Exchange": _exchange,
}


def _contenders(comm: mf.Communicator, names: list[str], kind: str, size: int) -> dict[str, _Post]:
    """The same post by each backend; what it brings was checked."""
    team, k = tuple(range(comm.size)), max(1, size // 4)
    call, expected = _KINDS[kind](Call(kind=kind, team=team, rank=comm.rank), k)
    src = _drawn(comm.rank, k).to(comm.device)
    contenders: dict[str, _Post] = {}
    for name in names:
        dst = torch.full_like(expected, torch.nan, device=comm.device)
        poster = comm.poster(replace(call, backend=name))

        def post(poster: Poster = poster, dst: Tensor = dst) -> None:
            poster([src], [dst]).wait()
            _finish(comm)

        post()
        if not torch.equal(dst.cpu(), expected):
            raise AssertionError(f"{kind} of {size} bytes by {name} is wrong on rank {comm.rank}")
        contenders[name] = post
    return contenders


def _finish(comm: mf.Communicator) -> None:
    if comm.device.type == "cuda":
        torch.cuda.synchronize(comm.device)


def _settle(comm: mf.Communicator) -> None:
    _finish(comm)
    comm.barrier()


def _rows(comm: mf.Communicator, names: list[str], sizes: list[int], rounds: int) -> list[Row]:
    rows = []
    for kind in _KINDS:
        for size in sizes:
            posts = _contenders(comm, names, kind, size)
            contenders = {name: Contender(call=post) for name, post in posts.items()}
            times = interleave(contenders, rounds=rounds, batch=1, settle=lambda: _settle(comm))
            rows += [
                Row(
                    name=f"{kind}: {name}",
                    sizes=f"{size_text(size)} each, {comm.size} ranks",
                    unit="us",
                    ours=times[name],
                    against=times[names[0]],
                    alternative=names[0],
                    limit=None,
                )
                for name in names[1:]
            ]
    return rows


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("backends", nargs="+", help="two or more")
    parser.add_argument("--bytes", type=int, nargs="+", default=list(_SIZES), help="of each rank")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--output", type=Path, help="by default in benchmarks/results")
    arguments = parser.parse_args()
    if len(arguments.backends) < 2:
        parser.error("name two backends, or more")
    return arguments


def main() -> None:
    """Measure, print, store."""
    arguments = _arguments()
    torch.set_num_threads(1)
    names = arguments.backends
    others = [f"{i}={name}" for i, name in enumerate(names[1:])]  # opens them as well
    comm = mf.init(mf.Options(timeout_s=120.0), ", ".join([names[0], *others]))
    if comm.size == 1:
        screen.fail("one rank has nobody to communicate with: ./launch/torchrun 2 benchmarks/...")
    for name in names:
        comm.prepare([tuple(range(comm.size))], name)
    rows = _rows(comm, names, arguments.bytes, arguments.rounds)
    if comm.rank == 0:
        title = f"{'-'.join(names)}-{comm.size}-{comm.device.type}"
        path = arguments.output or _RESULTS / f"backends-{title}.json"
        given = {k: v for k, v in vars(arguments).items() if k != "output"}
        where = {"backends": names, "ranks": comm.size, "device": comm.device.type}
        show(screen.output(), f"backends: {title}", rows)
        Report(benchmark="backends", arguments=given, rows=rows, where=where).write(path)
        screen.output().print(f"written: {path}", soft_wrap=True)
    comm.close()


if __name__ == "__main__":
    main()
