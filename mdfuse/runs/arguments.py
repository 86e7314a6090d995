"""Check the arguments of a run against the program, before anything is posted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from sys import modules
from typing import Any

import torch
from torch import Tensor

from mdfuse.errors import ProgramError, counted, listed
from mdfuse.hir.orders import Order
from mdfuse.hir.program import BufferType, HostProgram
from mdfuse.ir.infer import dense_strides
from mdfuse.ir.scalars import as_number
from mdfuse.ir.tensors import are_writable, is_lazy, no_gradient, overlaps_itself, why_not
from mdfuse.plan.signature import span


def has_dtensors(xs: Iterable[Any]) -> bool:
    """Return whether a DTensor is among some values; each run asks this.

    torch's module of DTensors is not imported for this: until a user imports it, there are none.
    """
    dtensor = getattr(modules.get("torch.distributed.tensor"), "DTensor", None)
    return dtensor is not None and dtensor in map(type, xs)


def check_ranks(program: HostProgram, rank: int, size: int) -> None:
    """Raise ProgramError where a program does not run on this rank, or not on so many."""
    if program.last_rank >= size:
        raise ProgramError(
            f"@{program.name} runs on ranks up to {program.last_rank}, "
            f"in a job of {counted(size, 'process')}",
            because="every rank of a mesh is one process",
            hint=f"start {program.last_rank + 1} processes, or use a smaller mesh",
        )
    if program.rank not in (None, rank):
        raise ProgramError(
            f"@{program.name} is the projection onto rank {program.rank}, but this is rank {rank}",
            hint="pass the global program, or each rank its own projection",
        )


def check_count(program: str, rank: int, arguments: Sequence[Any], inputs: Sequence[str]) -> None:
    """Raise ProgramError unless there is an argument for each input."""
    if len(arguments) != len(inputs):
        raise ProgramError(
            f"@{program} on rank {rank}: {counted(len(arguments), 'argument')} for "
            f"{counted(len(inputs), 'input')}",
            hint="pass, in this order: " + listed(inputs),
        )


def check_arguments(
    program: HostProgram, rank: int, arguments: Sequence[Any], device: torch.device
) -> None:
    """Raise ProgramError unless the arguments of one rank fit the program."""
    check_count(program.name, rank, arguments, program.inputs)
    for name, argument in zip(program.inputs, arguments, strict=True):
        _check(program, rank, name, argument, device, "input")
    if program.written_inputs:
        _check_written(program, rank, dict(zip(program.inputs, arguments, strict=True)))


def _check_written(program: HostProgram, rank: int, given: dict[str, Any]) -> None:
    """Raise ProgramError unless written inputs can be written, and share no memory with others."""
    tensors = {n: x for n, x in given.items() if isinstance(x, Tensor)}
    spans = {n: span(x) for n, x in tensors.items()}
    for name in sorted(program.written_inputs.intersection(tensors)):
        _check_writable(name, tensors[name], f"rank {rank}, input %{name} of @{program.name}")
        for other in _overlapping(name, spans):
            raise ProgramError(
                f"%{name} shares memory with %{other} on rank {rank}",
                where=f"rank {rank}, input %{name} of @{program.name}",
                because=f"%{name} is written, while %{other} may still be read",
                hint="pass a clone of one of them",
            )
    for alias, order in program.alias_orders.items():
        if (x := tensors.get(program.root(alias))) is not None:
            _check_order(program, rank, alias, x, order)


def _check_order(
    program: HostProgram, rank: int, alias: str, x: Tensor, order: tuple[int, ...]
) -> None:
    """Raise ProgramError unless a written input has the required memory order."""
    if _lies_in(x, order):
        return
    name, strides = program.root(alias), dense_strides(x.shape, order)
    raise ProgramError(
        f"%{name} has strides {x.stride()} on rank {rank}, expected {strides}",
        where=f"rank {rank}, input %{name} of @{program.name}",
        because=f"%{alias} is written there, and its memory order is required",
        hint=f"pass torch.empty_strided({tuple(x.shape)}, {strides}).copy_(x), or leave out the "
        f"stride_order of %{alias}",
    )


def _overlapping(name: str, spans: Mapping[str, tuple[int, int]]) -> Iterator[str]:
    """Yield the names of other tensors that share memory with one."""
    start, end = spans[name]
    for other, (first, last) in spans.items():
        if start < last and first < end and other != name:  # the same name: returned twice
            yield other


def _check_writable(name: str, x: Tensor, where: str) -> None:
    """Raise ProgramError unless torch can write each element of a tensor, in its own memory."""
    because, hint = f"the program writes into %{name}", "pass x.clone()"
    if overlaps_itself(x):
        raise ProgramError(
            f"elements of %{name} share memory: shape {tuple(x.shape)}, strides {x.stride()}",
            where=where,
            because=because,
            hint="pass x.contiguous()" if 0 in x.stride() else hint,
        )
    if is_lazy(x):
        raise ProgramError(
            f"the memory of %{name} does not hold its elements, but what they are computed from",
            where=where,
            because=because,
            hint="pass x.clone(), or x.resolve_neg().resolve_conj()",
        )
    if not are_writable([x]):
        raise ProgramError(
            f"%{name} was made under torch.inference_mode()",
            where=where,
            because=f"{because}, and torch allows that under inference_mode() alone",
            hint="run under torch.inference_mode(), or pass x.clone()",
        )


def check_global(
    program: str, name: str, x: Any, shape: tuple[int, ...] | None, dtype: torch.dtype
) -> None:
    """Raise ProgramError unless a global input is a tensor of a shape; without one, a number."""
    where = f"input %{name} of @{program}"
    if shape is None:
        if as_number(x, dtype) is None:
            raise _no_number(name, x, dtype, where)
        return
    if has_dtensors((x,)):
        raise ProgramError(
            f"a DTensor for %{name}",
            where=where,
            because="one process stands for all ranks here",
            hint="pass the whole tensor: x.full_tensor()",
        )
    if isinstance(x, Tensor):
        _check_plain(name, x, where)
        if (tuple(x.shape), x.dtype) == (shape, dtype):
            return
    given, hint = type(x).__name__, "pass a tensor of torch"
    if isinstance(x, Tensor):
        given = f"{x.dtype} {tuple(x.shape)}"
        hint = "pass the whole tensor, not the part of one rank"
        if tuple(x.shape) == shape:
            hint = f"pass x.to({dtype}), or define the input with {x.dtype}"
    raise ProgramError(
        f"{given} for %{name}, expected a global tensor: {dtype} {shape}", where=where, hint=hint
    )


def _check_plain(name: str, x: Tensor, where: str) -> None:
    why = why_not(x)
    if why is not None:
        what, hint = why
        raise ProgramError(
            f"%{name} is {what}",
            where=where,
            because="a program computes with plain strided tensors",
            hint=hint,
        )


def check_no_gradients(program: str, names: Iterable[str], xs: Iterable[Any]) -> None:
    """Raise ProgramError where autograd would have to record the use of a tensor."""
    for name, x in zip(names, xs, strict=False):
        why = no_gradient(x) if isinstance(x, Tensor) else None
        if why is not None:
            what, hint = why
            raise ProgramError(
                f"%{name} {what}",
                where=f"%{name} of @{program}",
                because="a run is not recorded; mf.grad makes gradients, mf.differentiable records",
                hint=hint,
            )


def _no_number(name: str, x: Any, dtype: torch.dtype, where: str) -> ProgramError:
    return ProgramError(
        f"{described(x)} for %{name}",
        where=where,
        because=f"this input is a number of dtype {dtype}",
        hint="pass such a number, or define the scalar with another dtype",
    )


def described(x: Any) -> str:
    """Return a short description of an argument, for error messages."""
    if not isinstance(x, Tensor):
        if isinstance(x, Mapping):
            return f"a {type(x).__name__} of {', '.join(map(str, x))}"
        text = repr(x) if not isinstance(x, int) or abs(x) < 1 << 128 else hex(x)
        return text if len(text) <= 100 else f"{text[:100]}..."
    why = why_not(x)
    return f"{x.dtype} {tuple(x.shape)}" if why is None else why[0]


def not_buffers(program: str, out: object) -> ProgramError:
    """Return the error for an `out=` that is no list."""
    return ProgramError(
        f"@{program}: out={described(out)}",
        because="out= has a buffer for every output",
        hint="pass a list, also for one output: out=[buffer]",
    )


def by_name(
    program: HostProgram, given: object
) -> tuple[list[Any], list[Any] | None, ProgramError | None]:
    """Return arguments given by name in order, buffers of outputs, and the error of both."""
    names = program.inputs
    if not isinstance(given, Mapping):
        problem = ProgramError(
            f"@{program.name}: {type(given).__name__} for the arguments",
            because="an evaluator takes them by name",
            hint="pass a dict with " + listed(names),
        )
        return [], None, problem
    buffers = {n: given[n] for n in given if n not in names}
    unknown = [n for n in buffers if n not in program.outputs]
    missing = [n for n in names if n not in given]
    wrong = None
    if unknown or missing:
        wrong = ProgramError(
            f"@{program.name}: missing {missing}, unknown {unknown}",
            hint="pass a tensor, None or a number for each of " + listed(names),
        )
    out = [buffers.get(n) for n in program.outputs] if buffers else None
    return [given.get(n) for n in names], out, wrong


def check_outputs(
    program: HostProgram,
    rank: int,
    arguments: Sequence[Any],
    out: Sequence[Any],
    device: torch.device,
    is_partial: bool = False,
) -> None:
    """Raise ProgramError unless preallocated outputs are buffers that the program can write into.

    All outputs that this rank computes have a buffer; with `is_partial` None stands for one that
    has none.
    """
    if len(out) != len(program.outputs):
        raise ProgramError(
            f"@{program.name} on rank {rank}: {counted(len(out), 'buffer')} for "
            f"{counted(len(program.outputs), 'output')}",
            hint="pass a buffer for every output, or none",
        )
    taken = {
        name: x for name, x in zip(program.inputs, arguments, strict=True) if isinstance(x, Tensor)
    }
    for name, buffer in zip(program.outputs, out, strict=True):
        root = program.root(name)
        is_written = root != name and root in program.inputs
        if buffer is None and (is_partial or is_written):
            continue
        _check(program, rank, name, buffer, device, "output")
        if buffer is None:
            continue
        if is_written:
            _check_is_input(program, rank, name, root, buffer, taken.get(root))
            continue
        _check_writable(name, buffer, f"rank {rank}, output %{name} of @{program.name}")
        _check_strides(program, rank, name, buffer)
        _check_apart(program, rank, name, buffer, taken)
        taken[name] = buffer


def _check_is_input(
    program: HostProgram, rank: int, name: str, root: str, buffer: Tensor, given: Any
) -> None:
    if given is None or buffer.data_ptr() != given.data_ptr():
        raise ProgramError(
            f"a buffer for %{name} on rank {rank}, which is written into input %{root}",
            where=f"rank {rank}, output %{name} of @{program.name}",
            because=f"%{name} is an alias of %{root}",
            hint=f"pass None, or what you pass for %{root}",
        )


def _check_strides(program: HostProgram, rank: int, name: str, buffer: Tensor) -> None:
    """Raise ProgramError unless a buffer is dense in the order that the program states.

    For an output that shows the result of a communication, the order left by it is fine, too.
    """
    order = program.orders.get(name, Order())
    strides = dense_strides(buffer.shape, order.stated)
    if not _lies_in(buffer, order.stated) and not _lies_in(buffer, order.lies or order.stated):
        raise ProgramError(
            f"%{name} has strides {buffer.stride()} on rank {rank}, expected {strides}",
            where=f"rank {rank}, output %{name} of @{program.name}",
            because="an output is written dense, in the memory order that the program states",
            hint="pass torch.empty_strided(shape, strides), or no buffer",
        )


def _lies_in(buffer: Tensor, order: tuple[int, ...] | None) -> bool:
    strides = dense_strides(buffer.shape, order)
    pairs = zip(buffer.shape, buffer.stride(), strides, strict=True)
    return not buffer.numel() or all(n <= 1 or s == t for n, s, t in pairs)


def _check_apart(
    program: HostProgram, rank: int, name: str, buffer: Tensor, taken: dict[str, Tensor]
) -> None:
    """Raise ProgramError where a buffer shares memory with an input or another output."""
    spans = {n: span(x) for n, x in {**taken, name: buffer}.items()}
    for other in _overlapping(name, spans):
        raise ProgramError(
            f"the buffer for %{name} shares memory with %{other} on rank {rank}",
            where=f"rank {rank}, output %{name} of @{program.name}",
            because="it may be written while the other is still read",
            hint=f"pass a buffer of its own, or say add_output({name}, reuse={other})",
        )


def _check(
    program: HostProgram, rank: int, name: str, x: Any, device: torch.device, role: str
) -> None:
    where = f"rank {rank}, {role} %{name} of @{program.name}"
    check_kind(program.types[name], rank, name, x, device, where)


def check_kind(
    kind: BufferType, rank: int, name: str, x: Any, device: torch.device, where: str
) -> None:
    """Raise ProgramError unless an argument of a rank, described by `where`, is of a kind."""
    if kind.layout is None:
        if as_number(x, kind.dtype) is None:
            raise _no_number(name, x, kind.dtype, where)
        return
    if rank not in kind.layout.mesh:
        if x is not None:
            raise ProgramError(
                f"a tensor for %{name} on rank {rank}",
                where=where,
                because=f"it lives on {kind.layout.mesh}, which rank {rank} is not in",
                hint="pass None here",
            )
        return
    if not isinstance(x, Tensor):
        raise ProgramError(
            f"{type(x).__name__} for %{name}", where=where, hint="pass this rank's local tensor"
        )
    if x.device != device:
        raise ProgramError(
            f"%{name} is on {x.device}, expected {device}",
            where=where,
            because=f"rank {rank} computes on {device}",
            hint=f"pass x.to({str(device)!r})",
        )
    _check_plain(name, x, where)
    expected = kind.local_shape(rank)
    if tuple(x.shape) != expected:
        raise ProgramError(
            f"%{name} has shape {tuple(x.shape)} on rank {rank}, expected {expected}",
            where=where,
            because=f"its part of {kind.shape} laid out as {kind.layout} has that shape",
            hint="pass the local part: mdfuse.shard_tensor(global_tensor, mesh, layout, rank=...)",
        )
    if x.dtype != kind.dtype:
        raise ProgramError(
            f"%{name} has dtype {x.dtype}, expected {kind.dtype}",
            where=where,
            hint=f"pass x.to({kind.dtype}), or define %{name} with {x.dtype}",
        )


def numbers(program: HostProgram, arguments: Sequence[Any]) -> list[Any]:
    """Return the arguments, with scalars as Python numbers of the kind that was defined."""
    kinds = [program.types[name] for name in program.inputs]
    return [
        as_number(x, kind.dtype) if kind.layout is None else x
        for kind, x in zip(kinds, arguments, strict=True)
    ]
