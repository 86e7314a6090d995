"""Run programs on DTensors: their local tensors go in, and the results are wrapped as DTensors.

DTensors are compared with the program once per kind; a run with DTensors of a known kind just takes
their local tensors, and wraps the results. Nothing communicates.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, is_grad_enabled
from torch.distributed.tensor import DTensor

from mdfuse.caching import Cache
from mdfuse.errors import LayoutError, MdfuseError, MeshError, ProgramError
from mdfuse.hir.orders import Order
from mdfuse.hir.program import BufferType, HostProgram
from mdfuse.layouts.layout import Layout
from mdfuse.mesh import DeviceMesh
from mdfuse.runs.arguments import check_no_gradients
from mdfuse.runs.dtensor import describes, layout_of, placements_of, to_dtensor, why_not
from mdfuse.torch_private import asynchronous_type, local_of, spec_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh

_ASYNCHRONOUS = asynchronous_type()

#: How many kinds of DTensors a program remembers.
LIMIT = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class DTensorOutput:
    """An output that is wrapped as a DTensor.

    Attributes:
        kind: its type in the program.
        mesh: torch's mesh.
        source: the position of the input into whose buffer the output is written: that DTensor is
            the result. None: the output has a buffer of its own.
        order: the memory order that the program states; None: that of this rank's part. The first
            is better, since strides of dims with one element mean nothing.
        known: the specs of earlier results, by their local strides.
    """

    kind: BufferType
    mesh: TorchMesh
    source: int | None
    order: tuple[int, ...] | None
    known: dict[tuple[int, ...] | None, Any] = field(default_factory=dict)

    def wrapped(self, local: Tensor | None) -> DTensor:
        """Return this rank's result as a DTensor; `local` is None outside of the mesh."""
        key = None if local is None else local.stride()
        spec = self.known.get(key)
        if spec is not None and local is not None:
            return DTensor(local, spec, requires_grad=False)
        wrapper = self._first(local)
        self.known[key] = spec_of(wrapper)
        return wrapper

    def _first(self, local: Tensor | None) -> DTensor:
        import torch

        layout = self.kind.placed
        if local is None:
            local = torch.empty(0, dtype=self.kind.dtype, device=self.mesh.device_type)
        return to_dtensor(local, self.mesh, layout, self.kind.shape, self.order)


#: The wrappers of a run's outputs, for one kind of DTensors as inputs and buffers; None: the output
#: stays as it is.
Outputs = tuple[DTensorOutput | None, ...]


@dataclass(frozen=True)
class Border:
    """The border at which DTensors enter the runs of a host program, and leave them."""

    program: HostProgram
    _known: Cache[Outputs] = field(default_factory=lambda: Cache(LIMIT))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def call(
        self,
        run: Callable[..., list[Any]],
        arguments: Sequence[Any],
        out: Sequence[Any] | None,
        problem: MdfuseError | None,
        is_partial: bool,
    ) -> list[Any]:
        """Run with local tensors, and return the results as DTensors. See `HostIrEvaluator.call`.

        A DTensor that does not fit is handed to `run` as the problem of this run, so that all ranks
        hear of it like any other problem.
        """
        outputs = None
        if problem is None:
            try:
                outputs = self.outputs(arguments, out)
            except MdfuseError as error:
                problem = error
        buffers = None if out is None else locals_of(out)
        results = run(locals_of(arguments), buffers, problem, is_partial)
        assert outputs is not None
        return _wrapped(outputs, results, arguments, out)

    def outputs(self, arguments: Sequence[Any], out: Sequence[Any] | None) -> Outputs:
        """Return the wrappers of a run's results; DTensors of a new kind are checked first.

        Raises:
            ProgramError: one does not fit the program; an output cannot be a DTensor.
        """
        key = tuple(map(_kind, arguments)), None if out is None else tuple(map(_kind, out))
        with self._lock:
            return self._known.get_or(key, lambda: self._checked(arguments, out))

    def _checked(self, arguments: Sequence[Any], out: Sequence[Any] | None) -> Outputs:
        program, buffers = self.program, out or ()
        if len(arguments) != len(program.inputs) or len(buffers) not in (0, len(program.outputs)):
            return ()  # the run refuses them
        check_no_gradients(program.name, program.inputs, arguments)
        check_no_gradients(program.name, program.outputs, buffers)
        given = [*zip(program.inputs, arguments, strict=True)]
        given += zip(program.outputs, buffers, strict=False)
        for name, x in given:
            if type(x) is DTensor:
                _check(program, name, x)
        meshes = [x.device_mesh for _, x in given if type(x) is DTensor]
        has_buffer = [x is not None for x in buffers] or [False] * len(program.outputs)
        return tuple(
            None if has else _output(program, name, meshes)
            for name, has in zip(program.outputs, has_buffer, strict=True)
        )


def _wrapped(
    outputs: Outputs, results: Sequence[Any], arguments: Sequence[Any], out: Sequence[Any] | None
) -> list[Any]:
    """Return the results as DTensors; for an output with a buffer, the caller's DTensor."""
    wrapped: list[Any] = []
    for i, (output, local) in enumerate(zip(outputs, results, strict=True)):
        if out is not None and out[i] is not None:
            wrapped.append(out[i])
        elif output is None:
            wrapped.append(local)
        elif output.source is not None and type(arguments[output.source]) is DTensor:
            wrapped.append(arguments[output.source])
        else:
            wrapped.append(output.wrapped(local))
    return wrapped


def _kind(x: Any) -> Hashable:
    """Return the checked properties of an argument, and the mesh that results will be on."""
    # equal meshes may differ in their process groups, of which one may be gone
    if type(x) is not DTensor:
        return x is None
    return spec_of(x), id(x.device_mesh), x.requires_grad and is_grad_enabled()


def locals_of(xs: Sequence[Any]) -> list[Any]:
    """Return this rank's parts of DTensors, None where it has none; other values as they are."""
    return [_local(x) if type(x) is DTensor else x for x in xs]


def _local(x: DTensor) -> Tensor | None:
    local: Any = local_of(x)
    if type(local) is _ASYNCHRONOUS:
        local = local.wait()
    return local if x.device_mesh.get_coordinate() is not None else None


# -- checks --------------------------------------------------------------------------------------


def _check(program: HostProgram, name: str, x: DTensor) -> None:
    """Raise ProgramError unless a DTensor has the layout that the program states."""
    kind, where = program.types[name], _where(program, name)
    if kind.layout is None:
        return  # a number is wanted: the run says so
    if kind.padding is not None or kind.flat:
        raise ProgramError(
            f"a DTensor for %{name}",
            where=where,
            because="this buffer is padded or flat, which a DTensor is not",
            hint=f"pass this rank's buffer, of type {kind.text()}",
        )
    try:
        if not describes(x.device_mesh, kind.layout.mesh):
            raise _other_mesh(name, DeviceMesh(x.device_mesh), kind.layout.mesh, where)
        layout = layout_of(x, kind.layout.mesh.axes, kind.layout.mesh.hosts)
    except (LayoutError, MeshError) as error:
        raise ProgramError(
            f"%{name}: {error.what}", where=where, because=error.because, hint=error.hint
        ) from error
    if tuple(x.shape) != kind.shape:
        raise ProgramError(
            f"%{name} is a DTensor of shape {tuple(x.shape)}, expected {kind.shape}",
            where=where,
            because="the shape of a DTensor is that of the whole",
            hint="where parts are uneven: DTensor.from_local(..., shape=shape, stride=stride), or "
            "distribute_tensor",
        )
    if layout.normalized(x.ndim) != kind.layout.with_stream(None).normalized(x.ndim):
        raise _other_layout(program, name, layout)


def _where(program: HostProgram, name: str) -> str:
    role = "input" if name in program.inputs else "output"
    return f"{role} %{name} of @{program.name}"


def _other_mesh(name: str, given: DeviceMesh, expected: DeviceMesh, where: str) -> ProgramError:
    return ProgramError(
        f"%{name} is a DTensor on {given}, expected {expected}",
        where=where,
        because="meshes have the same ranks in the same shape, and the same names where torch's "
        "mesh has some",
        hint=f"pass a DTensor on init_device_mesh(device, {expected.shape}, "
        f"mesh_dim_names={expected.axes}), or define %{name} on the mesh that it is on",
    )


def _other_layout(program: HostProgram, name: str, given: Layout) -> ProgramError:
    expected = program.types[name].placed
    axes = ", ".join(f'"{a}": {_code(p)}' for a, p in given.by_axis().items())
    hints = [f"define %{name} with layout={{{axes}}}"]
    if name not in program.inputs:
        hints = [f"state it in the program: {name}.on(mesh, {{{axes}}})"]
    shape = program.types[name].shape
    if why_not(expected, shape) is None:
        placements = ", ".join(map(_code, placements_of(expected, shape)))
        hints.insert(0, f"x.redistribute(mesh, [{placements}])")
    return ProgramError(
        f"%{name} is a DTensor laid out as {given}, expected {expected}",
        where=_where(program, name),
        because="a program takes inputs and buffers as it says, and moves nothing unasked",
        hint=", or ".join(hints),
    )


def _code(placement: Any) -> str:
    """Return the code that makes a placement, torch's or ours."""
    values = (getattr(placement, name, None) for name in ("dim", "reduce_op", "op"))
    known = ", ".join(repr(x) for x in values if x is not None)
    settings = (
        f", {n}={x}" for n in ("split_factor", "blocks") if (x := getattr(placement, n, None))
    )
    return f"{type(placement).__name__}({known}{''.join(settings)})"


def _output(program: HostProgram, name: str, meshes: Sequence[TorchMesh]) -> DTensorOutput | None:
    """Return the wrapper of an output; None for a number.

    Raises:
        ProgramError: it cannot be a DTensor.
    """
    kind, root = program.types[name], program.root(name)
    if kind.layout is None:
        return None
    refusal = _refusal(kind, meshes)
    if refusal is not None:
        because, hint = refusal
        raise ProgramError(
            f"%{name} cannot be a DTensor: it is laid out as {kind.layout} on {kind.layout.mesh}",
            where=_where(program, name),
            because=because,
            hint=f"{hint}; or pass x.to_local() for all DTensors, and get local tensors",
        )
    return DTensorOutput(
        kind=kind,
        mesh=next(m for m in meshes if describes(m, kind.layout.mesh)),
        source=program.inputs.index(root) if root in program.inputs else None,
        order=program.orders.get(root, Order()).lies,
    )


def _refusal(kind: BufferType, meshes: Sequence[TorchMesh]) -> tuple[str, str] | None:
    """Return the reason why an output cannot be a DTensor, and the remedy; None: it can."""
    if kind.padding is not None or kind.flat:
        return "this buffer is padded or flat, which a DTensor is not", "return what it holds"
    why = why_not(kind.placed, kind.shape)
    if why is not None:
        return why[0], f"give it {why[1]}"
    if any(describes(m, kind.placed.mesh) for m in meshes):
        return None
    return (
        "with DTensors for arguments outputs are DTensors, and none of these is on that mesh; "
        "mdfuse makes no meshes of torch's",
        "pass out= with a DTensor on that mesh",
    )
