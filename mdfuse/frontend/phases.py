"""Split a definition and its gradients into two fusions: forward, and backward.

The forward fusion also returns the values that the backward reads; the backward fusion takes these
values, and the cotangents of the outputs. Views and numbers are recomputed, not passed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from mdfuse.errors import DefinitionError
from mdfuse.frontend import gradients
from mdfuse.frontend.definition import FusionDefinition
from mdfuse.ir.graph import Expr, Fusion, Value
from mdfuse.ir.ops import TABLE
from mdfuse.layouts.layout import Layout, Replicate
from mdfuse.passes import propagate_layouts

#: Views whose lowering may communicate.
_PLACING = frozenset({"set", "detach"})


@dataclass(frozen=True, kw_only=True)
class Phases:
    """A definition with its gradients.

    Attributes:
        joint: both, as they were recorded.
        placed: the same with inferred layouts.
        outputs: the definition's.
        seeds: the cotangents of some of them, in their order.
        wrt: positions of the requested inputs that have a gradient.
        gradients: one for each of them.
        saved: inputs and forward values that the backward reads.
    """

    joint: Fusion
    placed: Fusion
    outputs: tuple[str, ...]
    seeds: tuple[str, ...]
    wrt: tuple[int, ...]
    gradients: tuple[str, ...]
    saved: tuple[str, ...]

    def forward(self) -> Fusion:
        """Return the fusion of the outputs, followed by the saved values."""
        inputs = tuple(x for x in self.joint.inputs if x not in self.seeds)
        extra = (x for x in self.saved if x not in (*inputs, *self.outputs))
        outputs = (*self.outputs, *extra)
        exprs = _leading_to(self.joint, outputs, lambda _: True)
        return _part(f"{self.joint.name}_forward", self.joint, exprs, inputs, outputs, {})

    def backward(self, layouts: Mapping[str, Layout | None]) -> Fusion:
        """Return the fusion of the gradients.

        Args:
            layouts: of the saved values and of the cotangents; None for numbers.
        """
        inputs = (*self.saved, *self.seeds)
        exprs = _leading_to(self.joint, self.gradients, lambda x: x not in inputs)
        laws = {x: replace(self.joint.values[x], layout=layouts[x], like=None) for x in inputs}
        laws = {x: replace(value, is_law=value.is_tensor) for x, value in laws.items()}
        there = {*inputs, *(x for e in exprs for x in e.outputs)}
        for name in there.difference(laws):
            like = self.joint.values[name].like
            if like is not None and not {like.of, like.past or like.of} <= there:
                layout = self.placed.layout(name).with_stream(None)
                laws[name] = replace(self.joint.values[name], layout=layout, is_law=True, like=None)
        name = f"{self.joint.name}_backward"
        return _part(name, self.joint, exprs, inputs, self.gradients, laws)


def dual(layout: Layout) -> Layout:
    """Return the layout of a value's cotangent: replicated where the value is Partial."""
    for axis in layout.partial_axes:
        layout = layout.with_placement(axis, Replicate())
    return layout.with_stream(None)


def phases(definition: FusionDefinition, wrt: Sequence[int], seeded: Sequence[int]) -> Phases:
    """Return the phases of a definition.

    Args:
        definition: one whose `with` block has ended.
        wrt: positions of inputs.
        seeded: positions of outputs that have a cotangent.

    Raises:
        DefinitionError: some op between them has no rule; the definition writes into its inputs, or
            has extents that each run chooses.
    """
    _check(definition)
    recorder, site = definition.replayed()
    assert site is not None
    recorded = recorder.fusion()
    placed = propagate_layouts.run(recorded)
    ids = {name: n for n, name in enumerate(recorder.names)}
    of: dict[int, int | None] = {}
    laws = {}
    for n in seeded:
        y = recorded.values[recorded.outputs[n]]
        recorder.tensor(site.naming(f"{y.name}.cotangent"), y.shape, y.dtype, None, None)
        of[ids[y.name]] = len(recorder.names) - 1
        laws[recorder.names[-1]] = dual(placed.layout(y.name))
    wanted = [ids[recorded.inputs[n]] for n in wrt]
    appended = gradients.append(recorder, site, of, wanted)
    existing = {at: n for at, (n, fact) in zip(wrt, appended, strict=True) if not fact.is_missing}
    names = [recorder.names[n] for n in existing.values()]
    joint = recorder.fusion()
    lawful = {x: replace(joint.values[x], layout=law, is_law=True) for x, law in laws.items()}
    joint = replace(
        joint,
        values={**joint.values, **lawful},
        outputs=(*(recorder.names[ids[x]] for x in recorded.outputs), *names),
    )
    outputs = joint.outputs[: len(recorded.outputs)]
    return Phases(
        joint=joint,
        placed=propagate_layouts.run(joint),
        outputs=outputs,
        seeds=tuple(laws),
        wrt=tuple(existing),
        gradients=tuple(names),
        saved=_saved(joint, outputs, names, {*laws}),
    )


def _check(definition: FusionDefinition) -> None:
    fusion = definition.fusion
    if fusion.reuse:
        new, old = next(iter(fusion.reuse.items()))
        raise DefinitionError(
            f"@{fusion.name} under torch.autograd: %{new} is written into %{old}",
            where=fusion.where(new),
            because="the backward reads inputs as the forward found them",
            hint="leave reuse= out, or take the gradient inside, by mf.grad",
        )
    if definition.examples:
        raise DefinitionError(
            f"@{fusion.name} under torch.autograd: {', '.join(definition.examples)} are chosen by "
            "each run",
            because="what the forward saves has the extents of one program",
            hint="define it for each shape, or take the gradient inside, by mf.grad",
        )


def _saved(
    joint: Fusion, outputs: Sequence[str], gradients: Sequence[str], seeds: set[str]
) -> tuple[str, ...]:
    """Return the inputs and forward values that the gradients need."""
    forward = {x for e in _leading_to(joint, outputs, lambda _: True) for x in e.outputs}
    forward.update(set(joint.inputs) - seeds)

    def is_made_again(name: str) -> bool:
        return name not in forward or _is_cheap(joint, name)

    read: dict[str, None] = dict.fromkeys(x for x in gradients)
    for expr in _leading_to(joint, gradients, is_made_again):
        read.update(dict.fromkeys(expr.reads))
    return tuple(x for x in read if x in forward and not is_made_again(x))


def _is_cheap(joint: Fusion, name: str) -> bool:
    """Return whether a value is a view of others, or a number."""
    value, expr = joint.values[name], joint.producers.get(name)
    if expr is None or value.layout is not None or value.like is not None:
        return False
    is_view = TABLE[expr.op].is_view and not TABLE[expr.op].may_copy and expr.op not in _PLACING
    return is_view or not value.is_tensor


def _leading_to(
    joint: Fusion, names: Iterable[str], follows: Callable[[str], bool]
) -> tuple[Expr, ...]:
    """Return the expressions that compute values from the values that are not followed."""
    needed, exprs = {x for x in names if follows(x)}, []
    for expr in reversed(joint.exprs):
        if not needed.isdisjoint(expr.outputs):
            exprs.append(expr)
            needed.update(x for x in expr.reads if follows(x))
    return tuple(reversed(exprs))


def _part(
    name: str,
    joint: Fusion,
    exprs: tuple[Expr, ...],
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    laws: Mapping[str, Value],
) -> Fusion:
    """Return a fusion of some expressions."""
    there = dict.fromkeys((*inputs, *(x for e in exprs for x in (*e.reads, *e.outputs))))
    values = {x: laws.get(x, joint.values[x]) for x in joint.values if x in there}
    return Fusion(
        name=name,
        values=values,
        exprs=exprs,
        inputs=inputs,
        outputs=outputs,
        ids={x: n for x, n in joint.ids.items() if x in there},
    )
