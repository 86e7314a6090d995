"""The two-stage matrix: programs, and what they must give, for the simulator and for real ranks.

    tv1 = sum(tv0, 3); tv2 = set(tv1) or sum(tv1, d); tv3 = tv2 + tv2

tv0 and tv1 live on mesh0, the rest on mesh1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Layout, Shard
from mdfuse.passes.segmentation import merge_local, merge_nothing

MESHES = {
    "m0": DeviceMesh([0]),
    "m1": DeviceMesh([1]),
    "m2": DeviceMesh([0, 1, 2, 3]),
    "m3": DeviceMesh([0, 2, 3]),
    "m4": DeviceMesh([1, 0, 2]),
    "m5": DeviceMesh([1, 0]),
}
UNITS: dict[str, Callable[..., bool]] = {"ops": merge_nothing, "units": merge_local}


@dataclass(frozen=True)
class Case:
    """One program of the matrix.

    Attributes:
        family: the row of the table.
        before: name of mesh0.
        after: name of mesh1.
        dim: the dim that is sharded or reduced.
        is_split_before: tv1 is sharded on `dim`.
        is_split_after: tv3 is sharded.
        reduces: tv2 is a sum over `dim`.
        units: "ops" or "units": how local expressions run.
        extra: added to the sharded extent, so that it does not divide.
    """

    family: str
    before: str
    after: str
    dim: int
    is_split_before: bool
    is_split_after: bool
    reduces: bool
    units: str
    extra: int

    def __str__(self) -> str:
        even = f"-plus{self.extra}" if self.extra else ""
        return f"{self.family}-{self.before}-{self.after}-dim{self.dim}-{self.units}{even}"

    @property
    def shape(self) -> tuple[int, ...]:
        shape = [3, 2, 3, 5]
        mesh = MESHES[self.before] if self.is_split_before else MESHES[self.after]
        if self.is_split_before or self.is_split_after:
            shape[self.dim] = mesh.size + self.extra
        if self.reduces and self.is_split_after:
            shape[1 - self.dim] = MESHES[self.after].size + self.extra
        return tuple(shape)

    @property
    def dim_after(self) -> int:
        """The dim of tv3 that is sharded: after a sum over dim 0 or 1, what the other became."""
        return 0 if self.reduces else self.dim

    def layouts(self) -> tuple[Layout, Layout]:
        """The layouts of tv0 and tv3."""
        before, after = MESHES[self.before], MESHES[self.after]
        return (
            Layout(before, {"x": Shard(self.dim)} if self.is_split_before else {}),
            Layout(after, {"x": Shard(self.dim_after)} if self.is_split_after else {}),
        )

    def program(self) -> mf.Program:
        """The lowered program."""
        before, after = self.layouts()
        with mf.FusionDefinition("two_stages") as fd:
            tv0 = fd.define_tensor(self.shape, torch.float32, before)
            tv1 = fd.ops.sum(tv0, dims=[3])
            tv2 = fd.ops.sum(tv1, dims=[self.dim]) if self.reduces else fd.ops.set(tv1)
            tv3 = tv2.on(after) + tv2
            fd.add_output(tv3)
        return mf.compile(fd, mf.Options(poison=True), UNITS[self.units])

    def input(self) -> Tensor:
        """Random integers, so that sums are exact in any order."""
        generator = torch.Generator().manual_seed(sum(self.shape) + self.dim)
        return torch.randint(-9, 10, self.shape, generator=generator).float()

    def expected(self, rank: int) -> Tensor | None:
        """What a rank must return: plain torch on the whole tensor, then plain slicing."""
        _, after = self.layouts()
        if rank not in after.mesh:
            return None
        tv1 = self.input().sum(3)
        tv3 = 2 * (tv1.sum(self.dim) if self.reduces else tv1)
        if not self.is_split_after:
            return tv3
        pieces = list(tv3.chunk(after.mesh.size, self.dim_after))
        index = after.mesh.ranks.index(rank)
        if index >= len(pieces):
            return tv3.narrow(self.dim_after, 0, 0)
        return pieces[index].clone(memory_format=torch.contiguous_format)

    def check(self, rank: int, got: Tensor | None) -> None:
        """Values, shape and strides are exact."""
        want = self.expected(rank)
        if want is None:
            assert got is None
            return
        assert got is not None
        assert tuple(got.shape) == tuple(want.shape)
        assert torch.equal(got.cpu(), want)
        if want.numel():
            assert got.stride() == torch.empty(want.shape).stride()


Rows = list[tuple[str, list[str], list[str], bool, bool, bool, bool]]
_ALL, _MANY = list(MESHES), ["m2", "m3", "m4", "m5"]
#: family, mesh0, mesh1, same mesh only, split before, split after, reduces
_TABLE: Rows = [
    ("gather", _ALL, _ALL, False, True, False, False),
    ("scatter", _ALL, _ALL, False, False, True, False),
    ("broadcast", _ALL, _ALL, False, False, False, False),
    ("sendrecv", ["m3", "m4"], ["m3", "m4"], False, True, True, False),
    ("local", ["m0", "m1"], ["m0", "m1"], True, True, True, False),
    ("reduce", _MANY, _ALL, False, True, False, True),
    ("reducescatter", _MANY, _MANY, True, True, True, True),
]


def cases() -> Iterator[Case]:
    """Every case, with extents that divide and extents that do not."""
    for family, befores, afters, same, split, split_after, reduces in _TABLE:
        for before in befores:
            for after in afters:
                if same and before != after:
                    continue
                for dim in (0, 1):
                    for units in UNITS:
                        for extra in (0, 1):
                            yield Case(
                                family,
                                before,
                                after,
                                dim,
                                split,
                                split_after,
                                reduces,
                                units,
                                extra,
                            )


CASES = list(cases())
