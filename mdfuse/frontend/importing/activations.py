"""Note what calls of submodules take and return, while a module is exported.

Each noted tensor gets a node of its own, an `alias`, which the call passes on. So a layout of an
argument is that of its readers in the call alone, and one of an activation that of all its readers
outside. The exported function returns the aliases besides its results, which names their nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from mdfuse.errors import LayoutError, counted, listed
from mdfuse.frontend.importing.place import Patterns, Placed
from mdfuse.frontend.importing.submodules import SubmoduleCall, Submodules
from mdfuse.mesh import DeviceMesh
from mdfuse.torch_private import pytree
from mdfuse.trees import key_text


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedTensor:
    """A tensor that a call of a submodule takes or returns.

    Attributes:
        kind: "argument" or "activation".
        names: of the submodule.
        call: of it.
        path: keys of the tensor among the arguments, or in the result: "0" if it is the result.
        node: the node of the tensor; None until the export has ended.
    """

    kind: str
    names: tuple[str, ...]
    call: SubmoduleCall
    path: str
    node: Node | None = None

    @property
    def patterns(self) -> list[str]:
        """Return the names that patterns may match: for all tensors of the call, then its own."""
        all_ = [f"{self.kind}:{name}" for name in self.names]
        return [*all_, *(f"{name}:{self.path}" for name in all_)]

    def __str__(self) -> str:
        return f"{self.kind}:{self.call}" + f":{self.path}" * (self.path != "0")


@dataclass(slots=True)
class Noted:
    """The tensors that calls of some submodules take and return, in order.

    Attributes:
        wanted: prefix of a pattern and name of a submodule.
        submodules: all names.
        entries: each tensor.
        tensors: as the forward sees them; they go when the export has ended.
    """

    wanted: frozenset[tuple[str, str]] = frozenset()
    submodules: Submodules | None = None
    entries: list[PassedTensor] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    _calls: Counter[tuple[str, str]] = field(default_factory=Counter)

    @staticmethod
    def of(module: nn.Module, patterns: Patterns) -> Noted:
        """Return what patterns ask for.

        Raises:
            LayoutError: a pattern that matches no submodule.
        """
        submodules = Submodules(module)
        return Noted(
            frozenset(
                (kind, submodules.names[name][0])
                for pattern, kind, path in patterns.of_submodules()
                for name in submodules.matched(f"layouts[{pattern!r}]", path)
            ),
            submodules,
        )

    def begin(self) -> None:
        """Forget another run of the forward."""
        self.entries.clear()
        self.tensors.clear()
        self._calls.clear()

    @contextmanager
    def hooked(self, module: nn.Module) -> Iterator[None]:
        """Note calls while the block runs."""
        hooks = []
        try:
            for kind, name in sorted(self.wanted):
                part = module.get_submodule(name)
                if kind == "activation":
                    hooks.append(part.register_forward_hook(partial(self._returned, name)))
                else:
                    call = partial(self._taken, name)
                    hooks.append(part.register_forward_pre_hook(call, with_kwargs=True))
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def take(self, graph: GraphModule) -> None:
        """Take the last results of a graph as the nodes of the tensors, and away from it."""
        (output,) = (n for n in graph.graph.nodes if n.op == "output")
        first = len(output.args[0]) - len(self.entries)
        nodes = output.args[0][first:]
        self.entries = [replace(e, node=n) for e, n in zip(self.entries, nodes, strict=True)]
        output.args = (tuple(output.args[0][:first]),)
        self.tensors.clear()

    def _taken(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        names = argument_names(module, len(args))
        named = dict(zip(names, args, strict=True)) | kwargs
        new = self._passed("argument", name, named)
        return tuple(new[key] for key in names), {key: new[key] for key in kwargs}

    def _returned(self, name: str, module: nn.Module, args: Any, result: Any) -> Any:
        return self._passed("activation", name, result)

    def _passed(self, kind: str, name: str, tree: Any) -> Any:
        """Return a tree of arguments or results with aliases of its tensors, and note these."""
        assert self.submodules is not None
        number = self._calls[kind, name]
        self._calls[kind, name] += 1
        of = PassedTensor(
            kind=kind, names=self.submodules.names[name], call=SubmoduleCall(name, number), path=""
        )

        def noted(path: Any, x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            self.tensors.append(torch.ops.aten.alias.default(x))
            self.entries.append(replace(of, path=key_text(path) or "0"))
            return self.tensors[-1]

        return pytree.tree_map_with_path(noted, tree, is_leaf=_is_opaque)


def _is_opaque(x: Any) -> bool:
    """Return whether an entry is passed on as it is: a cache, for example, which calls write."""
    return not isinstance(x, tuple | list | dict)


def argument_names(module: nn.Module, count: int) -> list[str]:
    """Return the names of the positional arguments of a submodule's forward."""
    parameters = signature(module.forward).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    variadic = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")
    return [*names[:count], *(f"{variadic}.{i}" for i in range(count - len(names)))]


def places_of(
    by_mesh: Mapping[DeviceMesh, Patterns],
    mesh_of: Callable[[Node], DeviceMesh],
    passed: Iterable[PassedTensor],
    live: Mapping[Node, None],
    module: nn.Module,
) -> dict[Node, Placed]:
    """Return the placements that patterns give what calls of submodules take and return.

    Args:
        by_mesh: all patterns, for each mesh.
        mesh_of: returns the mesh of a node.
        passed: the tensors.
        live: nodes that runs compute; others are known, or nothing reads them.
        module: whose submodules they are.

    Raises:
        LayoutError: a pattern that matches no such tensor, or does not fit one.
    """
    placed: dict[Node, Placed] = {}
    of_calls = [*passed]
    computed = {x.node: x for x in of_calls if x.node is not None and x.node in live}
    for node, x in computed.items():
        place = by_mesh[mesh_of(node)].find(x.patterns, node.meta["val"].ndim, str(x))
        if place is not None:
            placed[node] = place
    names = [name for x in computed.values() for name in x.patterns]
    patterns = next(iter(by_mesh.values()))
    for pattern, kind, path in patterns.of_submodules():
        if not patterns.is_used(pattern, names):
            raise _no_tensor(pattern, kind, path, of_calls, module)
    return placed


def _no_tensor(
    pattern: str, kind: str, path: str, passed: Iterable[PassedTensor], module: nn.Module
) -> LayoutError:
    """Return the error for a pattern of submodules that pass no tensor of this name."""
    names = Submodules(module).matched(pattern, path)
    there = [x for x in passed if x.kind == kind and {*x.names} & {*names}]
    verb = "takes" if kind == "argument" else "returns"
    first = f"{names[0]}, a {type(module.get_submodule(names[0])).__name__},"
    tensors = listed(dict.fromkeys(x.path for x in there))
    inner = f"{path}.*" if not there and len(names) == 1 else None
    return LayoutError(
        f"layouts[{pattern!r}] places no tensor",
        because=f"{first} {verb} {tensors}, and runs compute none of this name from inputs"
        if there
        else f"{first} is not called, or {verb} no tensor ({counted(len(names), 'submodule')})",
        hint=f"{kind}:{inner} for its parts" if inner else f'"{kind}:NAME:KEY", or leave it out',
    )
