"""Several ranks: mdfuse's programs against NCCL and the product in turn, and torch's own ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed._symmetric_memory as symmetric_memory
from _graphs import HandGraph
from _measure import Contender, Row, device_time, eagerly, host_time, interleave
from _overlap_shapes import FORMS, Parts, Shape, compare, definition, figures, run_of
from _ranks import Ranks
from torch import Tensor

import mdfuse as mf

#: Calls of a turn, and clock cycles, about four milliseconds, in which the host queues them.
_FOLLOWING, _AHEAD = 4, 8_000_000

_Call = Callable[[], Tensor]


@dataclass
class Together:
    """The measurement on the ranks of a launcher.

    Attributes:
        ranks: this rank, and torch's process group.
        rounds: how many.
        compiler: the backend of torch.compile.
        left_out: what torch could not run here, and why; filled while measuring.
        eager: what mdfuse ran eagerly, and why; likewise.
    """

    ranks: Ranks
    rounds: int
    compiler: str
    left_out: dict[str, str] = field(default_factory=dict)
    eager: list[str] = field(default_factory=list)

    @property
    def size(self) -> int:
        return self.ranks.comm.size

    @property
    def is_gpu(self) -> bool:
        return self.ranks.device.type == "cuda"

    @property
    def where(self) -> dict[str, object]:
        """The stored facts about the machine."""
        comm = self.ranks.comm
        return {
            "ranks": comm.size,
            "backend": comm.backend,
            "device": str(comm.device),
            "left_out": self.left_out,
            "eager": self.eager,
        }

    def close(self) -> None:
        """Leave the other ranks."""
        self.ranks.close()

    def rows(self, shape: Shape) -> Iterator[Row]:
        """The figures of one shape, whose results are compared first."""
        torch.compiler.reset()
        rank, dtype = self.ranks.comm.rank, torch.bfloat16 if self.is_gpu else torch.float32
        parts = shape.parts(self.size, self.ranks.device, dtype)
        right, mine = shape.right(parts, rank), parts[rank]
        whole = torch.cat([shape.ready(p.x) for p in parts]) if shape.kind == "AG+MM" else mine.x
        del parts
        programs = {name: self._program(shape, k, name, mine) for name, k in FORMS.items()}
        calls: dict[str, Callable[[], object]] = {
            name: run_of(program, mine) for name, program in programs.items()
        }
        peers = {
            "nccl" if self.is_gpu else "gloo": partial(_in_turn, shape, mine),
            "compiled": self._compiled(shape, mine),
        }
        if self.is_gpu:
            peers["torch, fused"] = partial(_fused, shape, mine)
        for name, call in peers.items():
            try:
                compare(f"{shape}, {name}", call(), right)
                calls[name] = self._steady(call)
            except (RuntimeError, NotImplementedError) as error:
                self.left_out[f"{shape}: {name}"] = f"{type(error).__name__}: {error}"
        for name, program in programs.items():
            for _ in range(3):  # eager, captured, replayed
                compare(f"{shape}, {name}", calls[name](), right)  # type: ignore[arg-type]
            self.eager.extend(f"{shape}, {name}: {line}" for line in eagerly(program))
        y = whole.new_empty(shape.rows, shape.columns)
        calls["product"] = self._steady(partial(_product, shape, mine, whole, y))
        calls["communication"] = self._steady(partial(_moved, shape, mine, y))
        times = interleave(
            {name: Contender(call=call) for name, call in calls.items()},
            rounds=self.rounds,
            batch=_FOLLOWING if self.is_gpu else 1,
            settle=self.ranks.settle,
            stopwatch=partial(device_time, ahead=_AHEAD) if self.is_gpu else host_time,
        )
        yield from figures(shape, times, "communication", has_limit=False)

    def _program(self, shape: Shape, pieces: int, name: str, mine: Parts) -> mf.Program:
        options = mf.Options(
            backend=self.ranks.comm.backend,
            graph="always" if self.is_gpu else "never",
            compile="never",
            overlap="never",
        )
        fd = definition(shape, self.ranks.mesh, mine.x.dtype, pieces, name)
        return mf.compile(fd, options)

    def _compiled(self, shape: Shape, mine: Parts) -> _Call:
        """Functional collectives in one compiled function."""
        group = _group()

        def layer(x: Tensor, w: Tensor) -> Tensor:
            if shape.kind == "AG+MM":
                return functional.all_gather_tensor(shape.ready(x), 0, group) @ w
            return functional.reduce_scatter_tensor(x @ w, "sum", 0, group)

        compiled = torch.compile(layer, backend=self.compiler, dynamic=False, fullgraph=True)
        return partial(compiled, mine.x, mine.w)

    def _steady(self, call: Callable[[], object]) -> Callable[[], object]:
        """Return the timed function: on a GPU a graph, whose buffers are the call's."""
        if not self.is_gpu:
            return call
        graph = HandGraph(call, ()).graph

        def replay(_: object = call) -> None:
            graph.replay()

        return replay


def _product(shape: Shape, mine: Parts, whole: Tensor, y: Tensor) -> Tensor:
    """Return the work of a rank, without any communication."""
    shape.ready(mine.x)
    return torch.mm(whole, mine.w, out=y)


def _group() -> str:
    world: Any = dist.group.WORLD
    return str(world.group_name)


def _in_turn(shape: Shape, mine: Parts) -> Tensor:
    """The communication, then the product, or the other way round."""
    if shape.kind == "AG+MM":
        whole = mine.x.new_empty(shape.rows, shape.inner)
        dist.all_gather_into_tensor(whole, shape.ready(mine.x))
        return whole @ mine.w
    part = mine.x @ mine.w
    return _moved(shape, mine, part)


def _moved(shape: Shape, mine: Parts, part: Tensor) -> Tensor:
    """The communication alone."""
    if shape.kind == "AG+MM":
        whole = mine.x.new_empty(shape.rows, shape.inner)
        dist.all_gather_into_tensor(whole, mine.x)
        return whole
    y = part.new_empty(shape.rows // dist.get_world_size(), shape.columns)
    dist.reduce_scatter_tensor(y, part)
    return y


def _fused(shape: Shape, mine: Parts) -> Tensor:
    """Torch's fused operators, over its symmetric memory."""
    group = _group()
    if not symmetric_memory.is_symm_mem_enabled_for_group(group):
        symmetric_memory.enable_symm_mem_for_group(group)
    ops: Any = torch.ops.symm_mem
    if shape.kind == "AG+MM":
        x = shape.ready(mine.x)
        _, (y,) = ops.fused_all_gather_matmul(x, [mine.w], 0, group, return_A=False)
        return y  # type: ignore[no-any-return]
    return ops.fused_matmul_reduce_scatter(mine.x, mine.w, "sum", 0, group)  # type: ignore[no-any-return]
