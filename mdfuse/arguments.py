"""What callers pass to a run: checked against the program before anything is posted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from sys import modules
from typing import Any

import torch
from torch import Tensor

from mdfuse.errors import ProgramError
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.index import terms
from mdfuse.ir.infer import dense_strides
from mdfuse.ir.numbers import as_number
from mdfuse.plan.signature import span
from mdfuse.plan.slots import unbound


def has_dtensors(xs: Iterable[Any]) -> bool:
    """Whether a DTensor is among them, asked in each run.

    torch's module of DTensors is not imported for this: without it there are none.
    """
    dtensor = getattr(modules.get("torch.distributed.tensor"), "DTensor", None)
    return dtensor is not None and dtensor in map(type, xs)


def check_names(program: HostProgram) -> None:
    """Raise ProgramError where names cannot mean anything, on whatever rank.

    Inputs that are aliases, aliases in a cycle or of another type, names that nothing computes.
    """
    for name, of in program.aliases.items():
        _check_alias(program, name, of)
    for name in program.outputs:
        _check_output(program, name)
    _check_outputs_apart(program)
    known = set(map(program.root, program.inputs))
    known.update(program.root(n) for i in program.walk() for n in i.outputs)
    for i in program.walk():
        for name in _names(i):
            if program.root(name) not in known and not (
                i.op == "return" and _is_elsewhere(program, name)
            ):
                raise unbound(program, name, i)


def _check_outputs_apart(program: HostProgram) -> None:
    """No two outputs are one buffer: what a caller does to one would show in the other."""
    seen: dict[str, str] = {}
    for name in program.outputs:
        root = program.root(name)
        if root in seen:
            twice = "returned twice" if seen[root] == name else f"an alias of output %{seen[root]}"
            raise ProgramError(
                f"@{program.name}: output %{name} is {twice}",
                because="each output is a buffer of its own, or one of the caller's",
                hint=f"return a copy: %copy = mul(%{name}, 1)",
            )
        seen[root] = name


def _names(i: Instruction) -> Iterator[str]:
    """The buffers and handles that an instruction reads, or whose extent it asks for."""
    yield from i.reads
    for term in (t for index in i.indices for t in terms(index)):
        if term.kind == "extent":
            yield term.name


def _is_elsewhere(program: HostProgram, name: str) -> bool:
    """The program is that of a rank which has no part of a buffer."""
    return program.rank is not None and not program.has(name, program.rank)


def _check_alias(program: HostProgram, name: str, of: str) -> None:
    root = program.root(name)
    if name in program.inputs:
        raise ProgramError(
            f"@{program.name}: input %{name} is an alias of %{of}",
            because="inputs cannot be aliased: their buffers are the caller's",
            hint=f"alias %{of} = %{name} instead: %{of} then acts on the caller's buffer",
        )
    kind, other = program.types.get(name), program.types.get(root)
    if kind is not None and other is not None and kind != other:
        raise ProgramError(
            f"@{program.name}: %{name} is an alias of %{root}, but of another type",
            where=f"{kind.text()} {kind.layout}, and {other.text()} {other.layout}",
            because="both names stand for one buffer",
            hint="give them one type, or use reshape or permute for a view",
        )


def _check_output(program: HostProgram, name: str) -> None:
    layout = program.types[name].layout if name in program.types else None
    if layout is not None and layout.stream is not None and layout.stream.index is not None:
        raise ProgramError(
            f"@{program.name} returns %{name}, which is a chunk: {layout}",
            because="an output is a whole value",
            hint="return the buffer that it is a chunk of",
        )


def check_arguments(
    program: HostProgram, rank: int, arguments: Sequence[Any], device: torch.device
) -> None:
    """Raise ProgramError unless the arguments of one rank are what the program says."""
    if len(arguments) != len(program.inputs):
        raise ProgramError(
            f"@{program.name} on rank {rank}: {len(arguments)} arguments for "
            f"{len(program.inputs)} inputs",
            hint="pass, in this order: " + ", ".join(program.inputs),
        )
    for name, argument in zip(program.inputs, arguments, strict=True):
        _check(program, rank, name, argument, device, "input")
    if program.aliases:
        _check_written(program, rank, dict(zip(program.inputs, arguments, strict=True)))


def _check_written(program: HostProgram, rank: int, given: dict[str, Any]) -> None:
    """An input that is written through an alias shares no memory with another input."""
    tensors = {n: x for n, x in given.items() if isinstance(x, Tensor)}
    written = {program.root(n) for n in program.aliases}
    for name in sorted(written.intersection(tensors)):
        start, end = span(tensors[name])
        for other, x in tensors.items():
            first, last = span(x)
            if other != name and start < last and first < end:
                raise ProgramError(
                    f"%{name} shares memory with %{other} on rank {rank}",
                    where=f"rank {rank}, input %{name} of @{program.name}",
                    because=f"%{name} is written, while %{other} may still be read",
                    hint="pass a clone of one of them",
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
    if isinstance(x, Tensor) and (tuple(x.shape), x.dtype) == (shape, dtype):
        _check_strided(name, x, where)
        return
    found = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
    raise ProgramError(
        f"{found} for %{name}, expected a global tensor: {dtype} {shape}",
        where=where,
        hint="pass the whole tensor, not the part of one rank",
    )


def _check_strided(name: str, x: Tensor, where: str) -> None:
    if x.layout is not torch.strided:
        raise ProgramError(
            f"%{name} is a {x.layout} tensor",
            where=where,
            because="a program computes with strided tensors",
            hint="pass x.to_dense()",
        )


def _no_number(name: str, x: Any, dtype: torch.dtype, where: str) -> ProgramError:
    return ProgramError(
        f"{_described(x)} for %{name}",
        where=where,
        because=f"this input is a number of dtype {dtype}",
        hint="pass such a number, or define the scalar with another dtype",
    )


def _described(x: Any) -> str:
    return f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)


def check_outputs(
    program: HostProgram,
    rank: int,
    arguments: Sequence[Any],
    out: Sequence[Any],
    device: torch.device,
    is_partial: bool = False,
) -> None:
    """Raise ProgramError unless preallocated outputs are what the program writes into.

    All outputs that this rank computes have a buffer; with `is_partial` None stands for one that
    has none, but a host unit has buffers for all its outputs or for none.
    """
    if len(out) != len(program.outputs):
        raise ProgramError(
            f"@{program.name} on rank {rank}: {len(out)} buffers for {len(program.outputs)} "
            "outputs",
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
        _check_strides(program, rank, name, buffer)
        _check_apart(program, rank, name, buffer, taken)
        taken[name] = buffer
    given = {n for n, x in zip(program.outputs, out, strict=True) if x is not None}
    _check_units(program, rank, given)


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
    """A buffer is dense in the memory order that the program states for the output.

    Or in the one in which a communication delivers it, where the program only reads that back.
    """
    order = output_order(program, name)
    strides = dense_strides(buffer.shape, order)
    delivered = _delivered_order(program, name) or order
    if not _lies_in(buffer, order) and not _lies_in(buffer, delivered):
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


def _delivered_order(program: HostProgram, name: str) -> tuple[int, ...] | None:
    """The memory order of an output that is a permuted view of what a communication wrote."""
    root = program.root(name)
    made = [i for i in program.walk() if any(program.root(n) == root for n in i.outputs)]
    if not made or made[-1].op != "permute" or made[-1].order is not None:
        return None
    dims = made[-1].kwargs["dims"]
    return tuple(sorted(range(len(dims)), key=lambda d: dims[d] % len(dims)))


def _check_apart(
    program: HostProgram, rank: int, name: str, buffer: Tensor, taken: dict[str, Tensor]
) -> None:
    """A buffer shares no memory with an input or another output."""
    start, end = span(buffer)
    for other, x in taken.items():
        first, last = span(x)
        if other == name:  # returned twice
            continue
        if start < last and first < end:
            raise ProgramError(
                f"the buffer for %{name} shares memory with %{other} on rank {rank}",
                where=f"rank {rank}, output %{name} of @{program.name}",
                because="it may be written while the other is still read",
                hint=f"pass a buffer of its own, or say add_output({name}, reuse={other})",
            )


def output_order(program: HostProgram, name: str) -> tuple[int, ...] | None:
    """The memory order that the last instruction which makes an output states; None: its own."""
    root = program.root(name)
    orders = [
        i.order
        for i in program.walk()
        if i.op != "launch" and any(program.root(n) == root for n in i.outputs)
    ]
    return orders[-1] if orders else None


def _check_units(program: HostProgram, rank: int, given: set[str]) -> None:
    """A host unit writes all its outputs that are the program's into the caller's buffers."""
    roots = {program.root(n) for n in (*given, *program.inputs)}
    outputs = {program.root(n) for n in program.outputs if program.has(n, rank)}
    for i in program.walk() if given else ():
        made = [n for n in i.outputs if program.root(n) in outputs] if i.op == "launch" else []
        lacking = [n for n in made if program.root(n) not in roots]
        if lacking and len(lacking) < len(made):
            raise ProgramError(
                f"launch {i.fn}: buffers for some of its outputs, but not for {lacking}",
                where=f"rank {rank}, @{program.name}",
                because="a host unit writes all its outputs into buffers, or none",
                hint="pass a buffer for each of " + ", ".join(made),
            )


def _check(
    program: HostProgram, rank: int, name: str, x: Any, device: torch.device, role: str
) -> None:
    kind = program.types[name]
    where = f"rank {rank}, {role} %{name} of @{program.name}"
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
    _check_strided(name, x, where)
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
            hint=f"pass x.to({kind.dtype}), or define the {role} with {x.dtype}",
        )
    if x.device != device:
        raise ProgramError(
            f"%{name} is on {x.device}, expected {device}",
            where=where,
            because=f"rank {rank} computes on {device}",
            hint=f"pass x.to({str(device)!r})",
        )


def numbers(program: HostProgram, arguments: Sequence[Any]) -> list[Any]:
    """The arguments, with those for scalars as Python numbers of the kind that was defined."""
    kinds = [program.types[name] for name in program.inputs]
    return [
        as_number(x, kind.dtype) if kind.layout is None else x
        for kind, x in zip(kinds, arguments, strict=True)
    ]
