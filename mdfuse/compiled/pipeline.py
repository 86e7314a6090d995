"""Programs that compute in microbatches, on one mesh or in stages, and add up their sums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from mdfuse import hir_lowering
from mdfuse.compiled.leaf_program import on_leaves
from mdfuse.compiled.overlap import OverlapDecisions, left
from mdfuse.compiled.program import Program
from mdfuse.compiled.segments import Segment, segments_of
from mdfuse.compiled.specialisations import Lowerings
from mdfuse.config import Options, options_from_environment
from mdfuse.errors import DefinitionError, counted, listed, shown
from mdfuse.frontend.definition import FusionDefinition
from mdfuse.frontend.given import check_definition
from mdfuse.hir.emit.stage_blocks import Pipeline
from mdfuse.hir.program import HostProgram
from mdfuse.hir_lowering import Batch
from mdfuse.ir.graph import Fusion
from mdfuse.passes.microbatches import has_one_row
from mdfuse.passes.segment_ids import with_ids
from mdfuse.passes.segmentation import ShouldMerge
from mdfuse.pipelines.choose import choose
from mdfuse.pipelines.order import calls
from mdfuse.pipelines.schedules import Schedule
from mdfuse.pipelines.stages import Stages
from mdfuse.pipelines.stages import find as find_stages
from mdfuse.pipelines.tables import NAMED


def pipeline(
    definition: FusionDefinition,
    *,
    microbatches: int,
    batch: Mapping[str, int],
    schedule: str | Schedule | None = None,
    options: Options | None = None,
    should_merge: ShouldMerge | None = None,
) -> Program:
    """Compile a definition to a program that takes its batch in microbatches, one after the other.

    Values with the dim of the batch are computed a chunk at a time; sums over that dim (a loss, the
    gradients of weights) are added up, f16 and bf16 in f32. Then the sums are used, as an optimizer
    does. So results are those of `mf.compile`, up to the order of sums.

    On one mesh it is a loop, in the memory of one microbatch: gradient accumulation. Microbatches
    that are empty on all ranks are left out; for a single one the program is that of `mf.compile`,
    and nothing is refused. On several meshes each is a stage, or several, and a schedule says in
    which order the stages go forwards and backwards: docs/pipelines.md. Where meshes share ranks,
    each has a stream on them.

    Args:
        definition: as `mf.compile` takes it.
        microbatches: how many; each rank cuts its own part of the batch, as `torch.chunk` does.
        batch: name of an input -> its batch dim. All other values with that dim are inferred.
        schedule: the name of one, or a table; by default "1f1b", or "forward" where no gradients
            are computed, and a loop on one mesh. `program.schedule` shows it.
        options: as `mf.compile` takes them.
        should_merge: as `mf.compile` takes it.

    Raises:
        DefinitionError: no such input or dim; no whole number of microbatches; a value with a
            stream of its own; a schedule that these stages cannot have.
        LoweringError: something needs the batch as a whole, as a sort along it would; a stage
            needs a sum over it, or the next mesh splits it otherwise.

    >>> import torch, mdfuse as mf
    >>> mesh = mf.DeviceMesh.arange(dp=2)
    >>> with mf.FusionDefinition("step") as fd:
    ...     x = fd.define_tensor([16, 4], mesh=mesh, layout={"dp": mf.Shard(0)}, name="x")
    ...     w = fd.define_tensor([3, 4], mesh=mesh, name="w")
    ...     (dw,) = mf.grad(mf.ops.linear(x, w).square().mean(), [w])
    ...     fd.add_output(w - 0.1 * dw, reuse=w)
    >>> program = mf.pipeline(fd, microbatches=4, batch={"x": 0})
    >>> x, w = torch.randn(16, 4), torch.randn(3, 4, requires_grad=True)
    >>> (new,) = mf.simulate(program, [x, w.detach()]).outputs
    >>> (x @ w.T).square().mean().backward()
    >>> torch.testing.assert_close(new, (w - 0.1 * w.grad).detach())
    """
    check_definition("pipeline", definition)
    fusion = definition.fusion
    lower = _Lower(_checked(fusion, microbatches, batch), schedule, options, should_merge)
    if options_from_environment(options).same_bits:
        return _on_leaves(definition, lower)
    symbolic = None
    if definition.examples:
        symbolic = Lowerings(
            fusion, definition.examples, definition.assumed, lower, options, chunks=microbatches
        )
    return lower.program(fusion, symbolic)


def _on_leaves(definition: FusionDefinition, how: _Lower) -> Program:
    """Return the program with `Options.same_bits`, each of whose leaves has microbatches."""
    fusion, options = definition.fusion, options_from_environment(how.options)
    if how.wanted is not None:
        why = "its leaves are those of one mesh, which runs no stages"
        raise _wrong(fusion, f"schedule={shown(how.wanted)} with same_bits", why, "leave one out")
    batch = partial(_with_rows, batch=how.batch)
    return on_leaves(fusion, definition.examples, options, how.should_merge, batch)


@dataclass
class _Lower:
    """Lowers a fusion to a loop over microbatches, or to stages.

    Attributes:
        batch: the inputs that are cut into microbatches.
        wanted: the schedule, or its name.
        schedule: the schedule of the last fusion that was lowered; None where it is a loop.
    """

    batch: Batch
    wanted: str | Schedule | None
    options: Options | None
    should_merge: ShouldMerge | None
    schedule: Schedule | None = None

    def __call__(self, fusion: Fusion) -> tuple[Fusion, tuple[Segment, ...], HostProgram]:
        meshes = {v.layout.mesh for v in fusion.values.values() if v.layout is not None}
        if len(meshes) > 1 or self.wanted is not None:
            return self.in_stages(fusion)
        prepared, parts, host = hir_lowering.lower(
            fusion, self.should_merge, options=self.options, batch=_with_rows(fusion, self.batch)
        )
        return prepared, segments_of(prepared, parts, host, self.options), host

    def program(self, fusion: Fusion, symbolic: Lowerings | None) -> Program:
        """Return the program; with symbolic extents, that of the first lowering."""
        if symbolic is None:
            prepared, segments, host = self(fusion)
        else:
            first = symbolic.first()
            prepared, segments, host = first.fusion, first.segments, first.host
        return Program(
            prepared,
            segments,
            host,
            self.options,
            symbolic,
            schedule=self.schedule,
            overlap=_left(host, self.options),
        )

    def in_stages(self, fusion: Fusion) -> tuple[Fusion, tuple[Segment, ...], HostProgram]:
        """Lower a fusion whose stages follow a schedule."""
        prepared = with_ids(hir_lowering.prepare(fusion, options=self.options, batch=self.batch))
        stages = _stages(prepared, self.wanted)
        usual = "1f1b" if stages.has_backward else "forward"
        schedule = choose(
            usual if self.wanted is None else self.wanted,
            microbatches=self.batch.count,
            groups=stages.groups,
            gradients=stages.has_backward,
            reads=stages.reads,
        )
        if not schedule.has("I"):
            stages = stages.whole_backward()
        staged = Pipeline(stages=stages, calls=tuple(calls(stages, schedule)))
        parts, host = hir_lowering.lower_prepared(prepared, self.should_merge, self.options, staged)
        names = {mesh: f"m{n}" for n, mesh in enumerate(host.meshes)}
        meshes = tuple(names[m] for m in dict.fromkeys(stages.meshes))
        self.schedule = replace(schedule, meshes=meshes)
        return prepared, segments_of(prepared, parts, host, self.options), host


def _with_rows(fusion: Fusion, batch: Batch) -> Batch | None:
    """Return the batch in as many microbatches as have rows on some rank; None for one: no loop.

    Chunks have the same rows then as before, since `torch.chunk` puts the empty ones last.
    """
    if has_one_row(fusion, batch.dims):
        return None
    count = 1
    for name, dim in batch.dims.items():
        value = fusion.values[name]
        extent = value.shape[dim]
        if value.layout is None or not isinstance(extent, int):
            count = batch.count
            continue
        rows = max(b - a for _, (a, b) in value.layout.chunks_of(dim, extent))
        each = max(1, -(-rows // batch.count))
        count = max(count, -(-rows // each))
    return replace(batch, count=count) if count > 1 else None


def _left(host: HostProgram, options: Options | None) -> OverlapDecisions | None:
    why = "microbatches are the only loop of a pipeline"
    return left(host, why, options_from_environment(options))


def _stages(fusion: Fusion, wanted: str | Schedule | None) -> Stages:
    """Return the stages of a fusion as a schedule has them: cut at idle sets if it turns there."""
    stages = find_stages(fusion)
    if isinstance(wanted, str) and wanted in NAMED and NAMED[wanted].turns:
        return find_stages(fusion, at_sets=True)
    if isinstance(wanted, Schedule) and wanted.stages > len(stages.meshes):
        return find_stages(fusion, at_sets=True)
    return stages


def _checked(fusion: Fusion, count: int, batch: Mapping[str, int]) -> Batch:
    """Return the batch, its dims counted from 0, or raise DefinitionError."""
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise _wrong(fusion, f"microbatches={shown(count)}", "it counts them", "a number from 1 on")
    if not isinstance(batch, Mapping) or not batch:
        because = "it says which dim of which inputs is the batch's"
        raise _wrong(fusion, f"batch={shown(batch)}", because, 'for example batch={"x": 0}')
    dims: dict[str, int] = {}
    for name, dim in batch.items():
        tensors = [n for n in fusion.inputs if fusion.values[n].is_tensor]
        if name not in tensors:
            because = f"@{fusion.name} has no tensor of that name among its inputs"
            raise _wrong(fusion, f"batch[{shown(name)}]", because, "one of " + listed(tensors))
        n = len(fusion.values[name].shape)
        if not isinstance(dim, int) or isinstance(dim, bool) or not -n <= dim < n:
            because = f"%{name} has {counted(n, 'dim')}"
            raise _wrong(fusion, f"batch[{name!r}]={shown(dim)}", because, f"from 0 to {n - 1}")
        dims[name] = dim % n
    extents = {name: fusion.values[name].shape[dim] for name, dim in dims.items()}
    if len({*map(str, extents.values())}) > 1:
        because = ", ".join(f"%{name} has {n} rows" for name, n in extents.items())
        hint = "name dims of one length, and none that the batch is only a part of: it is found"
        raise _wrong(fusion, f"batch={dict(batch)!r}", because, hint)
    streams = [v.name for v in fusion.values.values() if v.layout is not None and v.layout.stream]
    if streams:
        because = "microbatches are the only loop of such a program"
        raise _wrong(fusion, f"%{streams[0]} has a stream of its own", because, "leave stream= out")
    return Batch(dims, count)


def _wrong(fusion: Fusion, what: str, because: str, hint: str) -> DefinitionError:
    return DefinitionError(f"pipeline of @{fusion.name}: {what}", because=because, hint=hint)
