"""Inter-host volume of an exchange whose hosts follow the axes of the mesh.

Each axis coordinate is then two digits in a mixed radix: the host, and the rank on that host. An
axis splits at most one dim, so the union over a host's ranks factors per dim: a sum over ranks is a
product of sums over the digits of each dim.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import cached_property
from typing import Any

import numpy as np

from mdfuse.layouts.dim_rows import DimRows, OnHosts
from mdfuse.layouts.hosts import Digits
from mdfuse.layouts.recv_volume import most

Splits = tuple[tuple[int, ...], ...]


class Aligned:
    """The cost model of an exchange on a mesh whose hosts follow its axes; axes are numbers.

    Args:
        digits: the host and rank digits of the axes.
        dims: the dims of the tensor.
        have: the axes that split each dim before, outermost first.
        need: the axes that split each dim afterwards, outermost first.
        terms: the axes that are Partial before.
        goal_terms: the axes that are Partial afterwards.
        kept: the axes along which terms stay apart.
    """

    def __init__(
        self,
        digits: Digits,
        dims: tuple[DimRows, ...],
        have: Splits,
        need: Splits,
        terms: Collection[int] = (),
        goal_terms: Collection[int] = (),
        staying: Collection[int] = (),
    ) -> None:
        self.digits, self.rows, self.have, self.need = digits, dims, have, need
        self.terms, self.goal_terms, self.staying = terms, goal_terms, staying
        self.reduced = [a for a in terms if a not in staying]

    def crossing(self) -> int:
        """Return the inter-host volume of the busiest host, in elements."""
        if self.is_on_hosts:
            return 0
        digits, split, dims = self.digits, sum(self.need, ()), self.dims
        needs, both = math.prod([d.needs for d in dims]), self._both(dims)
        into = self._count(self.reduced) * needs - digits.ranks(self.reduced) * both
        has, source = math.prod([d.has for d in dims]), self._free(self.have, self.terms)
        wanted = self._count(self._free(self.need, self.goal_terms)) * has
        served = digits.ranks_but((*split, *self.staying))
        served *= digits.hosts([a for a in source if a not in split])
        given = wanted - served * self._both(dims, source)
        out = -(-(digits.ranks(self.terms) * given) // digits.hosts(source))
        return max(digits.ranks_but(split) * most(into), most(out))

    @property
    def is_on_hosts(self) -> bool:
        """True if all splits and reductions are along axes within a host."""
        far = self.digits.far
        for axes in (*self.have, *self.need, self.reduced):
            for a in axes:
                if far[a] > 1:
                    return False
        return True

    def messages(self) -> int:
        """Return the message count of the busiest rank."""
        pairs = zip(self.rows, self.have, self.need, strict=True)
        dims = [d.of_ranks(have, need) for d, have, need in pairs]
        has_some = math.prod([d.has_some for d in dims])
        copies = self._count(self._free(self.need, self.goal_terms))
        turns = self._count(self._free(self.have, self.terms))
        sent = -(-math.prod([d.sent for d in dims]) * copies // turns) - has_some
        got = math.prod([d.got for d in dims]) * self._count(self.reduced) - has_some
        return max(most(sent), most(got))

    @property
    def dims(self) -> list[OnHosts]:
        pairs = zip(self.rows, self.have, self.need, strict=True)
        return [d.on_hosts(have, need) for d, have, need in pairs]

    def _free(self, splits: Splits, terms: Collection[int]) -> list[int]:
        """Return the axes along which ranks hold copies."""
        split = sum(splits, ())
        return [a for a in range(len(self.digits.far)) if a not in split and a not in terms]

    def _count(self, axes: Collection[int]) -> int:
        return self.digits.hosts(axes) * self.digits.ranks(axes)

    def _both(self, dims: list[OnHosts], summed: Collection[int] = ()) -> Any:
        """Return the elements that a host's ranks both need and have, summed along some axes."""
        elements: Any = 1
        for split, at in zip(self.need, dims, strict=True):
            axes = tuple([a for a in split if a in summed]) if summed else ()
            if type(at.both) is int:  # equal on all hosts
                elements = elements * (at.both * self.digits.hosts(axes))
            else:
                elements = elements * (at.both.sum(axes, keepdims=True) if axes else at.both)
        return elements


class Alone:
    """The parts of a tensor on ranks and hosts of one mesh; hosts follow the axes of the mesh.

    Args:
        digits: the host and rank digits of the axes.
        dims: the dims of the tensor.
        split: the axes that split each dim, outermost first.
        terms: the axes that are Partial.
    """

    def __init__(
        self, digits: Digits, dims: tuple[DimRows, ...], split: Splits, terms: Collection[int]
    ) -> None:
        self.digits, self.rows, self.split, self.terms = digits, dims, split, terms
        self.fixed = {*terms, *sum(split, ())}
        self._given: dict[int, int] = {}

    @cached_property
    def first_and_all(self) -> tuple[int, int]:
        """Return the elements on the first host, and the sum over all hosts.

        Copies on one host count once.
        """
        split, terms = sum(self.split, ()), self.digits.ranks(self.terms)
        first = math.prod([d.on_first(axes) for d, axes in zip(self.rows, self.split, strict=True)])
        copies = self.digits.hosts([a for a in range(len(self.digits.far)) if a not in split])
        return first * terms, math.prod([d.extent for d in self.rows]) * copies * terms

    @cached_property
    def received(self) -> int:
        """Return the elements on all ranks of the fullest host; copies count."""
        return most(self._has()) * self.digits.ranks_but(sum(self.split, ()))

    def _has(self) -> Any:
        """Return the elements on each host, over ranks that differ along splitting axes."""
        pairs = zip(self.rows, self.split, strict=True)
        return math.prod([d.on_hosts(axes, axes).has for d, axes in pairs])

    @cached_property
    def alike(self) -> int:
        """The number of ranks that hold the same part."""
        sizes = [n * m for n, m in zip(*self.digits, strict=True)]
        return math.prod([n for a, n in enumerate(sizes) if a not in self.fixed])

    def given(self, copies: int) -> int:
        """Return the elements out of the busiest host, if the mesh sends this many copies.

        Hosts with the same parts send equal shares, rounded up.
        """
        if copies not in self._given:
            self._given[copies] = self._gives(copies)
        return self._given[copies]

    @cached_property
    def hosts_alike(self) -> int:
        """The number of hosts that hold the same part."""
        return self.digits.hosts([a for a in range(len(self.digits.far)) if a not in self.fixed])

    def gives_at_least(self, copies: int) -> int:
        """Return a lower bound of `given`, without rounding up for each part."""
        return -(-self.first_and_all[0] * copies // self.hosts_alike)

    def _gives(self, copies: int) -> int:
        digits, hosts = self.digits, self.hosts_alike
        lengths = [d.lengths(axes) for d, axes in zip(self.rows, self.split, strict=True)]
        alike = {*self.terms}  # axes along which parts are of equal size
        for axes, n in zip(self.split, lengths, strict=True):
            alike |= {*axes} if not np.ndim(n) else set()
        each, k = -(-math.prod(lengths) * copies // hosts), len(digits.far)
        of_host = np.sum(each, tuple(range(k, 3 * k))) if np.ndim(each) else each
        return most(of_host) * digits.ranks(alike)
