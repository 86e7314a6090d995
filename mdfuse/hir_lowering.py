"""Lower a fusion to the global host program: an ordered tuple of passes, then one walk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from mdfuse.config import Options, backend_choice, options_from_environment
from mdfuse.hir.emit.host_program import emit
from mdfuse.hir.emit.sets import Orders
from mdfuse.hir.emit.stage_blocks import Pipeline
from mdfuse.hir.passes import (
    assign_streams,
    block_streams,
    compute_in_units,
    cut_loops,
    cut_units,
    fill_outputs,
    form_fusion_groups,
    hoist_posts,
    insert_frees,
    join_norms,
    keep_wide,
    name_backends,
    part_products,
    place_symmetric,
    post_layers,
    share_types,
    shorten_lives,
    sink_waits,
    write_over_operands,
)
from mdfuse.hir.program import HostProgram
from mdfuse.interpreter.garbage import no_collection
from mdfuse.ir.graph import Fusion, check_fusion, has_same_code
from mdfuse.passes import (
    bucket_sums,
    choose_orders,
    chunk_losses,
    compute_again,
    count_rows,
    decompose,
    drop_unread,
    fill_ways,
    flat_rows,
    insert_reshards,
    meshes,
    microbatches,
    place_rows,
    propagate_layouts,
    read_documents,
    reduce_scatter_creation,
    settle_partials,
    spread_streams,
    streams,
    unsent_numbers,
    widen_sums,
)
from mdfuse.passes.in_place import drop_rows, write_through
from mdfuse.passes.segment_ids import with_ids
from mdfuse.passes.segmentation import Section, ShouldMerge, merge_composite, segment
from mdfuse.passes.sharded import (
    cheap_operands,
    context_parallel,
    keep_splits,
    open_rows,
    share_heads,
    split_scans,
    sum_rows,
)

Pass = Callable[[Fusion], Fusion]

#: The passes over the fusion, in order, with the reason why each stands where it stands.
PASSES: tuple[tuple[str, Pass], ...] = (
    # Layouts are compared from here on, and a stream is no part of where data is.
    (streams.name, streams.run),
    # Before layouts are inferred, which its new values need; needs to know streamed values.
    (write_through.name, write_through.run),
    # Before layouts, which masks that nobody reads any more would change.
    (read_documents.name, read_documents.run),
    # Every value needs a layout; no later pass infers one.
    (propagate_layouts.name, propagate_layouts.run),
    # Needs to know who has which heads; the gradients that it leaves out are no Partials.
    (share_heads.name, share_heads.run),
    # Needs to know which dims a view would gather; the next pass sees views that are left.
    (open_rows.name, open_rows.run),
    # Needs to know which dims a view would gather; its results yield Partials.
    (sum_rows.name, sum_rows.run),
    # Needs to know the split dims that an op needs whole; its results yield Partials.
    (keep_splits.name, keep_splits.run),
    # As the pass before, which may have shown that no op needs the operand whole.
    (split_scans.name, split_scans.run),
    # Needs the split dims, also of the results of earlier passes; makes Partials.
    (decompose.name, decompose.run),
    # Needs the layouts in which values are read; what is read whole yields no Partials.
    (cheap_operands.name, cheap_operands.run),
    # Needs to know the ops that pass a Partial on; infers anew the values after a reduction.
    (settle_partials.name, settle_partials.run),
    # Needs the layouts that tensors of numbers copy; the next passes need all readers.
    ("creations.alone", unsent_numbers.alone),
    # Before sets exist, since it decides which sets reduce-scatter instead of all-reduce.
    (reduce_scatter_creation.name, reduce_scatter_creation.run),
    # Needs the layouts in which values are read in the end; before sets exist, which would send.
    ("creations.where_read", unsent_numbers.where_read),
    # Afterwards every expression but set runs without communication.
    (insert_reshards.name, insert_reshards.run),
    # Knows every layout; later passes only drop values.
    ("check_stream_lengths", streams.check_lengths),
    # So late that a law on a value that nobody reads still counts where layouts are inferred.
    (drop_unread.name, drop_unread.run),
    # Needs all sets, at which it ends, and no unread values, which would be in a loop, too.
    (spread_streams.name, spread_streams.run),
    # Last: needs to know who reads a value, and which sets communicate.
    (choose_orders.name, choose_orders.run),
)


@dataclass(frozen=True, slots=True)
class Batch:
    """The inputs that are computed in microbatches.

    Attributes:
        dims: input -> its dim that is the batch's.
        count: how many microbatches.
    """

    dims: Mapping[str, int]
    count: int


def passes(
    options: Options, batch: Batch | None = None, masks: Mapping[str, str] | None = None
) -> tuple[tuple[str, Pass], ...]:
    """Return the passes over the fusion, including those for options, a batch and masks of rows."""
    steps: list[tuple[str, Pass]] = []
    for name, run in PASSES:
        steps.append((name, run))
        if name == share_heads.name:
            # Needs all layouts, and heads as they are stored; the passes behind it see its sets.
            no_ring = context_parallel.LEAVES if options.same_bits else ""
            no_ring = context_parallel.MICROBATCHES if batch is not None else no_ring
            form = partial(context_parallel.run, form=options.context, no_ring=no_ring)
            steps.append((context_parallel.name, form))
        if name == streams.name and batch is None and options.logits_bytes:
            # Before layouts, which rows as several dims would decide otherwise.
            flat = partial(flat_rows.run, most=options.logits_bytes)
            steps.append((flat_rows.name, flat))
        if name == write_through.name and masks:
            # Needs the indices of all writes; before layouts, which its new values need.
            steps.append((drop_rows.name, partial(drop_rows.run, masks=masks)))
        if name == insert_reshards.name and options.reduce_dtype is not None:
            # Needs all sets that reduce.
            wide = partial(widen_sums.run, dtype=options.reduce_dtype)
            steps.append((widen_sums.name, wide))
        most = options.bucket_bytes
        if name == insert_reshards.name and isinstance(most, int) and most:
            # Needs all sets that reduce, in the dtype in which they do.
            dims = batch.dims if batch is not None else None
            together = partial(bucket_sums.run, most=most, batch=dims)
            steps.append((bucket_sums.name, together))
        if name == drop_unread.name and batch is not None:
            # Needs all sets; the next pass sees the streamed values.
            cut = partial(microbatches.run, batch=batch.dims, count=batch.count)
            steps.append((microbatches.name, cut))
        if name == drop_unread.name:
            # Needs all sets, which rows must be able to take, their streams, and no unread values.
            if not options.same_bits:  # what leaves exchange no run decides
                steps.append((count_rows.name, partial(count_rows.run, on=options.counts)))
                # Needs to know which rows are counted.
                steps.append((place_rows.name, place_rows.run))
            # Needs to know which sets move counted rows; later passes keep the order.
            steps.append((fill_ways.name, fill_ways.run))
        if name == spread_streams.name and batch is None and options.logits_bytes:
            # Needs all sets; its streams stay where they are.
            few = partial(chunk_losses.run, most=options.logits_bytes)
            steps.append((chunk_losses.name, few))
        if name == spread_streams.name and batch is None and form_fusion_groups.is_grouped(options):
            # Needs all sets and streams, whose values stay as they are.
            steps.append((compute_again.name, compute_again.run))
    return tuple(steps)


HostPass = Callable[[HostProgram, Options], HostProgram]

#: The passes over the host program, likewise.
HOST_PASSES: tuple[tuple[str, HostPass], ...] = (
    # Anywhere: no other pass looks at who carries a post.
    (name_backends.name, name_backends.run),
    # Needs the backends; before posts move, with the buffers that they use.
    (place_symmetric.name, place_symmetric.run),
    # Anywhere before units exist.
    (keep_wide.name, keep_wide.run),
    # The emitter puts a wait right behind its post; here it moves to where the data is needed.
    (sink_waits.name, sink_waits.run),
    # Needs the waits where the data is needed: those of a group go together.
    (post_layers.name, post_layers.run),
    # Needs the groups, and the waits where the data is needed: posts move past work between them.
    (hoist_posts.name, hoist_posts.run),
    # Needs the final places of waits, which tell the work that need not wait.
    (cut_loops.name, cut_loops.run),
    # Needs the parts of loops, which begin on streams of their own, and the waits where they stay:
    # a waiting stream holds up the work that is queued behind.
    (assign_streams.name, assign_streams.run),
    # Likewise, for blocks, which are in no loop.
    (block_streams.name, block_streams.run),
    # Needs the streams, for it leaves programs alone that have some; before units exist.
    (fill_outputs.name, fill_outputs.run),
    # Needs the places of posts and waits, past which it moves work; before units exist.
    (shorten_lives.name, shorten_lives.run),
    # Needs the streams: work of two streams is no unit.
    (form_fusion_groups.name, form_fusion_groups.run),
    # Needs all units, which compute what others hand on.
    (compute_in_units.name, compute_in_units.run),
    # Needs all units, which it compares.
    (cut_units.name, cut_units.run),
    # Needs the final units, whose equal ones it leaves equal.
    (join_norms.name, join_norms.run),
    # Likewise; the next pass sees the parts.
    (part_products.name, part_products.run),
    # Likewise; it moves last uses.
    (write_over_operands.name, write_over_operands.run),
    # After the passes that move uses.
    (insert_frees.name, insert_frees.run),
    # Last: the others make types.
    (share_types.name, share_types.run),
)

#: Called after each pass with its name and the fusion: printing, timing and checks hang here.
Observer = Callable[[str, Fusion], None]


def prepare(
    fusion: Fusion,
    observe: Observer | None = None,
    options: Options | None = None,
    batch: Batch | None = None,
    masks: Mapping[str, str] | None = None,
) -> Fusion:
    """Run the passes over the fusion; `observe` is called after each."""
    fusion = meshes.without_single_axes(fusion)
    checked: Fusion | None = None
    for name, run in passes(options_from_environment(options), batch, masks):
        fusion = run(fusion)
        if checked is None or not has_same_code(checked, fusion):
            check_fusion(fusion)
            checked = fusion
        if observe is not None:
            observe(name, fusion)
    return fusion


@dataclass(eq=False)
class Emitted:
    """The host programs of a prepared fusion, which differ in what is posted ahead of its place.

    Until posts are raised they are one program, and behind that those in which the same ones are.

    Attributes:
        fusion: after all passes, with ids.
        sections: each becomes a segment.
        host: the program before posts are raised.
        options: of all passes.
    """

    fusion: Fusion
    sections: tuple[Section, ...]
    host: HostProgram
    options: Options
    _known: list[tuple[HostProgram, HostProgram]] = field(default_factory=list)

    @no_collection()
    def program(self, room: int | Literal["layer"] | None = None) -> HostProgram:
        """Return the program with some `prefetch_bytes`; None: those of the options."""
        at = _raises()
        chosen = self.options if room is None else replace(self.options, prefetch_bytes=room)
        raised = _passed(self.host, HOST_PASSES[at : at + 1], chosen)
        program = next((x for known, x in self._known if known == raised), None)
        if program is None:
            program = _passed(raised, HOST_PASSES[at + 1 :], chosen)
            self._known.append((raised, program))
        return program


def _passed(
    host: HostProgram, passes: Sequence[tuple[str, HostPass]], options: Options
) -> HostProgram:
    for _, run in passes:
        host = run(host, options)
    return host


def _raises() -> int:
    """Return the place of the pass that raises posts."""
    return [name for name, _ in HOST_PASSES].index(hoist_posts.name)


@no_collection()
def emitted(
    fusion: Fusion,
    sections: tuple[Section, ...],
    options: Options | None,
    stated: Orders | None = None,
    pipeline: Pipeline | None = None,
) -> Emitted:
    """Return the host programs of a prepared fusion and its sections; see `emit`."""
    options = options_from_environment(options)
    carriers = backend_choice(options.backend).carriers
    host = emit(fusion, sections, stated, pipeline, carriers, options.counts)
    return Emitted(fusion, sections, _passed(host, HOST_PASSES[: _raises()], options), options)


@no_collection()  # nearly all new objects stay alive, and would be scanned again and again
def lower(
    fusion: Fusion,
    should_merge: ShouldMerge | None = None,
    observe: Observer | None = None,
    options: Options | None = None,
    batch: Batch | None = None,
    masks: Mapping[str, str] | None = None,
) -> tuple[Fusion, tuple[Section, ...], HostProgram]:
    """Lower a fusion.

    Args:
        fusion: with the user's layouts.
        should_merge: see `mdfuse.passes.segmentation.segment`.
        observe: called after each pass.
        options: how loops over chunks are spread over streams, and in which dtype sums are reduced.
        batch: the inputs in microbatches; None: all at once.
        masks: symbolic extent -> the input that says which of its rows are there; see `drop_rows`.

    Returns:
        The fusion after all passes, with ids for new values; its sections, each of which
        becomes a segment; and the global host program.
    """
    prepared = with_ids(prepare(fusion, observe, options, batch, masks))
    return prepared, *lower_prepared(prepared, should_merge, options)


@no_collection()
def lower_prepared(
    prepared: Fusion,
    should_merge: ShouldMerge | None = None,
    options: Options | None = None,
    pipeline: Pipeline | None = None,
) -> tuple[tuple[Section, ...], HostProgram]:
    """Return the sections and the global host program of a fusion after all passes, with ids.

    Args:
        prepared: the fusion.
        should_merge: see `mdfuse.passes.segmentation.segment`.
        options: as `lower` takes them.
        pipeline: the stages that run once per microbatch, and their order.
    """
    if pipeline is not None:
        merge = merge_composite if should_merge is None else should_merge
        should_merge = pipeline.stages.within(merge)
    sections = segment(prepared, should_merge)
    return sections, emitted(prepared, sections, options, pipeline=pipeline).program()
