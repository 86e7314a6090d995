"""The dims of a buffer along which one element repeats, as `expand` makes them."""

from __future__ import annotations

from mdfuse.errors import MdfuseError
from mdfuse.hir.program import BufferType, HostProgram, Instruction
from mdfuse.ir.graph import Value
from mdfuse.ir.infer import expanded_dims as stretched
from mdfuse.ir.infer import infer
from mdfuse.ir.ops import TABLE


def expanded_dims(program: HostProgram, name: str) -> frozenset[int]:
    """Return the dims of a buffer along which one element in memory repeats.

    Only a buffer that a single view op makes has any.
    """
    root = program.root(name)
    leaves = (i for i in program.walk() if i.op != "launch")
    made = [i for i in leaves if any(program.root(n) == root for n in i.outputs)]
    if len(made) != 1 or made[0].fn not in TABLE or not TABLE[made[0].fn].is_view:
        return frozenset()
    return _through(program, made[0])


def _through(program: HostProgram, i: Instruction) -> frozenset[int]:
    """Return the expanded dims of a view's result, as the strides of torch's result show them."""
    source, kind = i.inputs[0], program.types[i.outputs[0]]
    before = program.types.get(source) if isinstance(source, str) else None
    if before is None or not isinstance(source, str) or i.order is not None:
        return frozenset()
    value = _value(source, before, expanded_dims(program, source))
    attrs = {**i.kwargs}
    if i.fn in ("reshape", "expand"):
        attrs["shape"] = kind.shape
    try:
        made = infer(TABLE[i.fn], [source], attrs, {source: value}, None)
    except MdfuseError:
        return frozenset()
    return stretched(made)  # type: ignore[arg-type]


def _value(name: str, kind: BufferType, expanded: frozenset[int]) -> Value:
    """Return a value that stands for a buffer in the inference of a view's result."""
    return Value(
        name=name,
        shape=kind.shape,
        dtype=kind.dtype,
        kind="tensor",
        order=tuple(range(len(kind.shape))),
        expanded=expanded,
    )
