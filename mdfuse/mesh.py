"""Device meshes: named axes over ranks."""

from __future__ import annotations

import math
import operator
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import groupby
from typing import Any

from mdfuse.bootstrap import detect
from mdfuse.caching import Forgetful
from mdfuse.errors import MeshError, counted, shown
from mdfuse.names import RULE, is_name

#: The most ranks of a mesh: a larger number is a mistake, and would take long.
MOST_RANKS = 2**20

_DEFAULT_AXES = {1: ("x",), 2: ("y", "x"), 3: ("z", "y", "x")}


class DeviceMesh(Forgetful):
    """An n-dimensional array of ranks whose axes have names.

    Args:
        ranks: nested lists, a numpy array, a torch tensor, or a torch `DeviceMesh` that is no
            slice of a larger one. Any order, no duplicates.
        axes: one name per axis; by default ("x",), ("y", "x") or ("z", "y", "x"), or the names
            that a torch `DeviceMesh` has.
        hosts: the number of each rank's host, nested as the ranks are or in their order;
            "launcher": as the launcher numbers them, for ranks that go host by host. Reshards are
            then chosen by time on such hosts. None: not known, and reshards are chosen by bytes.

    Raises:
        MeshError: the ranks are ragged, repeated, negative or not integers, the names do not fit
            them, or they are a slice of torch's; hosts are not one number for each rank, or not
            what a launcher says.

    >>> mesh = DeviceMesh([[3, 4, 1], [0, 8, 2]], axes=("dp", "tp"))
    >>> mesh.shape, mesh.coordinate(8), mesh.team(8, "tp"), mesh.team(8, "dp")
    ((2, 3), (1, 1), (0, 8, 2), (4, 8))
    >>> DeviceMesh.arange(dp=2, tp=4)
    mesh(dp=2, tp=4)
    >>> DeviceMesh([[0, 1], [2, 3]], axes=("dp", "tp"), hosts=[0, 0, 1, 1])
    mesh(dp=2, tp=2 on 0*2 1*2)
    """

    __slots__ = ("__dict__", "_ranks", "axes", "hosts", "shape")

    #: the number of each rank's host, in row-major order; None where hosts are not known
    hosts: tuple[int, ...] | None
    #: ranks whose processes are gone: nothing is asked of them; see `with_lost`
    lost: frozenset[int] = frozenset()

    def __init__(self, ranks: Any, axes: Sequence[str] | None = None, hosts: Any = None) -> None:
        if is_torch_mesh(ranks):
            _check_whole(ranks)
            axes, ranks = axes or ranks.mesh_dim_names, ranks.mesh
        shape, flat = _flatten(_as_lists(ranks, "ranks"))
        self._set(shape, _canonical(flat), axes, hosts)

    def _set(
        self, shape: tuple[int, ...], ranks: Sequence[int], axes: Sequence[str] | None, hosts: Any
    ) -> None:
        if not shape:
            raise MeshError(
                f"{ranks[0]} is no array of ranks",
                hint=f"[{ranks[0]}] for one; DeviceMesh.arange(x={ranks[0]}) for so many in a row",
            )
        if axes is None:
            if len(shape) not in _DEFAULT_AXES:
                raise MeshError(
                    f"a mesh with {counted(len(shape), 'axis')} has no default names",
                    hint="pass axes=(...), one name per axis",
                )
            axes = _DEFAULT_AXES[len(shape)]
        if not isinstance(axes, str | list | tuple):
            raise MeshError(f"axes={shown(axes)}", hint='a tuple of names: axes=("dp", "tp")')
        axes = (axes,) if isinstance(axes, str) else tuple(axes)
        if not all(isinstance(axis, str) for axis in axes):
            raise MeshError(f"axes {shown(axes)}", because="an axis has a name, which is a string")
        if len(axes) != len(shape) or len(set(axes)) != len(axes):
            raise MeshError(
                f"axes {axes} do not name the {counted(len(shape), 'axis')} of a mesh of shape "
                f"{shape}",
                because="every axis has one name, and no two share one",
                hint=f"pass axes=(...) with {len(shape)} different names",
            )
        if not all(is_name(a) and "." not in a and a != "stream" for a in axes):
            raise MeshError(
                f"axes {axes}",
                because=f'{RULE.partition(", and may")[0]}; "stream" is none',
                hint='for example axes=("dp", "tp")',
            )
        last = max(ranks[0], ranks[-1], *_listed(ranks))
        size = math.prod(shape)
        if max(last, size) > MOST_RANKS:
            raise MeshError(
                f"a mesh of {size} ranks, of which {last} is the last",
                because=f"a job has at most {MOST_RANKS} ranks, which count from 0",
                hint="name the ranks as the launcher does: 0 to world size - 1",
            )
        self.axes, self.shape, self._ranks = axes, shape, ranks
        self.hosts = None if hosts is None else _hosts(hosts, ranks)

    @classmethod
    def arange(cls, /, **sizes: int) -> DeviceMesh:
        """Make a mesh of ranks 0, 1, 2, … over axes in the order given, the last one fastest."""
        numbers = [_short(n, "a size") for n in sizes.values() if isinstance(n, int)]
        if len(numbers) < max(len(sizes), 1) or min(numbers) < 1:
            raise MeshError(
                f"arange({sizes})",
                because="each axis has a size of at least 1",
                hint="for example DeviceMesh.arange(dp=2, tp=4)",
            )
        shape = tuple(sizes.values())
        return cls.of(shape, range(min(math.prod(shape), MOST_RANKS + 1)), tuple(sizes))

    @classmethod
    def of(
        cls, shape: tuple[int, ...], ranks: Sequence[int], axes: Sequence[str], hosts: Any = None
    ) -> DeviceMesh:
        """Make a mesh of ranks in row-major order over a shape."""
        if not ranks or 0 in shape:
            raise MeshError(
                f"a mesh of shape {shape}",
                because="each axis has a size of at least 1",
                hint="for example DeviceMesh.arange(dp=2, tp=4)",
            )
        mesh = cls.__new__(cls)
        mesh._set(shape, ranks if isinstance(ranks, range) else _canonical([*ranks]), axes, hosts)
        return mesh

    def with_hosts(self, hosts: Any) -> DeviceMesh:
        """Return this mesh with other hosts, as the constructor takes them; None: not known.

        >>> DeviceMesh.arange(dp=2, tp=2).with_hosts([[0, 0], [1, 1]])
        mesh(dp=2, tp=2 on 0*2 1*2)
        """
        return DeviceMesh.of(self.shape, self._ranks, self.axes, hosts)

    def with_lost(self, ranks: Iterable[int]) -> DeviceMesh:
        """Return this mesh with some of its ranks marked as lost: mesh(dp=2, tp=2 lost 3)."""
        mesh = self.with_hosts(self.hosts)
        mesh.lost = frozenset({*ranks} & {*self})
        return mesh

    def without(self, lost: Any, axis: str | None = None) -> DeviceMesh:
        """Return the mesh without the slices along an axis that have lost a rank.

        Ranks of such a slice that live are in no mesh then, and idle.

        Args:
            lost: the communicator that `mdfuse.rebuild` returned: this mesh is in the ranks before,
                the result in those of it. Or lost ranks: the result is in the ranks of this mesh.
            axis: the axis that becomes shorter; by default the only one.

        Raises:
            MeshError: nothing is left; no such axis; several, and none is named.

        >>> DeviceMesh.arange(dp=3, tp=2).without([3], axis="dp")
        mesh(dp=2, tp=2: 0 1 4 5)
        """
        return _without(self, lost, axis)

    def alone(self, rank: int) -> DeviceMesh:
        """Return the mesh of one of these ranks, on its host."""
        position = self.position(rank)
        hosts = None if self.hosts is None or position is None else [self.hosts[position]]
        return DeviceMesh([rank], hosts=hosts)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self._ranks)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks in row-major order."""
        return tuple(self._ranks)

    @cached_property
    def array(self) -> Any:
        """The ranks in row-major order, a read-only array of one dim."""
        import numpy as np  # not with `import mdfuse`, which stays cheap

        is_listed = not self.is_consecutive
        ranks = np.array(self._ranks) if is_listed else self.first + np.arange(self.size)
        ranks.flags.writeable = False
        return ranks

    @property
    def first(self) -> int:
        """The rank at coordinate (0, …, 0)."""
        return self._ranks[0]

    @cached_property
    def last_rank(self) -> int:
        """The highest rank."""
        return max(self._ranks[0], self._ranks[-1], *self._explicit)

    @property
    def is_consecutive(self) -> bool:
        """True if the ranks are consecutive numbers, in row-major order."""
        return isinstance(self._ranks, range) and self._ranks.step == 1

    @cached_property
    def _explicit(self) -> tuple[int, ...]:
        return _listed(self._ranks)

    @cached_property
    def _index(self) -> dict[int, int]:
        return {rank: i for i, rank in enumerate(self._explicit)}

    def axis_index(self, axis: str) -> int:
        """The position of a named axis; MeshError where there is none."""
        if axis not in self.axes:
            raise MeshError(
                f"{self} has no axis {shown(axis)}",
                hint="its axes are " + ", ".join(map(repr, self.axes)),
            )
        return self.axes.index(axis)

    def axis_size(self, axis: str) -> int:
        """The number of ranks along a named axis; MeshError where there is none."""
        size = self._sizes.get(axis)
        return self.shape[self.axis_index(axis)] if size is None else size

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return dict(zip(self.axes, self.shape, strict=True))

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """The coordinate of a rank, one index per axis; None where it is not in the mesh."""
        index = self.position(rank)
        return None if index is None else self.unravel(index)

    def position(self, rank: int) -> int | None:
        """The position of a rank in row-major order; None where it is not in the mesh."""
        if isinstance(self._ranks, range):
            return rank - self._ranks.start if rank in self._ranks else None
        return self._index.get(rank)

    def unravel(self, index: int) -> tuple[int, ...]:
        """The coordinate of the index-th rank in row-major order."""
        coordinate = []
        for n in reversed(self.shape):
            index, i = divmod(index, n)
            coordinate.append(i)
        return tuple(reversed(coordinate))

    def rank_at(self, coordinate: Sequence[int]) -> int:
        """The rank at a coordinate."""
        return self._ranks[self._ravel(coordinate)]

    def _ravel(self, coordinate: Sequence[int]) -> int:
        index = 0
        for i, n in zip(coordinate, self.shape, strict=True):
            index = index * n + i
        return index

    def team(self, rank: int, axis: str, *axes: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` only along these axes, the last axis fastest."""
        positions, coordinate = [*map(self.axis_index, (axis, *axes))], self.coordinate(rank)
        if coordinate is None:
            raise MeshError(f"rank {rank} is not in {self}", hint=f"its ranks: {self._describe()}")
        places = [self._ravel(coordinate)]
        for position in positions:
            step = math.prod(self.shape[position + 1 :])
            first, n = coordinate[position] * step, self.shape[position]
            places = [at - first + i * step for at in places for i in range(n)]
        return tuple([self._ranks[at] for at in places])

    def _describe(self) -> str:
        shown = ", ".join(map(str, self._ranks[:16]))
        return f"{shown}, … ({self.size} in all)" if self.size > 16 else shown

    def __contains__(self, rank: object) -> bool:
        return rank in self._ranks if isinstance(self._ranks, range) else rank in self._index

    def __iter__(self) -> Iterator[int]:
        return iter(self._ranks)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DeviceMesh):
            return NotImplemented
        if self is other:
            return True
        return self._hash == other._hash and self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self._key)

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        return _one_of_equal((self.axes, self.shape, self._ranks, self.hosts, self.lost))

    def __repr__(self) -> str:
        text = ", ".join(f"{a}={n}" for a, n in zip(self.axes, self.shape, strict=True))
        if self._ranks != range(self.size):
            text += f": {' '.join(map(str, self._ranks[:16]))}{' …' * (self.size > 16)}"
        runs = self.host_runs
        shown = " ".join(f"{host}*{n}" for host, n in runs[:16])
        text += f"{' on ' * bool(runs)}{shown}{' …' * (len(runs) > 16)}"
        return f"mesh({text}{self.lost_text})"

    @property
    def lost_text(self) -> str:
        """The lost ranks behind a mesh in texts; "" for none."""
        return " lost " + " ".join(map(str, sorted(self.lost))) if self.lost else ""

    @property
    def host_runs(self) -> list[tuple[int, int]]:
        """(host, number of ranks that follow each other there), in order; [] for no hosts."""
        return [(host, len([*run])) for host, run in groupby(self.hosts or ())]


@lru_cache(maxsize=1024)
def _one_of_equal(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the first of equal tuples, so that equal meshes share them and compare by identity."""
    return key


def _without(mesh: DeviceMesh, lost: Any, axis: str | None) -> DeviceMesh:
    """Return the mesh of survivors; see `DeviceMesh.without`."""
    import numpy as np  # as above

    new_rank = getattr(lost, "new_rank", None)
    if not new_rank and not isinstance(lost, Iterable):
        raise MeshError(f"{mesh} without {shown(lost)}", hint="a communicator, or a list of ranks")
    gone = [r for r in mesh if (new_rank(r) is None if new_rank else r in lost)]
    if axis is None and mesh.ndim > 1:
        raise MeshError(f"without of {mesh} names no axis", hint=f"axis={mesh.axes[0]!r}")
    place, array = mesh.axis_index(axis or mesh.axes[0]), mesh.array.reshape(mesh.shape)
    slices = np.moveaxis(np.isin(array, gone), place, 0).reshape(mesh.shape[place], -1)
    (stay,) = np.nonzero(~slices.any(axis=1))
    if not len(stay):
        raise MeshError(
            f"{mesh} without ranks {sorted(gone)} is empty",
            because=f"each of its slices along {mesh.axes[place]!r} has lost a rank",
            hint="name another axis, or make a mesh of the ranks that are left",
        )
    left = array.take(stay, place)
    hosts = None if mesh.hosts is None else np.reshape(mesh.hosts, mesh.shape).take(stay, place)
    ranks = [new_rank(r) if new_rank else r for r in left.reshape(-1).tolist()]
    return DeviceMesh.of(left.shape, ranks, mesh.axes, hosts)


def _listed(ranks: Sequence[int]) -> tuple[int, ...]:
    """Return ranks that are not consecutive numbers; () for a range."""
    return () if isinstance(ranks, range) else tuple(ranks)


def is_torch_mesh(x: object) -> bool:
    """Return whether x is a `torch.distributed.DeviceMesh`; torch is not imported for this."""
    return hasattr(x, "mesh_dim_names") and hasattr(x, "device_type")


def as_mesh(mesh: Any) -> Any:
    """Return a torch `DeviceMesh` as a mesh; anything else as it is."""
    return DeviceMesh(mesh) if is_torch_mesh(mesh) else mesh


def _check_whole(mesh: Any) -> None:
    """Raise MeshError for a slice of a torch mesh, which is another mesh on each rank."""
    root = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh
    if root.size() != mesh.size():
        raise MeshError(
            f"{mesh} is a slice of {root}",
            because="a slice holds other ranks on each rank, and a program is one for all of them",
            hint="pass the whole mesh, and replicate along the axes that the slice lacks",
        )


def _as_lists(array: Any, what: str) -> Any:
    """Return an array of numpy or torch as lists; anything else as it is."""
    try:
        return array.tolist() if hasattr(array, "tolist") else array
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise MeshError(
            f"a mesh of a {type(array).__name__}",
            because=f"its {what} cannot be listed: {str(error).splitlines()[0]}",
            hint="a dense array of integers, or nested lists",
        ) from error


def _flatten(nested: Any, what: str = "a rank") -> tuple[tuple[int, ...], list[int]]:
    """Return the shape and the elements of nested sequences."""
    if isinstance(nested, Sequence) and not isinstance(nested, str):
        parts = [_flatten(part, what) for part in nested]
        shapes = {shape for shape, _ in parts}
        if len(shapes) != 1:
            raise MeshError(
                f"ranks {shown(nested)} do not form an array",
                because="a mesh has at least one rank, and its rows are equally long",
                hint="for example [[0, 1], [2, 3]]",
            )
        return (len(parts), *shapes.pop()), [rank for _, flat in parts for rank in flat]
    if isinstance(nested, Mapping):
        raise MeshError(
            f"{shown(nested)} is no mesh",
            because="a mesh is an array of ranks",
            hint="where it is a layout, pass the mesh before it: (mesh, {...})",
        )
    if isinstance(nested, bool | type) or (number := _index(nested)) is None:
        raise MeshError(
            f"{shown(nested)} is not {what}",
            because=f"{what[2:]}s are integers",
            hint=f"pass nested lists of {what[2:]}s, or an array",
        )
    return (), [_short(number, what)]


def _index(x: Any) -> int | None:
    """Return an integer of any type; None for anything else, as a tensor of floats."""
    try:
        return operator.index(x)
    except TypeError:
        return None


def _short(number: int, what: str) -> int:
    """Return a number that can be printed: Python refuses more than 4300 digits."""
    if number.bit_length() > 64:
        raise MeshError(
            f"a number of {number.bit_length()} bits is not {what}",
            because=f"a job has at most {MOST_RANKS} ranks, which count from 0",
            hint="name the ranks as the launcher does: 0 to world size - 1",
        )
    return number


def _hosts(hosts: Any, ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the number of each rank's host."""
    if isinstance(hosts, str):
        return _launched_hosts(hosts, ranks)
    _, flat = _flatten(_as_lists(hosts, "hosts"), "a host")
    if len(flat) != len(ranks) or min(flat) < 0:
        raise MeshError(
            f"{counted(len(flat), 'host')}, from {min(flat)}, for {counted(len(ranks), 'rank')}",
            because="each rank is on one host, and hosts count from 0",
            hint="name a host for each rank in the order of ranks: hosts=[0, 0, 1, 1]",
        )
    return tuple(flat)


def _launched_hosts(word: str, ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the hosts of ranks that a launcher numbered host by host, as many on each."""
    launch = detect(os.environ) if word == "launcher" else None
    hint = "name a host for each rank: hosts=[0, 0, 1, 1]"
    if launch is None:
        raise MeshError(f"hosts={shown(word)}", hint=f'hosts="launcher", or {hint}')
    per_host, last = launch.local_size, max(ranks)
    if per_host is None or last >= launch.size:
        is_said = "does not tell how many ranks each host has"
        raise MeshError(
            f"hosts={shown(word)} for ranks up to {last}",
            because=f"{launch.why}: {is_said if per_host is None else f'{launch.size} ranks'}",
            hint=hint,
        )
    if launch.size % per_host or launch.local_rank != launch.rank % per_host:
        raise MeshError(
            f"hosts={shown(word)}: rank {launch.rank} of {launch.size} is number "
            f"{launch.local_rank} of {per_host} on its host",
            because="hosts follow from this where ranks are numbered host by host, as many on each",
            hint=hint,
        )
    return tuple(rank // per_host for rank in ranks)


def _canonical(flat: list[int]) -> Sequence[int]:
    """Check ranks; return a range where they are consecutive, so that large meshes stay small."""
    if min(flat) < 0:
        raise MeshError(
            f"rank {min(flat)} is negative",
            because="ranks count from 0",
            hint="name the ranks as the launcher does: 0 to world size - 1",
        )
    span = range(flat[0], flat[0] + len(flat))
    if flat == list(span):
        return span
    if len(set(flat)) != len(flat):
        twice = sorted(r for r, n in Counter(flat).items() if n > 1)
        raise MeshError(
            "a mesh holds each rank once; twice or more: " + ", ".join(map(str, twice)),
            hint="leave them out; where these are sizes of axes: DeviceMesh.arange(x=2, y=2)",
        )
    return tuple(flat)
