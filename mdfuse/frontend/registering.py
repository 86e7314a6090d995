"""Operations that users add: a kernel with labels, as a row of the op table."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mdfuse.errors import DefinitionError, counted
from mdfuse.frontend import ops
from mdfuse.frontend.argument_kinds import no_value
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.importing.aten_table import TABLE as IMPORTED
from mdfuse.frontend.ops.recording import Operation, definition_of, shown
from mdfuse.frontend.plain import brief
from mdfuse.frontend.settings import frozen
from mdfuse.frontend.vjps.table import RULES, Applied, Rule
from mdfuse.hir.instructions import INSTRUCTIONS
from mdfuse.hir.text.parser import keywords
from mdfuse.ir.infer import as_results
from mdfuse.ir.op_table import TABLE, Op
from mdfuse.ir.registered import LabelText, row_of_call
from mdfuse.layouts.layout import REDUCE_OPS
from mdfuse.layouts.reduction import combine
from mdfuse.names import is_name
from mdfuse.torch_private import argument_names


def register_op(
    name: str,
    call: Callable[..., Any],
    rule: LabelText,
    vjp: Rule | None = None,
    *,
    reduces: Mapping[str, str] | None = None,
    results: int = 1,
    meta: Callable[..., Any] | None = None,
    example: Sequence[Tensor | None] | None = None,
    overload: Any = None,
) -> Operation:
    """Add an operation that runs a kernel of your own, and return the function that records it.

    Layouts, communications, verification, text, simulation and plans follow from the labels.
    Register the op in each process that reads or runs a program with it.

    Args:
        name: of the operation: `mf.ops.NAME`, and in programs.
        call: computes new tensors of tensors, wholes or one rank's parts. Parameters behind `*` are
            attributes: numbers, flags, dtypes, words, tuples of numbers.
        rule: labels of all dims: dims with one label are split together, `d!` is whole, `...` are
            any leading dims; or a function (operands' shapes, attributes) -> labels.
        vjp: the gradient: a function (e, ct), of operations, that returns a value or None for each
            operand: `e[0]`, `e.y` (`e.results`) and `e.attrs` are available, ct is the cotangent.
        reduces: label that results lack -> the reduction of the ranks' partial results: "sum", ...
        results: their number, where rule is a function.
        meta: the function for the meta device, if `call` cannot run there.
        example: operands (and a dict of attributes) to check the rule: parts must give the same.
        overload: of torch's registry, `torch.ops.my.norm.default`, with arguments of the same
            names: in modules that are imported it is this operation.

    Raises:
        DefinitionError: a name that is taken; a rule that means nothing, or that is not true of the
            example; a call with other parameters.

    >>> import torch, mdfuse as mf
    >>> scaled = mf.register_op("doc_scaled", lambda x, w, *, by=1.0: x * w * by, "b d, d -> b d",
    ...                         lambda e, ct: (ct * e[1] * e.attrs["by"], None),
    ...                         example=(torch.randn(4, 3), torch.randn(3)))
    >>> mesh, x, w = mf.DeviceMesh.arange(tp=2), torch.randn(4, 6), torch.randn(6)
    >>> with mf.FusionDefinition("f") as fd:
    ...     split = fd.define_tensor([4, 6], layout=mf.Layout(mesh, {"tp": mf.Shard(1)}))
    ...     fd.add_output(scaled(split, fd.define_tensor([6]), by=2.0))
    >>> (y,) = mf.simulate(mf.compile(fd), [x, w]).outputs
    >>> torch.testing.assert_close(y, x * w * 2)
    """
    _check_name(name)
    operation = _operation(_row(name, call, rule, reduces or {}, results, meta, example), call)
    if vjp is not None:
        RULES[name] = _checked(name, vjp)
    if overload is not None:
        names = argument_names(overload)
        IMPORTED[str(overload)] = lambda *args, **kwargs: operation(
            **dict(zip(names, args, strict=False)), **kwargs
        )
    ops.BY_NAME[name] = operation
    setattr(ops, name, operation)
    return operation


def _row(
    name: str,
    call: Callable[..., Any],
    rule: LabelText,
    reduces: Mapping[str, str],
    results: int,
    meta: Callable[..., Any] | None,
    example: Sequence[Any] | None,
) -> Op:
    """Add a row to the op table; the arguments are those of `register_op`."""
    try:
        for reduce in reduces.values():
            if reduce not in REDUCE_OPS:
                raise ValueError(f"{reduce!r} is none of {', '.join(REDUCE_OPS)}")
        op = row_of_call(name, call, rule, reduces, meta, results)
        if example is not None:
            _check_example(op, call, example)
    except (TypeError, ValueError) as error:
        raise DefinitionError(
            f"register_op({name!r}): {error}",
            because="labels and attributes are read from the rule and the signature of the call, "
            "and must be true of the example",
            hint="docs/adding.md shows a rule; a dim that must be whole is written d!",
        ) from None
    TABLE[name] = op
    return op


def _check_name(name: str) -> None:
    if not (isinstance(name, str) and name.isidentifier() and is_name(name)):
        raise DefinitionError(
            f"register_op({brief(name)})", because="an operation has a name of Python", hint="my_op"
        )
    taken = next((what for what, names in _taken().items() if name in names), None)
    if taken is not None:
        raise DefinitionError(
            f"register_op({name!r}): the name is taken",
            because=f"it is that of {taken}",
            hint="register an op once in a process, under a name of its own: my_" + name,
        )


def _taken() -> dict[str, Collection[str]]:
    return {
        "an operation": {*TABLE, *ops.BY_NAME},
        "an instruction of host programs": INSTRUCTIONS,
        "a word of their text": keywords(),
    }


# -- checks ----------------------------------------------------------------------------------------


def _check_example(op: Op, call: Callable[..., Any], example: Sequence[Any]) -> None:
    """Raise ValueError if parts of the example give other results than the rule says."""
    given = inspect.signature(call).parameters
    attrs = {a.name: given[a.name].default for a in op.attrs if not a.required}
    attrs |= next((x for x in example if isinstance(x, dict)), {})
    operands = [x for x in example if not isinstance(x, dict)]
    whole = as_results(op.call(*operands, **attrs))
    assert op.meta is not None
    op.meta(*(x if x is None else x.to("meta") for x in operands), **attrs)
    memory = {x.untyped_storage().data_ptr() for x in operands if x is not None}
    if any(x.untyped_storage().data_ptr() in memory for x in whole):
        raise ValueError("the call returned a view of an operand: results are new tensors")
    shapes = [None if x is None else tuple(x.shape) for x in operands]
    labels = op.rule(shapes, tuple(whole[0].shape), attrs)
    everything = {x for words in labels.operands for x in words if x is not None}
    for label in filter(labels.may_split, everything):
        cut = [_halves(x, w, label) for x, w in zip(operands, labels.operands, strict=True)]
        parts = [as_results(op.call(*half, **attrs)) for half in zip(*cut, strict=True)]
        for want, words, *halves in zip(whole, labels.results, *parts, strict=True):
            if label in words:
                joined = torch.cat(halves, words.index(label))
            else:
                rows = torch.stack(halves).flatten(1)
                joined = combine(labels.reduces[label], rows).reshape(want.shape)
            if joined.shape != want.shape or not torch.allclose(joined, want, **_near(want)):
                where = [(n, w.index(label)) for n, w in enumerate(labels.operands) if label in w]
                at = " and ".join(f"dim {d} of operand {n}" for n, d in where)
                raise ValueError(f"computed in two parts along {at}, the example comes out another")


def _halves(x: Tensor | None, words: Sequence[int | None], label: int) -> Sequence[Any]:
    """Return two parts of an operand, maybe uneven; an unsplit operand twice."""
    if x is None or label not in words:
        return x, x
    dim = words.index(label)
    if x.shape[dim] < 2:
        raise ValueError(f"dim {dim} of an operand of the example has no two elements to be split")
    return x.tensor_split([-(-x.shape[dim] // 2)], dim)


def _near(x: Tensor) -> dict[str, Any]:
    """Return the tolerance for sums in another order."""
    exact = not (x.is_floating_point() or x.is_complex())
    eps = 0.0 if exact else torch.finfo(x.dtype).eps
    return {"rtol": eps**0.5, "atol": eps**0.5, "equal_nan": True}


def _checked(name: str, vjp: Rule) -> Rule:
    """Return the gradient rule of an op, with its results checked."""

    def refused(what: str, because: str) -> DefinitionError:
        return DefinitionError(
            f"the gradient of {name} gave {what}", because=because, hint="register_op(..., vjp=)"
        )

    def rule(e: Applied, ct: Any) -> Sequence[Handle | None]:
        cotangents = vjp(e, ct)
        if not isinstance(cotangents, tuple | list) or len(cotangents) != e.count:
            raise refused(
                counted(len(cotangents), "value")
                if isinstance(cotangents, tuple | list)
                else brief(cotangents),
                f"it returns a value or None for each of {counted(e.count, 'operand')}",
            )
        for n, x in enumerate(cotangents):
            if x is not None and not isinstance(x, Handle):
                raise refused(brief(x), "it is made of operations on e[0], e.y and ct")
            if x is not None and (not e.wants(n) or x.shape == e.shape(n)):
                continue
            if x is not None:
                raise refused(shown(x), f"operand {n} has the shape {list(e.shape(n))}")
        return cotangents

    return rule


# -- the public function ---------------------------------------------------------------------------


def _operation(op: Op, call: Callable[..., Any]) -> Operation:
    """Return the function that records the op."""
    signature, known = inspect.signature(call), {a.name: a for a in op.attrs}

    def operation(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise DefinitionError(
                f"{op.name}: {error}", because=f"it is {op.name}{signature}", hint=_HINT
            ) from None
        bound.apply_defaults()
        attrs = {k: x for k, x in bound.arguments.items() if k in known}
        operands = [x for k, x in bound.arguments.items() if k not in known]
        for k, x in attrs.items():
            if x is not None and not known[k].holds(frozen(x), None):
                raise DefinitionError(
                    f"{op.name}: {k} = {brief(x)}", because=f"{k} is {known[k].kind}", hint=_HINT
                )
        while operands and operands[-1] is None and len(operands) > op.operands[0]:
            operands.pop()
        for n, x in enumerate(operands):
            may_lack = x is None and n >= op.operands[0]
            if not may_lack and not (isinstance(x, Handle) and x.is_tensor):
                raise (
                    no_value(op.name, x)
                    if not isinstance(x, Handle)
                    else DefinitionError(
                        f"{op.name} of {shown(x)}", because="its operands are tensors", hint=_HINT
                    )
                )
        of = definition_of(*operands)
        return (of.record if op.results == 1 else of.record_several)(op.name, operands, attrs)

    operation.__name__ = operation.__qualname__ = op.name
    operation.__doc__ = call.__doc__
    operation.__signature__ = signature  # type: ignore[attr-defined]
    return operation


_HINT = "operands are values of the definition; attributes stand behind * in the call"
