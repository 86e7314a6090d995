"""Cut a fusion into segments: reshards, and runs of expressions merged as a predicate says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import networkx as nx

from mdfuse.errors import LoweringError, Source, shown
from mdfuse.ir.graph import Expr, Fusion
from mdfuse.ir.ops import TABLE
from mdfuse.layouts.stream import Stream
from mdfuse.layouts.streamed_sets import FORMS, form
from mdfuse.passes.streams import operand_streams, streamed_alike

#: Operations that move what they read: to other ranks, or between tokens and rows of experts.
_ALONE = ("set", "group_rows", "ungroup_rows")


@dataclass(frozen=True, slots=True)
class Group:
    """Expressions that run as one: what a merging predicate sees.

    Attributes:
        exprs: each has `.op`, `.inputs`, `.outputs` (names of values) and `.source`.
    """

    exprs: tuple[Expr, ...]

    def __str__(self) -> str:
        return _group_text(name for e in self.exprs for name in e.outputs)

    @property
    def is_reshard(self) -> bool:
        """True if it is a set, which may change a layout, or groups rows: it never merges."""
        return any(e.op in _ALONE for e in self.exprs)

    @property
    def is_single_op(self) -> bool:
        """True if the group is one expression that the host runs as one op."""
        return len(self.exprs) == 1 and TABLE[self.exprs[0].op].is_single


ShouldMerge = Callable[[Group, Group], bool]


def merge_composite(a: Group, b: Group) -> bool:
    """Merge all but expressions that the host runs as a single op: the default."""
    return not a.is_single_op and not b.is_single_op


def merge_local(a: Group, b: Group) -> bool:
    """Merge everything between two reshards."""
    return True


def merge_nothing(a: Group, b: Group) -> bool:
    """Make every expression a segment of its own."""
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A group with its place in the program.

    Attributes:
        name: `seg0`, `seg1`, … in topological order.
        fusion: its expressions as a fusion of their own; names are those of the whole fusion.
    """

    name: str
    fusion: Fusion

    @property
    def exprs(self) -> tuple[Expr, ...]:
        return self.fusion.exprs

    @property
    def is_streamed(self) -> bool:
        """True if it runs in a host loop over chunks."""
        return self.fusion.values[self.exprs[0].outputs[0]].stream is not None

    @property
    def inputs(self) -> tuple[str, ...]:
        return self.fusion.inputs

    @property
    def outputs(self) -> tuple[str, ...]:
        return self.fusion.outputs


def check_merge(should_merge: object) -> None:
    """Raise LoweringError for what is no function, and is to say which groups become one."""
    if not callable(should_merge):
        raise LoweringError(
            f"should_merge={shown(should_merge)}",
            because="it says of two groups whether they may become one",
            hint="a function of two groups, for example mf.debug.segmentation.merge_local",
        )


def segment(fusion: Fusion, should_merge: ShouldMerge | None = None) -> tuple[Section, ...]:
    """Cut a fusion into sections, topologically ordered.

    Args:
        fusion: every change of layout in it is a set.
        should_merge: whether two neighbouring groups may become one. Never merged are reshards,
            groups on different meshes, groups in different host loops, and groups whose union
            would depend on itself.

    Raises:
        LoweringError: the predicate is no function, raises, or answers neither True nor False.
    """
    merge = merge_composite if should_merge is None else should_merge
    check_merge(merge)
    groups, graph = _merged(fusion, merge)
    check(fusion, [[n for e in group for n in e.outputs] for group in groups.values()])
    ordered = nx.lexicographical_topological_sort(graph)
    position = {e.outputs[0]: i for i, e in enumerate(fusion.exprs)}
    return tuple(_section(fusion, f"seg{n}", groups[g], position) for n, g in enumerate(ordered))


def _merged(fusion: Fusion, merge: ShouldMerge) -> tuple[dict[int, list[Expr]], nx.DiGraph[int]]:
    """Return the groups by number, and the graph of dependences between groups."""
    loops = HostLoops(fusion)
    graph: nx.DiGraph[int] = nx.DiGraph()
    owner: dict[str, int] = {}
    groups: dict[int, list[Expr]] = {}
    sent = set[int]()  # with rows that a run counts: what follows is computed while they travel
    for i, expr in enumerate(fusion.exprs):
        producers = dict.fromkeys(owner[x] for x in expr.reads if x in owner)
        if expr.op == "set" and fusion.values[expr.output].is_counted:
            sent.update(producers)
        graph.add_node(i)
        graph.add_edges_from((p, i) for p in producers)
        groups[i] = [expr]
        owner.update(dict.fromkeys(expr.outputs, i))
        for producer in producers:
            reader = owner[expr.outputs[0]]
            if producer == reader or producer in sent:
                continue
            if not _may_merge(loops, groups, producer, reader, graph, merge):
                continue
            _absorb(graph, groups, owner, producer, reader)
    return groups, graph


def check(fusion: Fusion, groups: Iterable[Iterable[str]]) -> None:
    """Raise LoweringError unless each group can run as a whole, one group after another.

    Args:
        fusion: whose expressions are grouped.
        groups: names of values; expressions that are in none run by themselves.

    Raises:
        LoweringError: groups depend on each other in a cycle; a name is in two groups, or of no
            expression.

    >>> import mdfuse as mf
    >>> with mf.FusionDefinition("chain") as fd:
    ...     x = fd.define_tensor([4])
    ...     a = x + 1
    ...     b = a * 2
    ...     fd.add_output(a + b)
    >>> mf.debug.segmentation.check(fd.fusion, [["a", "b"]])
    >>> try:
    ...     mf.debug.segmentation.check(fd.fusion, [["a", fd.fusion.outputs[0]], ["b"]])
    ... except mf.MdfuseError as error:
    ...     print(error.what)
    the groups (%a, %t) and (%b) of @chain depend on each other in a cycle
    """
    owner = _owners(fusion, [tuple(group) for group in groups])
    graph: nx.DiGraph[tuple[str, ...]] = nx.DiGraph()
    for expr in fusion.exprs:
        reader = owner[expr.outputs[0]]
        for x in expr.reads:
            if owner.get(x, reader) != reader:
                graph.add_edge(owner[x], reader, by=expr, value=x)
    if nx.is_directed_acyclic_graph(graph):
        return
    cycle = nx.find_cycle(graph)  # may take a time that grows with the square of the program
    names = " and ".join(_group_text(group) for group, _ in cycle)
    raise LoweringError(
        f"the groups {names} of @{fusion.name} depend on each other in a cycle",
        where=[_dependence(graph.edges[edge]) for edge in cycle],
        because="a group runs as a whole, after the groups that it reads",
        hint="leave one of these expressions out of its group, or make one group of all of them",
    )


def _owners(fusion: Fusion, groups: Iterable[tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Return the group of each expression's result; an expression in none is its own group."""
    owner: dict[str, tuple[str, ...]] = {}
    named: set[str] = set()
    for group in groups:
        for name in group:
            outputs = fusion.producers[name].outputs if name in fusion.producers else ()
            if not outputs or name in named or owner.get(name, group) is not group:
                what = "is in two groups" if name in owner else "is no result of an expression"
                raise LoweringError(
                    f"%{name} {what} of @{fusion.name}",
                    where=fusion.where(name) if name in fusion.values else (),
                    because="groups are made of expressions, each of which runs once",
                    hint="the expressions compute " + ", ".join(fusion.producers),
                )
            named.add(name)
            owner.update(dict.fromkeys(outputs, group))
    return {name: owner.get(name, e.outputs) for name, e in fusion.producers.items()}


def _dependence(edge: Mapping[str, Any]) -> str:
    expr: Expr = edge["by"]
    return f"{_made_text(expr)} = {expr.op} reads %{edge['value']}" + _quoted(expr.source)


def _made_text(expr: Expr) -> str:
    return ", ".join(f"%{name}" for name in expr.outputs)


def _quoted(source: Source | None) -> str:
    return f"   {source.quote()}" if source else ""


def _group_text(names: Iterable[str]) -> str:
    return f"({', '.join(f'%{name}' for name in names)})"


def _may_merge(
    loops: HostLoops,
    groups: dict[int, list[Expr]],
    a: int,
    b: int,
    graph: nx.DiGraph[int],
    merge: ShouldMerge,
) -> bool:
    first, second = Group(tuple(groups[a])), Group(tuple(groups[b]))
    if first.is_reshard or second.is_reshard or not _asked(merge, first, second):
        return False
    if not loops.may_share(first.exprs, second.exprs):
        return False
    values = [loops.fusion.values[n] for g in (first, second) for e in g.exprs for n in e.outputs]
    if len({v.layout.mesh if v.layout else None for v in values}) > 1:
        return False
    return not (_is_indirect(graph, a, b) or _is_indirect(graph, b, a))


def _asked(merge: ShouldMerge, first: Group, second: Group) -> bool:
    """Return the predicate's answer for two groups; LoweringError if it is no bool."""
    try:
        answer = merge(first, second)
    except Exception as error:
        raise LoweringError(
            f"should_merge raised {type(error).__name__}: {error}",
            where=[f"asked of {first} and {second}", *_expressions(first, second)],
            because="it is asked of groups of which one reads what the other computes",
            hint="return True or False for every two groups",
        ) from error
    if type(answer) is not bool:
        raise LoweringError(
            f"should_merge answered {answer!r} for {first} and {second}",
            where=_expressions(first, second),
            because="two groups may become one, or not",
            hint="return True or False",
        )
    return answer


def _expressions(*groups: Group) -> list[str]:
    """Return the expressions of groups as errors show them."""
    exprs = (e for group in groups for e in group.exprs)
    return [f"{e.op} -> {_made_text(e)}{_quoted(e.source)}" for e in exprs]


class HostLoops:
    """The streamed expressions of a fusion that may run in one host loop."""

    def __init__(self, fusion: Fusion) -> None:
        self.fusion = fusion
        self._alike = streamed_alike(fusion)
        #: first result of an expression -> how it reads its operands, and whether it gives chunks
        self._known: dict[str, tuple[tuple[tuple[str, Stream | None], ...], bool]] = {}

    def key(self, expr: Expr) -> tuple[object, ...] | None:
        """Return the key that expressions in one loop share; None for one not streamed.

        Several meshes may share a loop, unless each rank starts at its own chunk.
        """
        value = self.fusion.values[expr.outputs[0]]
        if value.stream is None or value.layout is None:
            return None
        rotated = (value.stream.rotate, value.layout.mesh) if value.stream.rotate else None
        return self._alike(value.name), value.stream.count, rotated

    def may_share(self, exprs: Iterable[Expr], others: Iterable[Expr]) -> bool:
        """True if one loop, or none, can run `exprs` and `others`, behind or among them."""
        exprs, others = tuple(exprs), tuple(others)
        key = self.key(exprs[0])
        if key != self.key(others[0]):
            return False
        producers = {name: e for e in (*exprs, *others) for name in e.outputs}
        return key is None or all(self._reads_chunks(e, producers) for e in (*exprs, *others))

    def _reads_chunks(self, expr: Expr, producers: Mapping[str, Expr]) -> bool:
        """True if all that an expression reads of others in its loop is the chunk just computed."""
        return all(
            self.fusion.values[x].stream == stream and self._asked_once(producers[x])[1]
            for x, stream in self._asked_once(expr)[0]
            if x in producers
        )

    def _asked_once(self, expr: Expr) -> tuple[tuple[tuple[str, Stream | None], ...], bool]:
        answer = self._known.get(expr.outputs[0])
        if answer is None:
            pairs = zip(expr.inputs, streams_read(self.fusion, expr), strict=True)
            reads = tuple((x, stream) for x, stream in pairs if isinstance(x, str))
            answer = self._known[expr.outputs[0]] = reads, gives_chunks(self.fusion, expr)
        return answer


def streams_read(fusion: Fusion, expr: Expr) -> tuple[Stream | None, ...]:
    """Return how a streamed expression reads each operand: in chunks of a dim, or whole (None)."""
    how = set_form(fusion, expr)
    if how is None:
        return operand_streams(expr, fusion.values)
    return (fusion.values[expr.output].stream if FORMS[how][0] else None,)


def gives_chunks(fusion: Fusion, expr: Expr) -> bool:
    """Return whether an iteration has a chunk of the result, and not a term of all of it."""
    how = set_form(fusion, expr)
    return how is None or FORMS[how][1]


def set_form(fusion: Fusion, expr: Expr) -> str | None:
    """Return the form of a streamed set; None for other expressions."""
    out = fusion.values[expr.outputs[0]]
    if expr.op != "set" or out.stream is None:
        return None
    extent = out.shape[out.stream.dim]
    return form(fusion.layout(expr.reads[0]), fusion.layout(expr.output), out.stream, extent)


def _is_indirect(graph: nx.DiGraph[int], a: int, b: int) -> bool:
    """True if a path leads from a to b through a third group: merging the two closes a cycle."""
    return any(n != b and nx.has_path(graph, n, b) for n in graph.successors(a))


def _absorb(
    graph: nx.DiGraph[int],
    groups: dict[int, list[Expr]],
    owner: dict[str, int],
    into: int,
    group: int,
) -> None:
    groups[into] += groups.pop(group)
    for expr in groups[into]:
        owner.update(dict.fromkeys(expr.outputs, into))
    edges = [(p, into) for p in graph.predecessors(group) if p != into]
    edges += [(into, s) for s in graph.successors(group) if s != into]
    graph.remove_node(group)
    graph.add_edges_from(edges)


def _section(fusion: Fusion, name: str, exprs: list[Expr], position: Mapping[str, int]) -> Section:
    """Return a section of some expressions; `position` says where in the fusion each stands."""
    ordered = tuple(sorted(exprs, key=lambda e: position[e.outputs[0]]))
    computed = [name for e in ordered for name in e.outputs]
    inputs = tuple(dict.fromkeys(x for e in ordered for x in e.reads if x not in computed))
    outputs = tuple(
        name
        for name in computed
        if name in fusion.returned
        or any(reader.outputs[0] not in computed for reader in fusion.consumers[name])
    )
    values = {n: fusion.values[n] for n in (*inputs, *computed)}
    section_fusion = replace(
        fusion, name=name, values=values, exprs=ordered, inputs=inputs, outputs=outputs, reuse={}
    )
    return Section(name=name, fusion=section_fusion)
