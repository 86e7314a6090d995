"""Contenders that run a layer: mdfuse, torch by hand, torch.compile, DTensor; also as graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from _graphs import HandGraph
from _layers_models import Case, Gather, as_it_is
from _ranks import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

import mdfuse as mf
from mdfuse.cli import screen

_Call = Callable[[], Tensor]

#: Sums what the ranks have, or None where there is one.
_Join = Callable[[Tensor], Tensor] | None


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A layer with its inputs on this rank.

    Attributes:
        ranks: where.
        case: the layer.
        wholes: its inputs in global view.
        parts: this rank's, which all contenders read.
        options: mdfuse's; None: those of the environment.
        compiler: the backend of torch.compile.
        is_sequence: each rank has some of the tokens of x, and of the result.
        programs: mdfuse's, which are added when they are made.
    """

    ranks: Ranks
    case: Case
    wholes: Mapping[str, Tensor]
    parts: Mapping[str, Tensor]
    options: mf.Options | None
    compiler: str
    is_sequence: bool = False
    programs: list[mf.Program] = field(default_factory=list)


def ours(bench: Bench) -> _Call:
    """A fusion of the layer, and its program's run."""
    case, mesh = bench.case, bench.ranks.mesh
    layouts, dtype = case.layouts(mesh, bench.is_sequence), bench.parts["x"].dtype
    rows = {n for n, (*_, dim) in case.linears().items() if dim == 1}

    def dense(name: str, x: Any) -> Any:
        y = F.linear(x, w[name], w.get(f"{name}_bias"))
        return y.on(mesh, {"tp": mf.Shard(1)}) if bench.is_sequence and name in rows else y

    def gather(x: Any) -> Any:
        return fd.ops.set(x).on(mesh, {}) if bench.is_sequence else x

    with mf.FusionDefinition("layer") as fd:
        w: dict[str, Any] = {
            name: fd.define_tensor(shape, dtype, mesh, layouts[name], name=name)
            for name, (shape, _) in case.shapes().items()
        }
        fd.add_output(case.layer(w, dense, gather))
    program, inputs = mf.compile(fd, bench.options), list(bench.parts.values())
    bench.programs.append(program)
    run = program.run
    return lambda: run(*inputs)[0]


def by_hand(
    bench: Bench, join: _Join = None, enter: _Join = None, gather: Gather = as_it_is
) -> Callable[[Mapping[str, Tensor]], Tensor]:
    """The layer as one function of its inputs, for parts of heads and hidden units.

    Args:
        bench: the layer.
        join: of what the linear layers with split columns give.
        enter: of what the others read, once where several read the same.
        gather: of what linear layers read behind each norm.
    """
    case, rows = bench.case, {n for n, (*_, dim) in bench.case.linears().items() if dim == 1}

    def layer(w: Mapping[str, Tensor]) -> Tensor:
        entered: list[Tensor] = []

        def dense(name: str, x: Tensor) -> Tensor:
            weight, bias = w[name], w.get(f"{name}_bias")
            if enter is not None and name not in rows:
                if not entered or entered[0] is not x:
                    entered[:] = [x, enter(x)]
                x = entered[1]
            if join is None or name not in rows:
                return F.linear(x, weight, bias)
            y = join(F.linear(x, weight))
            return y if bias is None else y + bias

        result: Tensor = case.layer(w, dense, gather)
        return result

    return layer


def reference(bench: Bench) -> Tensor:
    """The whole layer in float64, on one device."""
    wide = {name: whole.double() for name, whole in bench.wholes.items()}
    return by_hand(bench)(wide)


def _reduced(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x


def _scattered(x: Tensor) -> Tensor:
    """Sums of a rank's tokens; rows of x lie along dim 1, behind a dim of one."""
    x = x.contiguous()
    y = x.new_empty(x.shape[0], x.shape[1] // dist.get_world_size(), *x.shape[2:])
    dist.reduce_scatter_tensor(y[0], x[0])
    return y


def _gathered(x: Tensor) -> Tensor:
    y = x.new_empty(x.shape[0], x.shape[1] * dist.get_world_size(), *x.shape[2:])
    dist.all_gather_into_tensor(y[0], x.contiguous()[0])
    return y


def _eager(bench: Bench) -> _Call:
    if bench.is_sequence:
        return partial(by_hand(bench, _scattered, gather=_gathered), bench.parts)
    join = _reduced if bench.ranks.comm.size > 1 else None
    return partial(by_hand(bench, join), bench.parts)


def _compiled(bench: Bench) -> _Call:
    """In one piece: what dynamo cannot trace is an error."""
    world: Any = dist.group.WORLD
    name = world.group_name

    def join(x: Tensor) -> Tensor:
        if bench.is_sequence:
            part: Tensor = functional.reduce_scatter_tensor(x[0], "sum", 0, name)
            return part[None]
        summed: Tensor = functional.all_reduce(x, "sum", name)
        return summed

    def gather(x: Tensor) -> Tensor:
        whole: Tensor = functional.all_gather_tensor(x[0], 0, name)
        return whole[None]

    is_split = bench.ranks.comm.size > 1
    layer = by_hand(
        bench, join if is_split else None, gather=gather if bench.is_sequence else as_it_is
    )
    compiled = torch.compile(layer, backend=bench.compiler, dynamic=False, fullgraph=True)
    return partial(compiled, dict(bench.parts))


def _reduced_compiled(bench: Bench) -> _Call:
    """Return the same for split tokens, with tokens everywhere, and all-reduces."""
    return _compiled(replace(bench, is_sequence=False, parts={**bench.parts, **_whole(bench)}))


def _alone(bench: Bench) -> _Call:
    """This rank's heads and hidden units, of all tokens, without any communication."""
    layer = by_hand(bench)
    compiled = torch.compile(layer, backend=bench.compiler, dynamic=False, fullgraph=True)
    return partial(compiled, {**bench.parts, **_whole(bench)})


def _whole(bench: Bench) -> dict[str, Tensor]:
    return {"x": bench.wholes["x"]}


class _Module(nn.Module):
    """The layer whose linear layers are modules, as `parallelize_module` wants it."""

    def __init__(self, case: Case, wholes: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.case = case
        for name, (outputs, inputs, _) in case.linears().items():
            linear = nn.Linear(inputs, outputs, bias=f"{name}_bias" in wholes, device="meta")
            linear.weight = nn.Parameter(wholes[name], requires_grad=False)
            if linear.bias is not None:
                linear.bias = nn.Parameter(wholes[f"{name}_bias"], requires_grad=False)
            self.add_module(name, linear)

    def forward(self, w: dict[str, Tensor]) -> Tensor:
        result: Tensor = self.case.layer(w, lambda name, x: getattr(self, name)(x))
        return result


def _module(bench: Bench) -> tuple[nn.Module, dict[str, Tensor]]:
    """Torch's own tensor parallelism: the module, and what it is called with."""
    case, size = bench.case, bench.ranks.comm.size
    mesh = init_device_mesh(bench.ranks.device.type, (size,))
    plan: dict[str, ParallelStyle] = {
        name: RowwiseParallel() if dim else ColwiseParallel()
        for name, (*_, dim) in case.linears().items()
    }
    module = parallelize_module(_Module(case, bench.wholes), mesh, plan)
    others = {
        name: part
        for name, part in {**bench.parts, **_whole(bench)}.items()
        if name.removesuffix("_bias") not in case.linears()
    }
    return module, others


def _dtensor(bench: Bench) -> _Call:
    module, others = _module(bench)
    return partial(module, others)


def _dtensor_compiled(bench: Bench) -> _Call:
    module, others = _module(bench)
    return partial(torch.compile(module, backend=bench.compiler, dynamic=False), others)


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A contender.

    Attributes:
        make: from a layer to the call.
        is_captured: the call is captured by hand as a CUDA graph, whose replay is timed: inputs
            are read where they are, and the output is overwritten by the next replay.
        lacks: what of the layer it does not do, so that its result is not the layer's.
    """

    make: Callable[[Bench], _Call]
    is_captured: bool = False
    lacks: str = ""

    def steady(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """Return the function to call after the first `call`."""
        if not self.is_captured:
            return call
        captured = HandGraph(call, ())
        replay, output = captured.graph.replay, captured.output

        def replayed() -> Any:
            replay()
            return output

        return replayed


#: By name, in the order of the table.
PEERS = {
    "mdfuse": Peer(make=ours),
    "eager": Peer(make=_eager),
    "graph": Peer(make=_eager, is_captured=True),
    "compiled": Peer(make=_compiled),
    "compiled-graph": Peer(make=_compiled, is_captured=True),
    "reduced-graph": Peer(make=_reduced_compiled, is_captured=True),
    "alone-graph": Peer(make=_alone, is_captured=True, lacks="communication"),
    "dtensor": Peer(make=_dtensor),
    "dtensor-compiled": Peer(make=_dtensor_compiled),
    "dtensor-compiled-graph": Peer(make=_dtensor_compiled, is_captured=True),
}


def options(compiles: str | None, **others: str | None) -> mf.Options | None:
    """mdfuse's options, or the end of the process where they lack one that is given."""
    given = {"compile": compiles, **others}
    changed: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    missing = changed.keys() - {each.name for each in fields(mf.Options)}
    if missing:
        names = ", ".join(f"`{name}`" for name in sorted(missing))
        screen.fail(f"Options of this version have no field {names}")
    return mf.Options(**changed) if changed else None
