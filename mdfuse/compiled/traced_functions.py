"""Fusions from plain functions: traced once for arguments of a kind, called on DTensors."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mdfuse.caching import Cache
from mdfuse.errors import DefinitionError
from mdfuse.frontend import ops as operations
from mdfuse.frontend.definition import FusionDefinition
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.spec import TensorSpec
from mdfuse.mesh import as_mesh
from mdfuse.names import as_name
from mdfuse.runs.arguments import has_dtensors
from mdfuse.torch_private import spec_of, untraced
from mdfuse.trees import flattened, key_text, tensor_in_constant, tensor_inside, unflattened

if TYPE_CHECKING:
    from mdfuse.compiled.program import Program

#: How many definitions, and programs, a traced function keeps.
LIMIT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedDefinition:
    """The result of tracing a function.

    Attributes:
        definition: the fusion.
        rebuild: puts outputs together as the function returns them.
    """

    definition: FusionDefinition
    rebuild: Callable[[Sequence[Any]], Any]


class TracedFunction:
    """A function whose body defines a fusion.

    It is traced once for arguments of a kind: the specs of its tensors, and its other arguments as
    they are, which are constants of the trace. Values that the function reads besides its arguments
    count as they were then. The definitions and programs that were used last are kept.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.signature = _signature(function)
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self.__doc__ = function.__doc__
        self._traces: Cache[TracedDefinition] = Cache(LIMIT)
        self._calls: Cache[tuple[Program, TracedDefinition]] = Cache(LIMIT)
        self._lock = threading.RLock()

    @untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Inside a definition, run the body there; on DTensors, run the body's program.

        Args:
            args, kwargs: inside a definition, its values and numbers: the body as if it stood
                there. Else DTensors, and arguments that are constants: a number is part of the
                program.

        Returns:
            The result of the body; for DTensors a DTensor, or a tree of them as in the body.

        Raises:
            DefinitionError: neither values of an open definition nor DTensors; a plain tensor
                among DTensors; an argument that cannot be told from others; a body that returns
                something else than its values.
        """
        if self.is_inside(args, kwargs):
            return self.function(*args, **kwargs)
        return self._run(self._bound(args, kwargs))

    def is_inside(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Tell whether a call with these arguments is one inside a definition.

        Raises:
            DefinitionError: values of a definition that is not open.
        """
        given = [x for item in (*args, *kwargs.values()) for _, x in _leaves("", item)]
        handles = [x for x in given if isinstance(x, Handle)]
        for x in handles:
            x.definition._check_open()
        return bool(handles) or (operations.current.get() is not None and not has_dtensors(given))

    def on_dtensors(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[TracedDefinition, list[Tensor]]:
        """Return the trace for a call on DTensors, and these in the order of its inputs."""
        bound = self._bound(args, kwargs)
        arguments = _arguments(bound)
        self._check_dtensors(arguments)
        return self._traced(_with_specs(bound)), [x for _, x in arguments if isinstance(x, Tensor)]

    def define(self, *args: Any, **kwargs: Any) -> FusionDefinition:
        """Trace the function with a `TensorSpec` per tensor; other arguments become constants.

        Returns:
            The definition, the same one for equal arguments; a tuple that the function returns
            gives several outputs.

        Raises:
            DefinitionError: arguments that the function does not take or that cannot be told from
                others; a tensor; a function that returns something else than its values.
        """
        return self._traced(self._bound(args, kwargs)).definition

    def program(self, *args: Any, **kwargs: Any) -> Program:
        """Compile `define(...)`: the same program for equal arguments."""
        return self._compiled(self._bound(args, kwargs))[0]

    def _bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise DefinitionError(
                f"{self.__name__}: {error}", hint=f"it takes {self.__name__}{self.signature}"
            ) from error
        bound.apply_defaults()
        return bound

    # -- tracing ---------------------------------------------------------------------------------

    def _traced(self, bound: inspect.BoundArguments) -> TracedDefinition:
        """Return the result of tracing for some arguments, traced once for each kind."""
        parts = tuple((name, self._part(name, x)) for name, x in _arguments(bound))
        key = parts, _structures(bound)
        with self._lock:
            return self._traces.get_or(key, lambda: self._trace(bound))

    def _check_constant(self, name: str, x: Any) -> None:
        if isinstance(x, Tensor):
            raise DefinitionError(
                f"{self.__name__}: a tensor for {name}",
                because="a function is traced for tensors of a kind, not for one of them",
                hint="pass TensorSpec(shape, dtype, mesh, layout), or for a DTensor spec_of(x)",
            )
        if isinstance(x, Handle):
            raise DefinitionError(
                f"{self.__name__}: %{x.name} of @{x.definition.name} for {name}",
                because="a trace is a definition of its own",
                hint="call the function inside the definition, or pass a TensorSpec",
            )

    def _part(self, name: str, x: Any) -> Hashable:
        """Return the key of an argument in a trace: 1, 1.0 and True give different programs."""
        if isinstance(x, TensorSpec):
            return x.key
        if isinstance(x, tuple | list):
            return type(x), *(self._part(name, item) for item in x)
        self._check_constant(name, x)
        try:
            hash(x)
        except TypeError:
            raise DefinitionError(
                f"{self.__name__}: {type(x).__name__} for {name}",
                because="it is a constant of the program, told from others by its hash and value",
                hint="pass numbers, strings, or tuples and lists of them",
            ) from None
        return type(x), repr(x) if isinstance(x, float) else x  # 0.0 and -0.0 are equal

    def _trace(self, bound: inspect.BoundArguments) -> TracedDefinition:
        with FusionDefinition(as_name(self.__name__, "fusion")) as fd:
            defined = _replaced(bound, partial(_defined, fd))
            result = self.function(*defined.args, **defined.kwargs)
            outputs, structure = flattened(result)
            for _, output in outputs:
                if not isinstance(output, Handle):
                    raise DefinitionError(
                        f"{self.__name__} returns {type(output).__name__}",
                        because="the outputs of a program are its tensors",
                        hint="return a tensor that it computed, or a tuple of them",
                    )
                fd.add_output(output)
        if isinstance(result, Handle):
            return TracedDefinition(definition=fd, rebuild=itemgetter(0))
        is_flat = type(result) in (tuple, list) and len(outputs) == len(result)
        rebuild = type(result) if is_flat else partial(unflattened, structure=structure)
        return TracedDefinition(definition=fd, rebuild=rebuild)

    # -- running ---------------------------------------------------------------------------------

    def _compiled(self, bound: inspect.BoundArguments) -> tuple[Program, TracedDefinition]:
        from mdfuse.compiled.program import compile

        traced = self._traced(bound)
        return compile(traced.definition), traced

    def _run(self, bound: inspect.BoundArguments) -> Any:
        """Run the program of the function on DTensors."""
        arguments = _arguments(bound)
        self._check_dtensors(arguments)
        parts = tuple(
            (n, spec_of(x) if has_dtensors((x,)) else self._part(n, x)) for n, x in arguments
        )
        key = parts, _structures(bound)
        with self._lock:
            ready = self._calls.get(key)
        if ready is None:
            ready = self._compiled(_with_specs(bound))
            with self._lock:
                self._calls.put(key, ready)
        program, traced = ready
        outputs = program.run(*(x for _, x in arguments if isinstance(x, Tensor)))
        return traced.rebuild(outputs)

    def _check_dtensors(self, arguments: Sequence[tuple[str, Any]]) -> None:
        tensors = [(name, x) for name, x in arguments if isinstance(x, Tensor)]
        for name, x in tensors:
            if not has_dtensors((x,)):
                raise DefinitionError(
                    f"{self.__name__}: a plain tensor for {name}",
                    because="a plain tensor does not say which part of what it is",
                    hint=f"pass distribute_tensor({name}, mesh, [Replicate()]) or a DTensor of its "
                    "parts; or compile f.define(...) and run that on local tensors",
                )
        specs = [name for name, x in arguments if isinstance(x, TensorSpec)]
        if specs or not tensors:
            what = f"a TensorSpec for {specs[0]}" if specs else "no tensor among its arguments"
            raise DefinitionError(
                f"{self.__name__} is called outside of a definition, with {what}",
                because="outside it runs on DTensors",
                hint="f.define(...) takes specs; inside `with FusionDefinition()` it takes values",
            )


def _signature(function: Any) -> inspect.Signature:
    """Return the parameters of a function; of a module, those of its `forward`."""
    name = getattr(function, "__name__", type(function).__name__)
    if isinstance(function, torch.nn.Module):
        if any(True for _ in (*function.parameters(), *function.buffers())):
            raise DefinitionError(
                f"fusion({name}): a module with parameters or buffers",
                because="the tensors of a fusion are its arguments, and a module holds some",
                hint="a function that takes them: def f(x, weight): return F.linear(x, weight)",
            )
        function = function.forward
    try:
        return inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise DefinitionError(
            f"fusion({name}): {error}",
            because="a function is traced by its parameters, which this one does not tell",
            hint="def f(x): return ...",
        ) from error


def _items(bound: inspect.BoundArguments) -> list[tuple[str, Any]]:
    """Return the arguments by name; *args, and **kwargs in sorted order, one by one."""
    items: list[tuple[str, Any]] = []
    for name, x in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            items += [(f"{name}.{i}", item) for i, item in enumerate(x)]
        elif kind is inspect.Parameter.VAR_KEYWORD:
            items += [(f"{name}.{key}", item) for key, item in sorted(x.items())]
        else:
            items.append((name, x))
    return items


def _leaves(name: str, x: Any) -> list[tuple[str, Any]]:
    """Return the leaves of an argument with tensors in it, by name; any other as it is."""
    if isinstance(x, _LEAVES):
        return [(name, x)]
    leaves, _ = flattened(x)
    if not any(isinstance(leaf, _TENSORS) for _, leaf in leaves):
        return [(name, x)]
    return [(f"{name}.{key_text(path)}", leaf) for path, leaf in leaves]


_TENSORS = (Tensor, Handle, TensorSpec)
_LEAVES = (*_TENSORS, int, float, str, type(None), torch.dtype)


def _arguments(bound: inspect.BoundArguments) -> list[tuple[str, Any]]:
    """Return the arguments by name; dicts, lists and dataclasses as their entries."""
    return [leaf for name, x in _items(bound) for leaf in _leaves(name, x)]


def _structures(bound: inspect.BoundArguments) -> tuple[Hashable, ...]:
    """Return which arguments have tensors in them, and how."""
    trees = [(name, x) for name, x in _items(bound) if not isinstance(x, _LEAVES)]
    return tuple(
        (name, repr(flattened(x)[1])) for name, x in trees if _leaves(name, x)[0][0] != name
    )


def _replaced(
    bound: inspect.BoundArguments, new: Callable[[str, Any], Any]
) -> inspect.BoundArguments:
    """Return the arguments with each of `_arguments` replaced by a function of it."""
    replaced = {name: _mapped(name, x, new) for name, x in _items(bound)}
    changed = bound.signature.bind(*bound.args, **bound.kwargs)
    for name, x in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            changed.arguments[name] = tuple(replaced[f"{name}.{i}"] for i in range(len(x)))
        elif kind is inspect.Parameter.VAR_KEYWORD:
            changed.arguments[name] = {key: replaced[f"{name}.{key}"] for key in x}
        else:
            changed.arguments[name] = replaced[name]
    return changed


def _mapped(name: str, x: Any, new: Callable[[str, Any], Any]) -> Any:
    leaves = _leaves(name, x)
    if len(leaves) == 1 and leaves[0][0] == name:
        return new(name, x)
    return unflattened([new(*leaf) for leaf in leaves], flattened(x)[1])


def _with_specs(bound: inspect.BoundArguments) -> inspect.BoundArguments:
    """Return the arguments, with each DTensor replaced by its spec."""
    from mdfuse.runs.dtensor import spec_of

    return _replaced(bound, lambda name, x: spec_of(x) if isinstance(x, Tensor) else x)  # type: ignore[arg-type]


def _defined(fd: FusionDefinition, name: str, x: Any) -> Any:
    """Define the input of a spec, and return it; return any other argument as it is.

    Raises:
        DefinitionError: it holds a tensor.
    """
    if (attribute := tensor_inside(x)) is not None:
        raise tensor_in_constant(name, x, attribute)
    if not isinstance(x, TensorSpec):
        return x
    mesh, name = as_mesh(x.mesh), as_name(name.replace(".", "_"), "in")
    return fd.define_tensor(x.shape, x.dtype, mesh, x.layout, x.order, x.stride_order, name=name)


def fusion(function: Callable[..., Any]) -> TracedFunction:
    """Make a function a fusion: `f.define(x=TensorSpec(...), ...)` traces it, `f(x)` runs it.

    >>> import torch, mdfuse as mf
    >>> @mf.fusion
    ... def double(x):
    ...     return x + x
    >>> fd = double.define(x=mf.TensorSpec((4,), torch.float32))
    >>> fd.outputs, fd is double.define(mf.TensorSpec([4]))
    ([1], True)
    """
    return TracedFunction(function)
