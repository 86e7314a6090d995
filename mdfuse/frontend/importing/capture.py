"""Export a module: a graph of aten's operations, with names of parameters, inputs and outputs."""

from __future__ import annotations

import threading
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from mdfuse.errors import OWN, DefinitionError, Source
from mdfuse.frontend.given import check_module
from mdfuse.frontend.importing.activations import Noted, PassedTensor, argument_names
from mdfuse.frontend.importing.adapters import Adapter, adapted
from mdfuse.frontend.importing.backwards import Backwards, own_backwards
from mdfuse.frontend.importing.dynamic import dims_of_tensors
from mdfuse.frontend.importing.inline import inline, part_detached
from mdfuse.frontend.importing.module_lines import line_of
from mdfuse.frontend.importing.reached import Reached, held
from mdfuse.frontend.importing.submodules import PREFIX
from mdfuse.frontend.importing.torch_tracing import CallsOnce, frames_once, late_code
from mdfuse.frontend.plain import brief
from mdfuse.frontend.spec import TensorSpec
from mdfuse.names import as_name
from mdfuse.torch_private import writes
from mdfuse.trees import flattened, key_text, tensor_in_constant, tensor_inside, unflattened


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter of the module, or a floating buffer that checkpoints have.

    Attributes:
        name: the first of its names.
        names: all of them; several where it is tied.
        tensor: the parameter itself; on the meta device it has no numbers.
        is_buffer: whether it is a buffer, which nothing trains.
        adapter: the origin of an adapter's parameter; else None.
    """

    name: str
    names: tuple[str, ...]
    tensor: Tensor
    is_buffer: bool = False
    adapter: Adapter | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLeaf:
    """A leaf of the module's result.

    Attributes:
        path: its keys, joined by dots.
        place: the position among the tensors; None for other leaves.
        constant: the number or text of a leaf; None for other leaves.
        is_other: whether its type is left out, as for a cache.
    """

    path: str
    place: int | None
    constant: Any = None
    is_other: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedModule:
    """An exported module.

    Attributes:
        module: as passed.
        name: of its class.
        graph: the graph with its submodules.
        parameters: placeholder -> the parameter.
        constants: placeholder -> buffer or tensor that the graph holds.
        origins: placeholder of a constant -> its name in the module.
        inputs: placeholder -> the name of the argument, in the order of leaves.
        outputs: leaves of the result.
        mutated: placeholders of buffers that the module writes, in the order of the first results.
        unused: parameters that nothing reads.
        structure: of the arguments, and of the result, as `unflattened` takes them.
        backwards: calls that say how the backward goes; only their forward is captured.
        passed: what noted calls of submodules take and return.
    """

    module: nn.Module
    name: str
    graph: GraphModule
    parameters: Mapping[Node, Parameter]
    constants: Mapping[Node, Tensor]
    origins: Mapping[Node, str]
    inputs: Mapping[Node, str]
    outputs: tuple[OutputLeaf, ...]
    mutated: tuple[Node, ...]
    unused: tuple[Parameter, ...]
    structure: tuple[Any, Any]
    backwards: Backwards = field(default_factory=Backwards)
    passed: tuple[PassedTensor, ...] = ()

    @property
    def results(self) -> tuple[Any, ...]:
        """The nodes of the module's results."""
        return self._all_results[len(self.mutated) :]

    @property
    def written(self) -> tuple[tuple[Node, Any], ...]:
        """The placeholders of written buffers, each with the node of its new value."""
        return tuple(zip(self.mutated, self._all_results, strict=False))

    @property
    def _all_results(self) -> tuple[Any, ...]:
        (node,) = (n for n in self.graph.graph.nodes if n.op == "output")
        return tuple(node.args[0])


@dataclass(slots=True)
class _Seen:
    """The result of a module during export, which undoes changes to the module."""

    outputs: tuple[OutputLeaf, ...] = ()
    structure: Any = None


class _Whole(nn.Module):
    """A module as a function from tensor leaves to tensors."""

    def __init__(
        self, module: nn.Module, leaves: Sequence[Any], structure: Any, noted: Noted
    ) -> None:
        super().__init__()
        self.module, self.noted = module, noted
        self.leaves, self.structure = list(leaves), structure
        self.seen, self.held = _Seen(), held(module)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Rebuild the arguments from tensors, call the module, and flatten its result."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(x, Tensor) else x for x in self.leaves]
        args, kwargs = unflattened(leaves, self.structure)
        self.noted.begin()
        with CallsOnce(), Reached(self.module, self.held) as reached:
            given_back = self.module(*args, **kwargs)
        leaves_back, self.seen.structure = flattened(given_back)
        paths = [(path, reached.meant(x)) for path, x in leaves_back]
        results: list[Tensor] = []
        outputs: list[OutputLeaf] = []
        for path, x in paths:
            is_tensor = isinstance(x, Tensor)
            place = len(results) if is_tensor else None
            results += [x] if is_tensor else []
            is_plain = isinstance(x, _PLAIN)
            outputs.append(
                OutputLeaf(
                    path=key_text(path),
                    place=place,
                    constant=x if is_plain else None,
                    is_other=not (is_tensor or is_plain),
                )
            )
        self.seen.outputs = tuple(outputs)
        return (*reached.written(results), *self.noted.tensors)


_PLAIN = (bool, int, float, str, type(None))


def capture(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    adapters: Mapping[str, Any] | None = None,
    noted: Noted | None = None,
) -> ExportedModule:
    """Export a module for arguments of these shapes and dtypes.

    Args:
        module: to export.
        args, kwargs: of its forward.
        dynamic_shapes: the extents that each run chooses; see `dims_of_tensors`.
        adapters: pattern of names of layers -> rank; see `adapted`.
        noted: what calls of submodules take and return.

    Raises:
        DefinitionError: the module cannot be exported; with its line, and torch's error.
    """
    _check(module, args)
    noted = noted or Noted()
    with _one, adapted(module, adapters or {}) as brought, noted.hooked(module):
        return _captured(module, args, kwargs, dynamic_shapes, brought, noted)


#: Exports take turns: torch keeps what it traces in the process, not in the thread.
_one = threading.RLock()


def _captured(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    dynamic_shapes: Any,
    adapters: Mapping[str, Adapter],
    noted: Noted,
) -> ExportedModule:
    held = chain(module.parameters(), module.buffers())
    device = next((x.device for x in held), torch.device("cpu"))
    paths, structure = flattened((tuple(args), dict(kwargs or {})))
    for path, x in paths:
        if (attribute := tensor_inside(x)) is not None:
            raise tensor_in_constant(_argument_names(module, [path], args)[0], x, attribute)
    leaves = [_example(x, device) for _, x in paths]
    whole = _Whole(module, leaves, structure, noted)
    tensors = tuple(x for x in leaves if isinstance(x, Tensor))
    names = _argument_names(module, [path for path, x in paths if isinstance(x, _TENSORS)], args)
    dynamic = dims_of_tensors(module, args, kwargs or {}, dynamic_shapes, names)
    try:
        quickly = late_code(), frames_once()
        with warnings.catch_warnings(), ExitStack() as stack, own_backwards() as backwards:
            [*map(stack.enter_context, quickly)]
            warnings.simplefilter("ignore")
            dims = None if dynamic is None else (tuple(dynamic),)
            exported = torch.export.export(whole, tensors, dynamic_shapes=dims, strict=False)
            inline(exported.graph_module)
            if any(writes(n.target) for n in exported.graph.nodes):  # writes become new values
                part_detached(exported.graph_module)
                exported = exported.run_decompositions({})
    except Exception as error:
        raise _not_exported(module, error) from error
    parameters = [_of_adapter(p, adapters.get(p.name)) for p in _parameters(module)]
    places = _Places()
    places.sort(exported, {name: p for p in parameters for name in p.names}, names)
    mutated = _mutated(module, exported, places)
    noted.take(exported.graph_module)
    read = {p.name for n, p in places.parameters.items() if n.users}
    return ExportedModule(
        module=module,
        name=type(module).__name__,
        graph=exported.graph_module,
        parameters=places.parameters,
        constants=places.constants,
        origins=places.origins,
        inputs=places.inputs,
        outputs=whole.seen.outputs,
        mutated=mutated,
        unused=tuple(p for p in parameters if p.name not in read),
        structure=(structure, whole.seen.structure),
        backwards=backwards,
        passed=tuple(noted.entries),
    )


_TENSORS = (Tensor, TensorSpec)


def _check(module: Any, args: Any) -> None:
    """Raise DefinitionError unless module is a module and args a sequence."""
    check_module("from_torch", module)
    if isinstance(args, Tensor | TensorSpec | str) or not isinstance(args, Sequence):
        raise DefinitionError(
            f"from_torch with {brief(args)} as arguments",
            because="they are a tuple, as for torch.export.export",
            hint="from_torch(module, (x,), ...)",
        )


def _mutated(module: nn.Module, exported: ExportedProgram, places: _Places) -> tuple[Node, ...]:
    """Return the placeholders of written buffers; other writes raise DefinitionError."""
    written = []
    buffers = {f"{PREFIX}{p.name}": n for n, p in places.parameters.items() if p.is_buffer}
    (output,) = (n for n in exported.graph.nodes if n.op == "output")
    for spec, node in zip(exported.graph_signature.output_specs, output.args[0], strict=True):
        if spec.kind.name == "USER_OUTPUT":
            continue
        if spec.kind.name == "BUFFER_MUTATION" and spec.target in buffers:
            written.append(buffers[spec.target])
            continue
        inputs = {n.name: name for n, name in places.inputs.items()}
        name = inputs.get(str(spec.target), str(spec.target).removeprefix(PREFIX))
        line = line_of(node.meta.get("stack_trace"))
        raise DefinitionError(
            f"{type(module).__name__} writes into {name}",
            where=[line.quote()] if line else [],
            because="a program writes into no argument and no parameter",
            hint="make a new tensor: x = x + 1 for x += 1",
        )
    return tuple(written)


@dataclass(slots=True)
class _Places:
    """The placeholders of a graph by kind: parameters, constants, inputs."""

    parameters: dict[Node, Parameter] = field(default_factory=dict)
    constants: dict[Node, Tensor] = field(default_factory=dict)
    origins: dict[Node, str] = field(default_factory=dict)
    inputs: dict[Node, str] = field(default_factory=dict)

    def sort(
        self, exported: ExportedProgram, parameters: Mapping[str, Parameter], names: Sequence[str]
    ) -> None:
        """Enter each placeholder; the first of several for one parameter takes all uses."""
        nodes = {n.name: n for n in exported.graph.nodes if n.op == "placeholder"}
        held = {**exported.constants, **exported.state_dict}
        written = {*exported.graph_signature.buffers_to_mutate.values()}
        given = iter(names)
        for spec in exported.graph_signature.input_specs:
            node, target = nodes[spec.arg.name], (spec.target or "").removeprefix(PREFIX)
            tensor = held.get(spec.target or "")
            is_kept = spec.kind.name == "BUFFER" and spec.persistent
            is_read = is_kept and tensor is not None and tensor.is_floating_point()
            if spec.kind.name == "USER_INPUT":
                self.inputs[node] = next(given)
            elif spec.kind.name == "PARAMETER":
                parameter = parameters[target]
                first = next((n for n, p in self.parameters.items() if p is parameter), node)
                self.parameters[first] = parameter
                node.replace_all_uses_with(first)
            elif tensor is not None and (is_read or spec.target in written):
                self.parameters[node] = Parameter(
                    name=target, names=(target,), tensor=tensor, is_buffer=True
                )
            else:
                assert tensor is not None
                self.constants[node], self.origins[node] = tensor, target


def _example(x: Any, device: torch.device) -> Any:
    """Return an argument as export takes it; only shape and dtype of a tensor count.

    Each result is a new object, so that a tensor passed twice, or a buffer of the module, is still
    an input.
    """
    if isinstance(x, Tensor) and x.device == device:
        return x.detach()
    if isinstance(x, _TENSORS):
        return torch.empty(tuple(x.shape), dtype=x.dtype, device=device)
    return x


def _parameters(module: nn.Module) -> list[Parameter]:
    """The parameters in their order, tied ones once."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    return [
        Parameter(name=all_[0], names=tuple(all_), tensor=tensors[key])
        for key, all_ in names.items()
    ]


def _of_adapter(p: Parameter, adapter: Adapter | None) -> Parameter:
    """Return a parameter; an adapter's gets its initial numbers, even on the meta device."""
    return p if adapter is None else replace(p, adapter=adapter, tensor=nn.Parameter(adapter.start))


def _argument_names(
    module: nn.Module, paths: Sequence[Sequence[Any]], args: Sequence[Any]
) -> list[str]:
    """Return a name for each tensor among the arguments, as `forward` calls them."""
    known, names = argument_names(module, len(args)), list[str]()
    for kind, first, *keys in paths:
        at = key_text([first])
        name = known[int(at)] if key_text([kind]) == "0" else at
        words = (as_name(w, "_") if not w.isdigit() else w for w in key_text(keys).split("."))
        names.append(".".join([name, *words]) if keys else name)
    return names


def _not_exported(module: nn.Module, error: Exception) -> DefinitionError:
    """Return the error of torch's export, with the line of the model where it stopped."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [f for f in frames if not f.filename.startswith(OWN) and f.lineno]
    stack = "".join(f'File "{f.filename}", line {f.lineno}, in {f.name}\n' for f in users)
    where: Source | None = line_of(stack)
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return DefinitionError(
        f"{type(module).__name__} cannot be exported: {type(error).__name__}",
        where=[where.quote()] if where else [],
        because=f"torch.export says: {first.strip()}",
        hint="a forward whose operations do not depend on the values of tensors; "
        "torch.export.export(module, args, strict=False) shows the same",
    )
