"""The cache of definitions: a trie of their recorded calls, with the lowered programs.

Each recorded operation is an edge. Its key describes the operation: the op, its operands by id,
its arguments, and for inputs and `.on()` the shapes, dtypes, memory orders, meshes, layouts and
streams. An existing edge holds the result's shape and dtype, so nothing is inferred again.

Names of variables and lines of the user's file are not part of the key. They are the *wording* of a
definition: each wording of a leaf has its own programs, so that prints and errors show the names
and lines of the code that runs.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from mdfuse.caching import Cache, CacheInfo
from mdfuse.errors import DefinitionError
from mdfuse.extents.assumptions import Assumptions
from mdfuse.frontend.sites import Site
from mdfuse.ir.graph import Fusion

#: The program lowered from a definition; this layer knows nothing of its type.
Made = TypeVar("Made")

#: The number of definitions that are kept.
LIMIT = 128

#: The number of wordings per definition, and of programs per wording.
_WORDINGS = _PROGRAMS = 8


@dataclass(frozen=True, slots=True)
class Fact:
    """The facts of a recorded value, apart from its name."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_tensor: bool = True
    constant: float | int | bool | None = None
    #: the stride order that the user requires
    required: tuple[int, ...] | None = None
    #: whether these are the zeros that stand for a gradient which does not exist
    is_missing: bool = False


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recorded operation: a method of `Recorder`, and its arguments."""

    method: str
    arguments: tuple[Any, ...]

    @property
    def has_symbols(self) -> bool:
        """Return whether this call defines an input with symbolic extents."""
        shape = self.arguments[0] if self.method == "tensor" else ()
        return isinstance(shape, tuple) and any(type(n) is int and n == -1 for n in shape)


@dataclass(frozen=True, slots=True)
class Symbolic:
    """The examples of symbols at some point of a definition, and the new names of some."""

    examples: Mapping[str, int]
    renamed: Mapping[str, str]


@dataclass(eq=False, slots=True)
class Node:
    """A node of the trie: a definition up to some operation.

    Attributes:
        parent: up to the operation before; None for the empty definition.
        key: of the last operation.
        call: the last operation.
        site: where the user's code made that call the last time.
        fact: of the value that the call returned; a tuple where it returned several.
        id: of the last value recorded so far.
        symbols: of the definition so far.
        children: by key of the next operation.
        leaf: the definition that ends with this node, if one does.
    """

    parent: Node | None = None
    key: Hashable = None
    call: Recorded | None = None
    site: Any = None
    fact: Any = None
    id: int = -1
    symbols: Symbolic | None = None
    children: dict[Hashable, Node] = field(default_factory=dict)
    leaf: Leaf | None = None

    def path(self) -> list[Node]:
        """The nodes from the first operation to this."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


@dataclass(frozen=True)
class Wording:
    """The names, guards on extents and call sites with which user code wrote a definition."""

    name: str
    guards: tuple[str, ...]
    #: a site that was met before is one object, so comparing these mostly compares addresses
    calls: list[Site]


@dataclass(eq=False)
class NamedDefinition:
    """A definition as one place of the user's code wrote it: the fusion with names and lines.

    Attributes:
        assumed: the definition's guards on its symbolic extents.
        programs: by options and predicate.
        lock: held while one is lowered, so that threads get the same one.
    """

    wording: Wording
    fusion: Fusion
    examples: Mapping[str, int]
    assumed: Assumptions
    programs: Cache[Any] = field(default_factory=lambda: Cache(_PROGRAMS))
    lock: threading.RLock = field(default_factory=threading.RLock)


@dataclass(eq=False)
class Leaf:
    """A whole definition."""

    node: Node
    named: list[NamedDefinition] = field(default_factory=list)
    hits: int = 0

    def find(self, wording: Wording) -> NamedDefinition | None:
        """Return the definition with these names and lines, or None."""
        return next((s for s in self.named if s.wording == wording), None)

    def add(self, named: NamedDefinition) -> NamedDefinition:
        """Keep a definition, and return it, or the equal one that another thread added first."""
        existing = self.find(named.wording)
        if existing is not None:
            return existing
        self.named = [named, *self.named[: _WORDINGS - 1]]
        return named


class FusionCache:
    """The definitions of this process; the least recently used one is dropped first.

    The cache keeps the programs that `compile` returned, with their plans and buffers. Every rank
    defines the same programs, so every rank keeps the same ones; drop them on all ranks alike.

    >>> import mdfuse as mf
    >>> mf.debug.FusionCache.reset()
    >>> def define():
    ...     with mf.FusionDefinition("double") as fd:
    ...         x = fd.define_tensor([4])
    ...         fd.add_output(x + x)
    ...     return mf.compile(fd)
    >>> define() is define()
    True
    >>> print(mf.debug.FusionCache.get())
    1 of 128 definitions: 1 hit, 1 miss, 0 evictions
      @double: 1 operation, x f32[4], found 1 time
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self._lock = threading.Lock()
        self._limit = limit
        self._clear()

    def _clear(self) -> None:
        self.root = Node()
        self._leaves: OrderedDict[Leaf, None] = OrderedDict()
        self.hits = self.misses = self.evictions = 0

    @classmethod
    def get(cls) -> FusionCache:
        """The cache of this process."""
        return _CACHE

    @staticmethod
    def reset() -> None:
        """Forget all definitions, and begin to count anew."""
        with _CACHE._lock:
            _CACHE._clear()

    @property
    def limit(self) -> int:
        """The most definitions that are kept; setting it drops the excess."""
        return self._limit

    @limit.setter
    def limit(self, limit: int) -> None:
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise DefinitionError(
                f"FusionCache limit = {limit!r}",
                because="it keeps at least the definition that was made last",
                hint=f"a number from 1; the default is {LIMIT}",
            )
        with self._lock:
            self._limit = limit
            self._evict()

    def info(self) -> CacheInfo:
        """Return hits, misses and evictions, and the number of definitions and its limit."""
        with self._lock:
            return CacheInfo(self.hits, self.misses, self.evictions, len(self), self._limit)

    def __len__(self) -> int:
        return len(self._leaves)

    def leaf(self, node: Node) -> Leaf:
        """Return the leaf of a definition that ends at a node, and count it as used last."""
        with self._lock:
            leaf = node.leaf
            if leaf is None or leaf not in self._leaves:
                node = self._attached(node)
                leaf = node.leaf
            if leaf is None:
                leaf = node.leaf = Leaf(node)
                self.misses += 1
            else:
                leaf.hits += 1
                self.hits += 1
            self._leaves[leaf] = None
            self._leaves.move_to_end(leaf)
            self._evict()
            return leaf

    def _attached(self, node: Node) -> Node:
        """Return the node of the trie that has the same calls as a node outside of it."""
        at = self.root
        for step in node.path():
            child = at.children.get(step.key)
            if child is None:
                child = Node(at, step.key, step.call, step.site, step.fact, step.id, step.symbols)
                at.children[step.key] = child
            at = child
        return at

    def _evict(self) -> None:
        while len(self._leaves) > self._limit:
            leaf, _ = self._leaves.popitem(last=False)
            self.evictions += 1
            _prune(leaf.node)

    def nodes(self) -> int:
        """The number of recorded operations; common prefixes of definitions count once."""
        with self._lock:
            return sum(1 for _ in _walk(self.root)) - 1

    def __str__(self) -> str:
        info = self.info()
        counts = (_count(info.hits, "hit"), _count(info.misses, "miss", "misses"))
        evicted = _count(info.evictions, "eviction")
        with self._lock:
            rows = [_described(leaf) for leaf in reversed(self._leaves)]
        first = f"{info.size} of {info.limit} definitions: {', '.join((*counts, evicted))}"
        return "\n".join((first, *rows))


_CACHE = FusionCache()


def _prune(node: Node) -> None:
    """Remove a leaf's node, and its ancestors without other descendants."""
    node.leaf = None
    while node.parent is not None and not node.children and node.leaf is None:
        node.parent.children.pop(node.key, None)
        node = node.parent


def _walk(node: Node) -> Iterator[Node]:
    left = [node]
    while left:
        node = left.pop()
        yield node
        left += node.children.values()


def _count(n: int, one: str, plural: str | None = None) -> str:
    return f"{n} {one if n == 1 else plural or one + 's'}"


def _described(leaf: Leaf) -> str:
    operations = _count(sum(n.call.method == "op" for n in leaf.node.path() if n.call), "operation")
    hits = f"found {_count(leaf.hits, 'time')}"
    if not leaf.named:
        return f"  {operations}, {hits}, not lowered"
    fusion = leaf.named[0].fusion
    inputs = (f"{n} {fusion.values[n].type_text()}" for n in fusion.inputs)
    return "  " + ", ".join((f"@{fusion.name}: {operations}", *inputs, hits))


def program_of(
    named: NamedDefinition, key: Hashable, lower: Callable[[NamedDefinition], Made]
) -> Made:
    """Return the program for options and predicate (`key`), lowered if it is missing."""
    with named.lock:
        program: Made = named.programs.get_or(key, lambda: lower(named))
        return program
