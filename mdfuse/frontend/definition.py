"""Fusion definitions: recorded by users, mutable until the `with` block ends."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping, Sequence
from contextvars import Token
from functools import cached_property
from types import MappingProxyType
from typing import Any, Self

import torch

from mdfuse.errors import DefinitionError, shown, user_source
from mdfuse.extents.assumptions import Assumptions, assuming
from mdfuse.extents.extent import Extent, is_symbolic, with_examples
from mdfuse.frontend import ops as operations
from mdfuse.frontend import torch_functions as torch_functions
from mdfuse.frontend.cache import FusionCache, Leaf, NamedDefinition, Node, Recorded, Wording
from mdfuse.frontend.handle import Handle, ValueId
from mdfuse.frontend.placing import placed
from mdfuse.frontend.plain import brief, plain_number
from mdfuse.frontend.recorder import Recorder, replay
from mdfuse.frontend.settings import frozen
from mdfuse.frontend.sites import Site, find_site, is_at
from mdfuse.frontend.stride_order import dims_of, no_permutation
from mdfuse.ir.graph import Fusion, Value
from mdfuse.ir.symbolic import check_definition
from mdfuse.layouts.layout import Layout, Placement
from mdfuse.layouts.stream import Stream
from mdfuse.mesh import DeviceMesh
from mdfuse.names import RULE, is_name, is_value_name

_new, _getframe = object.__new__, sys._getframe
_NO_ATTRS: Mapping[str, Any] = MappingProxyType({})
_NONE: Mapping[Hashable, Node] = MappingProxyType({})
_NUMBERS = frozenset((int,))
_TRUE = (bool, True)
_ITSELF = frozenset((str, type(None), torch.dtype))


class FusionDefinition:
    """Record a fusion, operation by operation.

    Calls recorded before, in this or another definition, are looked up (`FusionCache`); names and
    expressions are made when something new is recorded, or when they are read.

    >>> import mdfuse as mf
    >>> mesh = mf.DeviceMesh.arange(tp=2)
    >>> with mf.FusionDefinition("double") as fd:
    ...     x = fd.define_tensor([4], mesh=mesh, layout={"tp": mf.Shard(0)})
    ...     fd.add_output(x + x)
    >>> fd.inputs, fd.outputs, fd.extents
    ([0], [1], [-1])
    """

    #: The operations, as functions.
    ops: Any = operations

    def __init__(self, name: str = "fusion") -> None:
        if not is_name(name):
            raise DefinitionError(f"a fusion named {brief(name)}", because=RULE, hint="another one")
        self.name = name
        self.inputs: list[int] = []
        self.outputs: list[int] = []
        self.assumed = Assumptions()  # guards on extents, also those of operations that read them
        self.shared: dict[Hashable, tuple[Any, ...]] = {}  # what later calls share, by key
        self._dims = self._streams = 0
        self._recomputing = 0  # open `recompute` blocks
        self._open = False
        self._token: Token[FusionDefinition | None] | None = None
        self._assuming = assuming(self.assumed)
        self._at = FusionCache.get().root
        #: the children of the current node; empty where a call needs more than a lookup
        self._children: Mapping[Hashable, Node] = _NONE
        self._calls: list[Site] = []
        self.numbers: dict[int, torch.Tensor] = {}  # numbers of constants, by id
        self._recorder: Recorder | None = None
        self._leaf: Leaf | None = None

    # -- life ------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if self._calls or self._open or self._leaf is not None:
            raise DefinitionError(f"@{self.name} is defined already", hint="make a new definition")
        self._open = True
        self._children = self._at.children
        self._token = operations.current.set(self)
        self._assuming.__enter__()
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        left_open = self._recomputing
        self._open = False
        self._children = _NONE
        assert self._token is not None
        self._assuming.__exit__(None, None, None)
        operations.current.reset(self._token)
        if kind is None and left_open:
            what = f"@{self.name} ends inside of recompute()"
            raise DefinitionError(what, hint="with mf.recompute(): ...")
        if kind is None:
            self._leaf = FusionCache.get().leaf(self._at)

    def _check_open(self) -> None:
        if not self._open:
            raise DefinitionError(
                f"@{self.name} is not being defined",
                where=self.fusion_where(),
                because="a definition takes operations inside its `with` block only",
                hint="move the line into the block, or define a new fusion",
            )

    def fusion_where(self) -> list[str]:
        """Return the user's line, for error messages."""
        source = user_source()
        return [source.quote()] if source else []

    # -- reading ---------------------------------------------------------------------------------

    @property
    def extents(self) -> list[int]:
        """Ids of the inputs' extents: -1, -2, … in order of inputs and dims."""
        return [-1 - i for i in range(self._dims)]

    @property
    def examples(self) -> Mapping[str, int]:
        """The symbolic extents by name, each with its example while the fusion is defined."""
        return self._at.symbols.examples if self._at.symbols is not None else {}

    @property
    def fusion(self) -> Fusion:
        """The immutable fusion; DefinitionError before the `with` block has ended."""
        return self.named.fusion

    @cached_property
    def named(self) -> NamedDefinition:
        """The cached definition, with the names and lines of this code."""
        if self._open:
            raise DefinitionError(
                f"@{self.name} is still being defined",
                hint="compile it after its `with` block",
            )
        leaf = self._leaf or Leaf(self._at)
        wording = self._wording()
        if (existing := leaf.find(wording)) is not None:
            return existing
        recorder = self._recorded()
        assumed = self.assumed.copy()
        for guard in recorder.assumed.guards:
            assumed.assume(guard.poly, guard.op, self.examples)
        fusion = recorder.fusion().noting(*(self.shared.get(x, ()) for x in ("notes", "by_ranks")))
        return leaf.add(NamedDefinition(wording, fusion, self.examples, assumed))

    def _wording(self) -> Wording:
        guards = tuple(map(str, self.assumed.guards)) if self.examples else ()
        return Wording(self.name, guards, self._calls)

    def __str__(self) -> str:
        """Every value with its layout: the user's marked !, the others inferred."""
        from mdfuse.passes import propagate_layouts

        if self._open:
            return f"fusion @{self.name} (still being defined)"
        return str(propagate_layouts.run(self.fusion))

    def check_extents(self, extents: Mapping[str, int]) -> None:
        """Raise DefinitionError if these extents violate a guard of the definition's code."""
        check_definition(self.name, self.named.assumed, extents)

    # -- defining --------------------------------------------------------------------------------

    def define_tensor(
        self,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        mesh: DeviceMesh | Layout | None = None,
        layout: Mapping[str, Placement] | Layout | None = None,
        order: Mapping[int, Sequence[str]] | None = None,
        stride_order: Sequence[int] | None = None,
        name: str | None = None,
    ) -> Handle:
        """Define an input tensor.

        Args:
            shape: global extents; -1 stands for one that each run chooses: `x.0` is dim 0 of x.
            dtype: element type.
            mesh: where it lives; alone: replicated; without mesh and layout: inferred.
            layout: axis -> placement.
            order: dim -> the axes that split it, outermost first.
            stride_order: the memory order of the argument: the place of each dim, 0 the fastest.
            name: how programs print it; by default the variable that it is assigned to.

        Raises:
            DefinitionError: the shape, dtype or memory order is none.
            LayoutError, MeshError: the layout does not fit the shape, or the mesh.
        """
        if isinstance(layout, Layout):
            mesh, layout = layout, None
        place = None if mesh is None and layout is None else placed(mesh, layout, order, None)
        places = None if stride_order is None else frozen(stride_order)
        shape = tuple(shape) if type(shape) is list else shape
        ordered = None if places is None else self._key(places)
        key = ("tensor", self._key(shape), self._key(dtype), ordered, place)
        handle = self._added(key, (shape, dtype, places, place), name)
        self.inputs.append(handle.id)
        self._dims += len(handle.fact.shape)
        return handle

    def define_scalar(
        self, value: float | int | bool | None = None, dtype: Any = None, name: str | None = None
    ) -> Handle:
        """Define a number: a constant, or with value None an input of each run.

        Args:
            value: the constant.
            dtype: the dtype of an input: float (the default), int, bool or a torch dtype.
            name: how programs print it.
        """
        key = ("scalar", self._key(value), self._key(dtype))
        handle = self._added(key, (value, dtype), name)
        if value is None:
            self.inputs.append(handle.id)
        return handle

    def add_output(
        self, t: Handle, stride_order: Sequence[int] | None = None, reuse: Handle | None = None
    ) -> None:
        """Make a value an output of the program.

        Args:
            t: a tensor of this definition.
            stride_order: the memory order that it must have: the place of each dim, 0 the fastest.
            reuse: an input into whose buffer the result is written.

        Raises:
            DefinitionError: t is no tensor of this definition, or is an output already; another
                order is required of it, or of the buffer that it reuses; the reuse does not fit.
        """
        self._check_open()
        if not isinstance(t, Handle) or t.definition is not self:
            raise DefinitionError(
                f"{shown(t)} is not a value of @{self.name}",
                where=self.fusion_where(),
                hint="pass what an operation of this definition returned",
            )
        if reuse is not None and not (isinstance(reuse, Handle) and reuse.definition is self):
            raise DefinitionError(
                f"reuse={shown(reuse)} is not an input tensor of @{self.name}",
                where=self.fusion_where(),
                hint="pass what define_tensor returned",
            )
        if stride_order is not None and t.is_tensor:
            t = self._in_order(t, stride_order)
        buffer = None if reuse is None else reuse.id
        self._do(("output", t.id, buffer), (t.id, buffer))
        self.outputs.append(t.id)

    def _in_order(self, t: Handle, stride_order: Sequence[int]) -> Handle:
        """Return the value in a memory order; itself where that order is required of it already."""
        required = t.stride_order_requirement
        if required is None:
            return operations.stride_order(t, stride_order)
        if dims_of(stride_order, t.ndim) is None:
            raise no_permutation(stride_order, t.ndim, repr(t), self.fusion_where())
        if required != tuple(stride_order):
            source = t.value.source
            raise DefinitionError(
                f"%{t.name} as an output with stride_order={tuple(stride_order)}, "
                f"but stride_order={required} is required of it",
                where=[*self.fusion_where(), source.quote() if source else ""],
                because="a value has one memory order",
                hint=f"leave one out, or make another value: fd.ops.stride_order({t.name}, ...)",
            )
        return t

    # -- calls from handles and operations -------------------------------------------------------

    def next_stream(self) -> int:
        """Return another stream of random numbers, so that two draws with one seed differ."""
        self._streams += 1
        return self._streams

    def record(
        self, op: str, operands: Sequence[Any], attrs: Mapping[str, Any] = _NO_ATTRS
    ) -> Handle:
        """Append an expression, and return the handle of its result."""
        key: list[Any] = [op]
        for x in operands:
            if type(x) is Handle and x.definition is self:
                key.append(x.id)
            else:
                key.append(self._key(x))
        if attrs:
            for name, value in attrs.items():
                if value is True:
                    key += (name, _TRUE)
                elif value is not None and value is not False:
                    key += (name, self._key(value))
        edge = tuple(key)
        # from here on as `_do` and `is_at`, whose calls would be a tenth of the time each
        node = self._children.get(edge)
        if node is None:
            node = self._newly(edge, Recorded("op", (op, operands, attrs)), find_site(), None)
        else:
            self._at = node
            self._children = node.children
            site = node.site
            try:
                frame = _getframe(site.depth)
                is_there = frame.f_code is site.code and frame.f_lasti == site.offset
            except ValueError:  # the stack is not as deep
                is_there = False
            self._calls.append(site if is_there else self._moved(node, find_site()))
        handle = _new(Handle)
        handle.definition = self
        handle.id = node.id
        handle.fact = node.fact
        return handle

    def record_several(
        self, op: str, operands: Sequence[Any], attrs: Mapping[str, Any] = _NO_ATTRS
    ) -> tuple[Handle, ...]:
        """Append an expression with several results, and return the handle of each."""
        settings = ((k, self._key(v)) for k, v in attrs.items() if v is not None and v is not False)
        key = ("op", op, *map(self._key, operands), *settings)
        node = self._do(key, (op, operands, attrs))
        first = node.id + 1 - len(node.fact)
        return tuple(Handle(self, first + n, fact) for n, fact in enumerate(node.fact))

    def place(
        self,
        handle: Handle,
        mesh: Any,
        placements: Mapping[str, Placement] | None,
        order: Mapping[int, Sequence[str]] | None,
        stream: Stream | None,
    ) -> None:
        """State a value's layout; see `Handle.on`."""
        place = placed(mesh, placements, order, stream)
        self._do(("place", handle.id, place), (handle.id, *place))

    def place_like(self, x: Handle, other: Handle, but: tuple[tuple[str, Placement], ...]) -> None:
        """Give a value the layout of another one, but along some axes; see `Handle.on`."""
        if other.definition is not self:
            raise self._foreign(other)
        self._do(("place_like", x.id, other.id, but), (x.id, other.id, but))

    def grad(self, y: Handle, wrt: Sequence[Handle], seed: Handle | None) -> tuple[Handle, ...]:
        """Append the gradients of a value; see `mdfuse.grad`."""
        self._check_open()
        for x in (y, *wrt, *(() if seed is None else (seed,))):
            if x.definition is not self:
                raise self._foreign(x)
        said = y.id, tuple(x.id for x in wrt), None if seed is None else seed.id
        node = self._do(("grad", *said), said)
        return tuple(Handle(self, id_, fact) for id_, fact in node.fact)

    def begin_recompute(self, begins: bool | str | None = True) -> None:
        """Begin a block that gradients compute again, or go on; inner ones are parts of it."""
        self._check_open()
        self._recomputing += 1
        if self._recomputing == 1:
            self._do(("recompute", begins), (begins,))

    def end_recompute(self) -> None:
        """End the block that began last."""
        self._recomputing -= 1
        if self._recomputing == 0 and self._open:
            self._do(("recompute", False), (False,))

    def region(self, name: str | None) -> None:
        """Enter a region: a block of its name may stand in it, of which it keeps nothing."""
        self._do(("region", name), (name,))

    # -- the trie --------------------------------------------------------------------------------

    def _added(self, key: tuple[Any, ...], arguments: tuple[Any, ...], name: str | None) -> Handle:
        """Record a call that makes a value, and return its handle."""
        if name is not None:
            _check_name(name)
        node = self._do(key, arguments, name)
        return Handle(self, node.id, node.fact)

    def _do(
        self, key: tuple[Any, ...], arguments: tuple[Any, ...], name: str | None = None
    ) -> Node:
        """Record a call of a method of `Recorder`, or look it up.

        The key is the method's name and its arguments.
        """
        node = self._children.get(key)
        if node is None:
            return self._newly(key, Recorded(key[0], arguments), find_site(), name)
        self._at = node
        self._children = node.children
        site = node.site
        is_there = site.said == name and is_at(site)
        self._calls.append(site if is_there else self._moved(node, find_site(), name))
        return node

    def _moved(self, node: Node, site: Site, name: str | None = None) -> Site:
        """Return the site of a call whose line differs from the last time, and keep it."""
        node.site = site = site.naming(name)
        return site

    def _newly(self, key: tuple[Any, ...], call: Recorded, site: Site, name: str | None) -> Node:
        """Return the node after a call that is new, or must be recorded because of its names."""
        self._check_open()
        at, call, site = self._at, Recorded(call.method, _ids(call.arguments)), site.naming(name)
        written = site.code, site.offset, name
        if at.symbols is not None:
            key = (*key, written)
        elif call.has_symbols:
            # symbols are named after their inputs, so all names matter from this call on
            key = (*key, written, tuple((s.code, s.offset, s.said) for s in self._calls))
        node = at.children.get(key)
        if node is None or self._recorder is not None:
            recorder = self._recorded()
            fact = recorder.call(call, site)
            last = len(recorder.names) - 1
            node = node or Node(at, key, call, site, fact, last, recorder.symbols)
        self._at = node
        is_looked_up = node.symbols is None and self._recorder is None
        self._children = node.children if is_looked_up else _NONE
        self._calls.append(site)
        return node

    def _recorded(self) -> Recorder:
        """Return the recorder of the calls so far; the first time, all of them are replayed."""
        if self._recorder is None:
            self._recorder, _ = self.replayed()
            self._children = _NONE
        return self._recorder

    def replayed(self) -> tuple[Recorder, Site | None]:
        """Return a new recorder of the calls so far, and the site of the last one."""
        calls, sites = [node.call for node in self._at.path()], self._calls
        return replay(self.name, self.assumed, calls, sites), sites[-1] if sites else None

    def _key(self, x: Any) -> Any:
        """Return a key of an argument: 1, 1.0 and True differ, and so do 0.0 and -0.0.

        A handle is its id: where one may stand there are no plain numbers.
        """
        kind = type(x)
        if kind is tuple or kind is list:
            return tuple(x if _NUMBERS.issuperset(map(type, x)) else map(self._key, x))
        if kind is int or kind is bool:
            return (kind, x)
        if kind in _ITSELF:
            return x
        if kind is float:
            return (float, x if x and x == x else repr(x))
        if kind is Handle:
            if x.definition is not self:
                raise self._foreign(x)
            return x.id
        if kind is Extent:
            return (Extent, str(x.poly))
        number = plain_number(x)
        if number is not x:
            return self._key(number)
        return (kind, id(x) if kind.__hash__ is None else x)

    def value_of(self, id_: int) -> Value:
        """Return the current IR value of an id."""
        recorder = self._recorded()
        return recorder.values[recorder.names[id_]]

    def current(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return a shape with the names and examples that symbols have now."""
        symbols = self._at.symbols
        if symbols is None or not is_symbolic(shape):
            return shape
        return with_examples(shape, symbols.examples, symbols.renamed)

    def _foreign(self, x: Handle) -> DefinitionError:
        return DefinitionError(
            f"%{x.name} belongs to @{x.definition.name}, not to @{self.name}",
            where=self.fusion_where(),
            because="a fusion computes with its own values only",
            hint="define the value in this fusion as well",
        )


def _ids(x: Any) -> Any:
    """Replace handles, which belong to one definition, by ids."""
    if type(x) is Handle:
        return ValueId(x.id)
    return tuple(map(_ids, x)) if isinstance(x, tuple | list) else x


def _check_name(name: Any) -> None:
    if not is_value_name(name):
        raise DefinitionError(
            f"name={brief(name)}",
            because="programs print and parse it as one word",
            hint="letters, digits and underscores, joined by dots",
        )
