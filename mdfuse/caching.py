"""Values by key, the least recently used dropped first; values that remember answers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Generic, NamedTuple, TypeVar

Value = TypeVar("Value")


class CacheInfo(NamedTuple):
    """Counters of a cache: `CacheInfo(hits=99, misses=1, evictions=0, size=1, limit=32)`."""

    hits: int
    misses: int
    evictions: int
    size: int
    limit: int


@dataclass(eq=False)
class Cache(Generic[Value]):
    """Values by key; the least recently used is dropped where there are more than `limit`.

    >>> cache = Cache[str](limit=1)
    >>> cache.get("a"), cache.put("a", "plan"), cache.get("a"), cache.put("b", "other")
    (None, [], 'plan', ['plan'])
    >>> cache.info()
    CacheInfo(hits=1, misses=1, evictions=1, size=1, limit=1)
    """

    limit: int
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    recent: Value | None = None
    _values: OrderedDict[Hashable, Value] = field(default_factory=OrderedDict)

    def get(self, key: Hashable) -> Value | None:
        """Return the value, which becomes the most recently used one; None: a miss."""
        value = self._values.get(key)
        if value is None:
            self.misses += 1
            return None
        self.hits += 1
        self._use(key, value)
        return value

    def get_or(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """Return the value as `get` does; one that is missing is made, and put there."""
        value = self.get(key)
        if value is None:
            value = make()
            self.put(key, value)
        return value

    def find(self, key: Hashable) -> Value | None:
        """The value, without counting it as used."""
        return self._values.get(key)

    def again(self, key: Hashable, value: Value) -> bool:
        """Use a value that `get` returned before; False: it is not kept any more.

        The most recently used one is not looked up: no key is hashed.
        """
        if self.recent is not value:
            if self._values.get(key) is not value:
                return False
            self._use(key, value)
        self.hits += 1
        return True

    def _use(self, key: Hashable, value: Value) -> None:
        self._values.move_to_end(key)
        self.recent = value

    def put(self, key: Hashable, value: Value) -> list[Value]:
        """Keep a value; return the values that were dropped for it."""
        self._values[key] = value
        self._use(key, value)
        gone = []
        while len(self._values) > self.limit:
            gone.append(self._values.popitem(last=False)[1])
            self.evictions += 1
        return gone

    def clear(self, owner: object) -> list[Value]:
        """Drop the values whose keys begin with `owner`; the counters stay."""
        gone = [key for key in self._values if isinstance(key, tuple) and key[0] == owner]
        self.recent = None
        return [self._values.pop(key) for key in gone]

    def empty(self) -> None:
        """Drop all values; the counters stay."""
        self.recent = None
        self._values.clear()

    def info(self) -> CacheInfo:
        """The counters, how many values there are, and how many there may be."""
        return CacheInfo(self.hits, self.misses, self.evictions, len(self._values), self.limit)


class Forgetful:
    """A value whose copies, in this process or another one, begin without what it remembers.

    A copy has what its class and those above it declare alone. Hashes of texts differ between
    processes, and with them a hash that is remembered, and all that is looked up by it.
    """

    __slots__ = ()

    def __getstate__(self) -> Any:
        """Return what the classes declare, as `object.__getstate__` would."""
        kind: Any = type(self)  # whose hash is the hash of a class
        names, slots = _declared(kind)
        declared = {n: x for n, x in vars(self).items() if n in names}
        if not slots:
            return declared
        return declared or None, {n: getattr(self, n) for n in slots if hasattr(self, n)}


@cache
def _declared(kind: type) -> tuple[frozenset[str], tuple[str, ...]]:
    """Return the annotated names of a class and those above it, and their slots with values."""
    bodies = [vars(base) for base in kind.__mro__]
    names = frozenset(name for body in bodies for name in body.get("__annotations__", ()))
    slots = [name for body in bodies for name in body.get("__slots__", ()) if name != "__dict__"]
    return names, tuple(slots)
