"""Host time of one post: torch.distributed, its process group's own methods, and the fast lane.

./launch/torchrun 2 benchmarks/posting_lanes.py

An all-gather, prepared once, posted and waited for on the same buffers. Needs two GPUs and nccl4py.
Prints one table and stores it with every round.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _measure import Contender, Report, Row, interleave, show
from _ranks import Ranks, choose_backend, start
from torch import Tensor

from mdfuse.backends.base import Buffer, PostSite, Prepared
from mdfuse.backends.nccl import nccl_library as nccl_library
from mdfuse.backends.nccl.cuda_driver import CudaDevice
from mdfuse.backends.nccl.lane import NcclLane
from mdfuse.cli import screen
from mdfuse.layouts.call import Call
from mdfuse.runtime.fast_lane import Lanes
from mdfuse.runtime.watch.watch import Watch
from mdfuse.torch_private import AllgatherOptions, PrefixStore

_RESULTS = Path(__file__).parent / "results"

#: Posts between two waits for the device: each is up to five entries of its queue of about 1,000.
_BATCH = 100

_Calls = Sequence[tuple[Callable[..., Any], tuple[Any, ...]]]


def _lanes(ranks: Ranks) -> Lanes:
    store = PrefixStore("benchmark", ranks.comm.store)
    capturing = torch._C._cuda_isCurrentStreamCapturing
    watch = Watch(rank=ranks.comm.rank, timeout_s=120, store=store, is_capturing=capturing)
    binding, device = nccl_library.load(), CudaDevice(ranks.device)
    return Lanes(rank=ranks.comm.rank, binding=binding, device=device, watch=watch)


def _bound(calls: Sequence[Prepared], src: Tensor, dst: Tensor) -> _Calls:
    """Prepared calls with the addresses in them."""
    sides = {"src": src.data_ptr(), "dst": dst.data_ptr()}

    def given(argument: Any) -> Any:
        return sides[argument.side] if isinstance(argument, Buffer) else argument

    bound = []
    for call in calls:
        assert callable(call.run)  # a lane's are functions, no names of methods
        bound.append((call.run, tuple(map(given, call.args))))
    return bound


def _walk(calls: _Calls) -> None:
    for run, arguments in calls:
        run(*arguments)


def _lane_call(lane: NcclLane, src: Tensor, dst: Tensor, at_once: bool) -> Callable[[], None]:
    call = Call(kind="Allgather", team=lane.team, rank=dist.get_rank())
    stream = torch.cuda.current_stream().cuda_stream
    posting = lane.prepare(
        call, [src], [dst], PostSite(stream=stream, at_once=at_once, where="posting_lanes.py")
    )
    assert posting is not None and posting.wait is not None
    return partial(_walk, _bound((*posting.post, *posting.wait), src, dst))


def _contenders(ranks: Ranks, lane: NcclLane, src: Tensor, dst: Tensor) -> dict[str, Any]:
    gather, options = ranks.group._allgather_base, AllgatherOptions()

    def through_dist() -> None:
        work = dist.all_gather_into_tensor(dst, src, async_op=True)
        assert work is not None
        work.wait()

    def through_group() -> None:
        gather(dst, src, options).wait()

    return {
        "dist.": through_dist,
        "process group": through_group,
        "lane, forked": _lane_call(lane, src, dst, at_once=False),
        "lane, at once": _lane_call(lane, src, dst, at_once=True),
    }


def _event() -> Any:
    make: Any = torch.cuda.Event
    return make()


def _pieces(ranks: Ranks, lane: NcclLane, src: Tensor, dst: Tensor) -> dict[str, Any]:
    """Yield the pieces of a post of the lane, and torch's own way of an event."""
    device, stream = CudaDevice(ranks.device), torch.cuda.current_stream()
    handle, event, theirs = device.stream(stream.cuda_stream), device.event(), _event()
    call = Call(kind="Allgather", team=lane.team, rank=ranks.comm.rank)
    posting = lane.prepare(
        call,
        [src],
        [dst],
        PostSite(stream=stream.cuda_stream, at_once=True, where="posting_lanes.py"),
    )
    assert posting is not None
    note, post, mark = _bound(posting.post, src, dst)
    raw = torch._C._CudaEventBase.record
    return {
        "note": partial(_walk, [note]),
        "NCCL's call": partial(_walk, [post]),
        "mark": partial(_walk, [mark]),
        "event record": partial(device.record, event, handle),
        "event wait": partial(device.wait, handle, event, 0),
        "event record, torch": partial(theirs.record, stream),
        "event record, torch without its wrapper": partial(raw, theirs, stream),
    }


def _measured(
    calls: Mapping[str, Callable[[], object]], ranks: Ranks, rounds: int
) -> dict[str, list[float]]:
    contenders = {name: Contender(call=call) for name, call in calls.items()}
    return interleave(contenders, rounds=rounds, batch=_BATCH, settle=ranks.settle)


def _rows(times: Mapping[str, list[float]], base: str, sizes: str, what: str) -> list[Row]:
    return [
        Row(
            name=f"{what}: {name}",
            sizes=sizes,
            unit="us",
            ours=ours,
            against=times[base],
            alternative=base,
            limit=None,
        )
        for name, ours in times.items()
    ]


def _check(calls: Mapping[str, Callable[[], object]], src: Tensor, dst: Tensor) -> None:
    """All contenders bring the same."""
    want = None
    for name, call in calls.items():
        dst.zero_()
        call()
        got = dst.cpu()
        if want is not None and not torch.equal(got, want):
            raise AssertionError(f"{name} gathers something else")
        want = got
    assert want is not None and torch.equal(
        want.chunk(dist.get_world_size())[dist.get_rank()], src.cpu()
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bytes", type=int, default=4096, help="of each rank")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--output", type=Path, help="by default in benchmarks/results")
    parser.add_argument("--quick", action="store_true", help="only to see that it runs")
    return parser.parse_args()


def main() -> None:
    """Measure, print, store."""
    arguments = _arguments()
    refusal = nccl_library.why_not()
    if choose_backend() != "nccl" or refusal:
        because, hint = refusal or ("there are no ranks", "start them by ./launch/torchrun 2 ...")
        screen.fail(f"posting_lanes needs two GPUs and nccl4py: {because}; {hint}")
    ranks = start("nccl", 0, None, "always")
    lanes = _lanes(ranks)
    lane = lanes.open(tuple(range(ranks.comm.size)), PrefixStore("benchmark/id", ranks.comm.store))
    src = torch.full((arguments.bytes // 2,), ranks.comm.rank, dtype=torch.bfloat16)
    src = src.to(ranks.device)
    dst = torch.empty(src.numel() * ranks.comm.size, dtype=src.dtype, device=ranks.device)
    posts, pieces = _contenders(ranks, lane, src, dst), _pieces(ranks, lane, src, dst)
    _check(posts, src, dst)
    rounds = 3 if arguments.quick else arguments.rounds
    sizes = f"{arguments.bytes} bytes, {ranks.comm.size} ranks"
    rows = _rows(_measured(posts, ranks, rounds), "process group", sizes, "all-gather")
    rows += _rows(_measured(pieces, ranks, rounds), "NCCL's call", sizes, "of it")
    if ranks.comm.rank == 0:
        path = arguments.output or _RESULTS / f"posting_lanes-{ranks.name}.json"
        given = {k: v and str(v) for k, v in vars(arguments).items() if k != "output"}
        where = {"backend": "nccl", "ranks": ranks.comm.size, "library": nccl_library.library()}
        show(screen.output(), f"posting lanes on {ranks.name}", rows)
        Report(benchmark="posting_lanes", arguments=given, rows=rows, where=where).write(path)
        screen.output().print(f"written: {path}", soft_wrap=True)
    lane.close()
    lanes.close()
    ranks.close()


if __name__ == "__main__":
    main()
