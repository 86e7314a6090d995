"""Find the stages of a pipeline: each streamed expression belongs to a block of work.

    %h = linear(%x, %w)               on m0          F0
    %g = set(%h)                m0 => m1             T01
    %y = linear(%g, %v)               on m1          F1
    %dg = linear(%dy, %v^T)           on m1          B1 (I1)
    %dv = linear(%dy^T, %g^T)         on m1          B1 (W1)
    %dh = set(%dg)              m1 => m0             T10
    %dw = linear(%dh^T, %x^T)         on m0          B0 (W0)

A stage is the work on one mesh between sets that change the mesh; its number is the number of such
sets before it. The phase follows from the graph: F does not depend on a gradient, I does and
another stage needs it, W does and only sums over the batch need it. B is I and W.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import networkx as nx

from mdfuse.errors import BACKWARD, RECOMPUTED, LoweringError
from mdfuse.ir.graph import Expr, Fusion, following, leading_to
from mdfuse.mesh import DeviceMesh
from mdfuse.passes.segmentation import Group, ShouldMerge, streams_read
from mdfuse.pipelines.timing import Reads


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """The work of a stage in a phase, or a hand-over from a stage to another.

    Attributes:
        stage: its number.
        phase: F, B, I, W; T for a hand-over.
        to: the stage that takes it over; -1 where it is work.
    """

    stage: int
    phase: str
    to: int = -1

    def __str__(self) -> str:
        if self.to < 0:
            return f"{self.phase}{self.stage}"
        between = "_" if max(self.stage, self.to) > 9 else ""
        return f"{self.phase}{self.stage}{between}{self.to}"


@dataclass(frozen=True, kw_only=True)
class Stages:
    """The stages of a fusion whose batch is streamed.

    Attributes:
        fusion: after all passes.
        meshes: of each stage.
        parts: first result of an expression -> its part, if it runs once per microbatch.
    """

    fusion: Fusion
    meshes: tuple[DeviceMesh, ...]
    parts: dict[str, Part]

    @cached_property
    def groups(self) -> tuple[int, ...]:
        """The rank group of each stage: stages on one mesh share a row of a schedule."""
        order = list(dict.fromkeys(self.meshes))
        return tuple(map(order.index, self.meshes))

    @property
    def shares_ranks(self) -> bool:
        """True if some rank belongs to several rank groups."""
        ranks = [r for mesh in {*self.meshes} for r in mesh.ranks]
        return len({*ranks}) < len(ranks)

    @property
    def has_backward(self) -> bool:
        """True if some stage computes gradients."""
        return any(p.phase in "IW" for p in self.parts.values())

    def within(self, merge: ShouldMerge) -> ShouldMerge:
        """Return a predicate on groups that merges as another one does, but only within a part."""

        def may_merge(a: Group, b: Group) -> bool:
            first, second = (self.parts.get(g.exprs[0].outputs[0]) for g in (a, b))
            return first == second and merge(a, b)

        return may_merge

    def whole_backward(self) -> Stages:
        """Return the stages with I and W of each as one part, B."""
        joined = {"I": "B", "W": "B"}
        parts = {x: replace(p, phase=joined.get(p.phase, p.phase)) for x, p in self.parts.items()}
        return replace(self, parts=parts)

    @cached_property
    def reads(self) -> Reads | None:
        """Stage -> the stages that its forward reads; None where each reads the one before it."""
        sources = dict[int, list[int]]()
        handed = [p for p in self.graph if p.phase == "T" and p.stage < p.to]
        for n in range(len(self.meshes)):
            before = self.graph.pred.get(Part(n, "F"), ())
            given = [p for p in handed if p.to == n]  # a stage may hand on a received value
            sources[n] = sorted({p.stage for p in (*before, *given) if p.phase in "FT"})
        return None if all(n - 1 in of for n, of in sources.items() if n) else sources

    @cached_property
    def graph(self) -> nx.DiGraph[Part]:
        """The dependences between parts.

        Raises:
            LoweringError: parts need each other.
        """
        graph: nx.DiGraph[Part] = nx.DiGraph()
        for expr in self.fusion.exprs:
            part = self.parts.get(expr.outputs[0])
            if part is None:
                continue
            graph.add_node(part)
            for x in expr.reads:
                producer = self.fusion.producers.get(x)
                before = self.parts.get(producer.outputs[0]) if producer is not None else None
                if before is not None and before != part:
                    graph.add_edge(before, part, value=x)
        for n in range(len(self.meshes)):  # the phases of a stage, in the order of schedules
            parts = [p for p in (Part(n, phase) for phase in "FBIW") if p in graph]
            graph.add_edges_from(pairwise(parts))
        if not nx.is_directed_acyclic_graph(graph):
            cycle = nx.find_cycle(graph)
            raise _refused(
                self.fusion,
                next(x for _, _, x in graph.edges(data="value") if x is not None),
                " needs ".join(str(part) for part, _ in reversed(cycle)) + f" needs {cycle[-1][0]}",
                "let each stage hand over to later ones only",
            )
        return graph


def find(fusion: Fusion, at_sets: bool = False) -> Stages:
    """Return the stages of a fusion.

    Args:
        fusion: after all passes, with its batch streamed.
        at_sets: whether a set that changes nothing also begins a stage, on the same mesh.

    Raises:
        LoweringError: a stage needs sums over the whole batch, or the batch is split otherwise on
            the next mesh; a gradient goes to a later stage.
    """
    return _Finder(fusion, at_sets).run()


class _Finder:
    def __init__(self, fusion: Fusion, at_sets: bool) -> None:
        self.fusion, self.at_sets = fusion, at_sets
        before = _needed_before(fusion)
        streamed = (e for e in fusion.exprs if fusion.values[e.outputs[0]].stream is not None)
        self.exprs = [e for e in streamed if e.outputs[0] not in before]
        self.made = {x: e for e in self.exprs for x in e.outputs}
        for expr in fusion.exprs:
            is_in = expr.outputs[0] in self.made
            if _changes_mesh(fusion, expr) and _is_of_batch(fusion, expr) and not is_in:
                raise _whole(fusion, expr)
        self.back = behind_gradients(fusion)
        #: the results of hand-overs
        self.over = {e.output for e in self.exprs if self.is_border(e)}

    def mesh(self, name: str) -> DeviceMesh:
        return self.fusion.layout(name).mesh

    def hands_over(self, expr: Expr) -> bool:
        """Return whether an expression hands over to another stage."""
        return expr.outputs[0] in self.over

    def is_border(self, expr: Expr) -> bool:
        """Return whether an expression is a set to another mesh, or one that changes nothing."""
        if expr.op != "set" or not self.fusion.values[expr.output].is_tensor:
            return False
        is_idle = self.fusion.layout(expr.reads[0]) == self.fusion.layout(expr.output)
        return _changes_mesh(self.fusion, expr) or (self.at_sets and is_idle)

    def operands(self, expr: Expr) -> list[Expr]:
        """Return the expressions of the pipeline that an expression reads."""
        return [self.made[x] for x in expr.reads if x in self.made]

    def run(self) -> Stages:
        forward = [e for e in self.exprs if e.outputs[0] not in self.back]
        depth = self.depths(forward)
        given = {(0, self.mesh(x)) for x in self.given(forward)}
        places = sorted(given.union(depth.values()), key=lambda at: (at[0], at[1].ranks))
        number = {place: n for n, place in enumerate(places)}
        stage = {x: number[place] for x, place in depth.items()}
        meshes = [mesh for _, mesh in places]
        parts: dict[str, Part] = {}
        for e in forward:
            x = e.outputs[0]
            is_over = self.hands_over(e)
            parts[x] = (
                Part(self.source(e, stage, meshes), "T", stage[x])
                if is_over
                else Part(stage[x], "F")
            )
        self.place_backward(stage, meshes, parts)
        return Stages(fusion=self.fusion, meshes=tuple(meshes), parts=parts)

    def depths(self, forward: list[Expr]) -> dict[str, tuple[int, DeviceMesh]]:
        """Return result of the forward -> the number of hand-overs before it, and its mesh.

        An expression that leads to no hand-over belongs to the next stage of its mesh: it follows
        from labels alone, or from values that passed a stage.
        """
        raw: dict[str, int] = {}
        for e in forward:
            before = max((raw[o.outputs[0]] for o in self.operands(e)), default=0)
            raw[e.outputs[0]] = before + self.hands_over(e)
        stages: dict[DeviceMesh, set[int]] = defaultdict(set)
        sent = set[str]()
        for e in reversed(forward):
            x, mesh = e.outputs[0], self.mesh(e.outputs[0])
            if self.hands_over(e):
                stages[self.mesh(e.reads[0])].add(raw.get(e.reads[0], 0))
                sent.update(e.reads)
            elif not sent.isdisjoint(e.outputs):
                stages[mesh].add(raw[x])
                sent.update(y for y in e.reads if raw.get(y) == raw[x])
        last: dict[DeviceMesh, int] = defaultdict(int)
        for e in forward:
            mesh = self.mesh(e.outputs[0])
            last[mesh] = max(last[mesh], raw[e.outputs[0]])
        for mesh, depth in last.items():
            if depth > max(stages[mesh], default=-1):
                stages[mesh].add(depth)
        depths: dict[str, tuple[int, DeviceMesh]] = {}
        for e in forward:
            x, mesh = e.outputs[0], self.mesh(e.outputs[0])
            least = max((depths[o.outputs[0]][0] for o in self.operands(e)), default=0)
            least += self.hands_over(e)
            depths[x] = (min((d for d in stages[mesh] if d >= least), default=least), mesh)
        self.put_off(forward, sent, depths)
        return depths

    def put_off(
        self, forward: list[Expr], sent: set[str], depths: dict[str, tuple[int, DeviceMesh]]
    ) -> None:
        """Put expressions of inputs alone, such as labels, into the first stage that reads them."""
        loose = set[str]()
        for e in forward:
            is_sent = not sent.isdisjoint(e.outputs) or self.hands_over(e)
            if not is_sent and all(o.outputs[0] in loose for o in self.operands(e)):
                loose.add(e.outputs[0])
        for e in reversed(forward):
            x = e.outputs[0]
            of_readers = [depths[r][0] for r in self.readers(e) if r in depths]
            if x in loose and of_readers:
                depths[x] = min(of_readers), self.mesh(x)

    def readers(self, e: Expr) -> list[str]:
        """Return the first results of the pipeline's readers of an expression."""
        readers = (r.outputs[0] for x in e.outputs for r in self.fusion.consumers[x])
        return [r for r in readers if r in self.made]

    def given(self, forward: list[Expr]) -> list[str]:
        """Return the inputs that are handed over as they are: their mesh is a stage, too."""
        return [e.reads[0] for e in forward if self.hands_over(e) and not self.operands(e)]

    def source(self, e: Expr, stage: dict[str, int], meshes: list[DeviceMesh]) -> int:
        """Return the stage that hands over: that of the operand, or the last before on its mesh."""
        operands = self.operands(e)
        if operands:
            return stage[operands[0].outputs[0]]
        mesh, to = self.mesh(e.reads[0]), stage[e.output]
        return max((n for n, m in enumerate(meshes[:to]) if m == mesh), default=to)

    def place_backward(
        self, stage: dict[str, int], meshes: list[DeviceMesh], parts: dict[str, Part]
    ) -> None:
        """Add the parts of expressions that depend on gradients."""
        behind = [e for e in self.exprs if e.outputs[0] in self.back]
        self.stages_behind(behind, stage, meshes)
        asked = self.asked(behind, stage)
        for e in behind:
            x = e.outputs[0]
            if self.hands_over(e):
                parts[x] = Part(self.source(e, stage, meshes), "T", stage[x])
            else:
                parts[x] = Part(stage[x], "I" if x in asked else "W")

    def stages_behind(
        self, behind: list[Expr], stage: dict[str, int], meshes: list[DeviceMesh]
    ) -> None:
        """Add the stages of expressions that depend on gradients.

        A hand-over decides the stage of all that follows from it. An expression behind no hand-over
        is in the stage of its operands of the forward, and no later than its readers.
        """
        firm = set[str]()
        for e in behind:
            x, operands = e.outputs[0], [o.outputs[0] for o in self.operands(e)]
            said = [stage[o] for o in operands if o in firm]
            loose = [stage[o] for o in operands if o in stage]
            if said or self.hands_over(e):
                most = min(said) if said else max(loose, default=len(meshes) - 1)
                if not _changes_mesh(self.fusion, e) and self.mesh(x) not in meshes[:most]:
                    self.over.discard(x)  # no stage is before: it is the last of its own
                stage[x] = self.no_later(x, most - self.hands_over(e), meshes)
                firm.add(x)
            elif loose:
                stage[x] = self.no_later(x, max(loose), meshes)
        for e in reversed(behind):
            x = e.outputs[0]
            if x not in firm:
                least = [stage[r] + self.hands_over(self.made[r]) for r in self.readers(e)]
                least += [stage[x]] if x in stage else []
                fits = (n for n, m in enumerate(meshes) if m == self.mesh(x) and n >= max(least))
                last = len(meshes) - 1
                stage[x] = next(fits) if least else self.no_later(x, last, meshes)

    def no_later(self, x: str, most: int, meshes: list[DeviceMesh]) -> int:
        """Return the last stage of a value's mesh up to a number.

        Raises:
            LoweringError: it has none.
        """
        fits = [n for n, m in enumerate(meshes) if m == self.mesh(x) and n <= most]
        if not fits:
            raise _against(self.fusion, x)
        return fits[-1]

    def asked(self, behind: list[Expr], stage: dict[str, int]) -> set[str]:
        """Return the first results that other stages, or whole outputs, need."""
        needed = [x for x in self.fusion.outputs if not self.is_sum(x)]

        def goes(e: Expr) -> bool:
            is_away = any(stage[r] != stage[e.outputs[0]] for r in self.readers(e))
            return is_away or self.is_kept(e) or self.hands_over(e)

        return {e.outputs[0] for e in leading_to(behind, needed, goes)}

    def is_sum(self, name: str) -> bool:
        stream = self.fusion.values[name].stream
        return stream is None or stream.op is not None

    def is_kept(self, e: Expr) -> bool:
        """Return whether something that runs once reads a result that is no sum."""
        terms = (x for x in e.outputs if not self.is_sum(x))
        return any(r.outputs[0] not in self.made for x in terms for r in self.fusion.consumers[x])


def _needed_before(fusion: Fusion) -> set[str]:
    """Return the first results of expressions in loops of their own, before the pipeline.

    They are streamed, and lead to a sum over the batch that a streamed expression reads.
    """
    late, needed = set[str](), set[str]()
    for e in fusion.exprs:
        stream = fusion.values[e.outputs[0]].stream
        reads_late = not late.isdisjoint(_read_whole(fusion, e))
        if stream is not None and reads_late:
            needed.update(late.intersection(e.reads))
        reads_chunks = any(fusion.values[x].stream is not None for x in e.reads)
        if (stream is None and (reads_late or reads_chunks)) or (stream and stream.op is not None):
            late.update(e.outputs)
    before = (e.outputs[0] for e in leading_to(fusion.exprs, needed))
    return {x for x in before if fusion.values[x].stream is not None}


def _changes_mesh(fusion: Fusion, expr: Expr) -> bool:
    if expr.op != "set" or not fusion.values[expr.output].is_tensor:
        return False
    return fusion.layout(expr.reads[0]).mesh != fusion.layout(expr.output).mesh


def behind_gradients(fusion: Fusion) -> set[str]:
    """Return the values that depend on a gradient, or are recomputed for one."""
    return following(fusion.exprs, (), lambda e: e.note in (BACKWARD, RECOMPUTED))


def _brings_together(fusion: Fusion, expr: Expr) -> bool:
    """Return whether a set makes the whole batch of its chunks."""
    gathered = fusion.values[expr.outputs[0]]
    before = fusion.values[expr.reads[0]].stream if expr.op == "set" and expr.reads else None
    return gathered.stream is None and before is not None and before.op is None


def _is_of_batch(fusion: Fusion, expr: Expr) -> bool:
    """Return whether an expression is computed of chunks of the batch."""
    names: Iterable[str] = (*expr.reads, *expr.outputs)
    streams = (fusion.values[x].stream for x in names)
    return any(s is not None and s.op is None for s in streams)


def _against(fusion: Fusion, name: str) -> LoweringError:
    """Return the error for a value of the backward that cannot be on its mesh."""
    is_again = fusion.producers[name].note == RECOMPUTED
    read = (fusion.producers.get(x) for x in fusion.producers[name].reads)
    whole = next((e for e in read if e is not None and _brings_together(fusion, e)), None)
    if whole is not None:
        return _refused(fusion, name, f"it follows from {_joined(whole)}", _EVEN)
    if not is_again and (late := _of_a_sum(fusion)) is not None:
        return late
    because = "what is computed for gradients goes from later stages to earlier ones"
    if is_again:
        return _refused(fusion, name, because, "leave hand-overs out of recompute()")
    hint = f"differentiate once, not through a gradient, or {_AT_ONCE}"
    return _refused(fusion, name, because, hint)


def _of_a_sum(fusion: Fusion) -> LoweringError | None:
    """Return the error for a microbatch's value that needs all microbatches; None: none does."""
    late = dict[str, tuple[str, str]]()  # name -> the sum that it follows from, and its kind
    for e in fusion.exprs:
        stream = fusion.values[e.outputs[0]].stream
        read = next((x for x in _read_whole(fusion, e) if x in late), None)
        if stream is not None and read is not None:
            name, op = late[read]
            because = f"each microbatch reads %{name}, a {op} over the whole batch"
            per = "add up in the loss what each sample gives, as a mean does"
            if e.note not in (BACKWARD, RECOMPUTED):
                per = "compute it of each sample, as layer_norm does, or of inputs"
            return _refused(fusion, e.outputs[0], because, f"{per}, or {_AT_ONCE}")
        if stream is not None and stream.op is not None:
            late.update(dict.fromkeys(e.outputs, (e.outputs[0], stream.op)))
        elif read is not None:
            late.update(dict.fromkeys(e.outputs, late[read]))
    return None


def _read_whole(fusion: Fusion, e: Expr) -> list[str]:
    """Return the operands of which an expression reads no term of its own microbatch."""
    if fusion.values[e.outputs[0]].stream is None or not fusion.values[e.outputs[0]].is_tensor:
        return [*e.reads]
    pairs = zip(e.inputs, streams_read(fusion, e), strict=True)
    return [x for x, how in pairs if isinstance(x, str) and (how is None or how.op is None)]


def _joined(expr: Expr) -> str:
    return f"%{expr.output}, for which ranks bring the whole batch together"


_EVEN = "split the batch into even parts, or not at all"
_AT_ONCE = "take the batch at once: mf.compile(definition)"


def _whole(fusion: Fusion, expr: Expr) -> LoweringError:
    (x,) = expr.reads
    value = fusion.values[expr.output]
    whole = next((e for e in fusion.exprs if _brings_together(fusion, e)), None)
    if value.stream is not None and whole is not None:
        because, hint = f"it leads to {_joined(whole)}", _EVEN
    elif value.stream is None:
        before, after = fusion.layout(x), fusion.layout(expr.output)
        places = f"{before} on {before.mesh} to {after} on {after.mesh}"
        because = f"it goes from {places}, which split the batch otherwise"
        hint = "split the batch alike on both meshes, or not at all"
    elif (late := _of_a_sum(fusion)) is not None:
        return late
    else:
        because = "a stage needs a sum over the whole batch, to which it leads"
        hint = f"compute the sum of inputs, or {_AT_ONCE}"
    return _refused(fusion, expr.output, because, hint)


def _refused(fusion: Fusion, name: str, because: str, hint: str) -> LoweringError:
    return LoweringError(
        f"%{name} cannot be computed in a pipeline",
        where=fusion.where(name),
        because=because,
        hint=hint,
    )
