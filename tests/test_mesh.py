"""Meshes: their teams, and that programs for many ranks are made as those for few."""

from __future__ import annotations

import copy
import pickle
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

import mdfuse as mf
from mdfuse import DeviceMesh, Shard
from mdfuse.hir.verify.check import verify
from mdfuse.ir.graph import Fusion


@pytest.mark.parametrize("shape", [(1,), (6,), (2, 3), (3, 1, 4), (2, 3, 4)])
@pytest.mark.parametrize("is_shuffled", [False, True])
def test_teams_are_the_lines_of_the_mesh(shape: tuple[int, ...], is_shuffled: bool) -> None:
    size, axes = int(np.prod(shape)), ("a", "b", "c")[: len(shape)]
    ranks = range(5, 5 + size)
    listed: Sequence[int] = np.random.default_rng(0).permutation(ranks).tolist()
    mesh = DeviceMesh.of(shape, listed if is_shuffled else ranks, axes)
    whole = np.array(mesh.ranks).reshape(shape)
    for position, axis in enumerate(axes):
        for line in np.moveaxis(whole, position, -1).reshape(-1, shape[position]).tolist():
            assert [mesh.team(rank, axis) for rank in line] == [tuple(line)] * len(line)


def calls_to_lower(mesh: DeviceMesh) -> int:
    """How many calls it takes to lower and verify an all-gather and an all-reduce."""
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([16384, 64], mesh=mesh, layout={"tp": Shard(0)})
        w = fd.define_tensor([64, 16384], mesh=mesh, layout={"tp": Shard(1)})
        whole = fd.ops.set(x).on(mesh, {})
        fd.add_output(fd.ops.set(whole @ w).on(mesh, {"dp": Shard(0), "tp": Shard(1)}))
        fd.add_output(fd.ops.set(w @ x).on(mesh, {}))
    counted = 0

    def count(*event: object) -> None:
        nonlocal counted
        counted += 1

    sys.setprofile(count)
    try:
        verify(mf.compile(fd).host)
    finally:
        sys.setprofile(None)
    return counted


def test_a_large_mesh_takes_no_more_calls() -> None:
    """These ranks are in no other test, so that nothing of the meshes is known before."""
    meshes = [
        DeviceMesh.of((dp, tp), range(first, first + dp * tp), ("dp", "tp"))
        for dp, tp, first in ((2, 2, 300_000), (2, 4, 310_000), (64, 128, 320_000))
    ]
    _, few, many = map(calls_to_lower, meshes)
    assert many <= few * 1.01


# -- hosts ---------------------------------------------------------------------------------------


def test_hosts_are_part_of_a_mesh() -> None:
    plain = DeviceMesh.arange(dp=2, tp=2)
    mesh = DeviceMesh([[0, 1], [2, 3]], ("dp", "tp"), hosts=np.array([4, 4, 4, 0]))
    assert mesh.hosts == (4, 4, 4, 0)
    assert mesh != plain
    assert mesh.with_hosts(None) == plain
    assert mesh.alone(3).hosts == (0,)
    assert repr(mesh) == "mesh(dp=2, tp=2 on 4*3 0*1)"


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        ([0, 1], "2 hosts, from 0, for 4 ranks"),
        ([0, 0, -1, 0], "4 hosts, from -1, for 4 ranks"),
        ([0, 0, "node", 1], "'node' is not a host"),
        ([0, 0, 1.5, 1], "1.5 is not a host"),
        ([[0, 0], [1]], "do not form an array"),
        ([], "do not form an array"),
        ("launch", "hosts='launch'"),
    ],
)
def test_wrong_hosts(hosts: object, said: str) -> None:
    with pytest.raises(mf.MeshError, match=re.escape(said)) as caught:
        DeviceMesh([0, 1, 2, 3], hosts=hosts)
    assert "hosts" in str(caught.value)


def launched(monkeypatch: pytest.MonkeyPatch, rank: int, size: int, local: int, here: int) -> None:
    """Make it look as if torchrun had started this process."""
    variables = {
        "RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": here,
        "MASTER_ADDR": "localhost", "MASTER_PORT": 1,
    }  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


def test_hosts_of_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, rank=5, size=8, local=1, here=4)
    assert DeviceMesh([[6, 1], [0, 4]], hosts="launcher").hosts == (1, 0, 0, 1)


@pytest.mark.parametrize(
    ("rank", "size", "local", "here", "said"),
    [
        (1, 2, 1, 2, "for ranks up to 3"),
        (3, 4, 1, 2, None),
        (2, 4, 1, 2, "rank 2 of 4 is number 1 of 2"),
        (3, 5, 0, 3, "rank 3 of 5 is number 0 of 3"),
    ],
)
def test_what_a_launcher_does_not_tell(
    rank: int, size: int, local: int, here: int, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched(monkeypatch, rank, size, local, here)
    if said is None:
        assert DeviceMesh.arange(x=4).with_hosts("launcher").hosts == (0, 0, 1, 1)
        return
    with pytest.raises(mf.MeshError, match=re.escape(said)) as caught:
        DeviceMesh([0, 1, 2, 3], hosts="launcher")
    assert "hosts=[0, 0, 1, 1]" in str(caught.value)


def test_a_launcher_that_does_not_know_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, rank=1, size=4, local=1, here=4)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    with pytest.raises(mf.MeshError, match="does not tell how many ranks each host has"):
        DeviceMesh([0, 1, 2, 3], hosts="launcher")


@pytest.mark.parametrize(
    "mesh",
    [
        DeviceMesh.arange(a=2, b=2).with_hosts([0, 1, 1, 1]),
        DeviceMesh([4, 5], hosts=[3, 3]),
        DeviceMesh([5, 2, 3], hosts=[7, 0, 7]),
    ],
    ids=str,
)
def test_hosts_in_the_text_of_a_program(mesh: DeviceMesh) -> None:
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([6, 4], mesh=mesh, layout={mesh.axes[0]: Shard(0)})
        fd.add_output(fd.ops.set(x).on(mesh))
    host = mf.compile(fd).host
    parsed = mf.hir.parse(str(host))
    assert str(parsed).partition("\n")[0] == str(host).partition("\n")[0]
    assert {k.layout.mesh for k in parsed.types.values() if k.layout} == {mesh}


def test_wrong_hosts_in_the_text_of_a_program() -> None:
    text = "host @p on mesh(x=2 on 0*3) {\n  return\n}"
    with pytest.raises(mf.MdfuseError, match="3 hosts, from 0, for 2 ranks"):
        mf.hir.parse(text)


@pytest.mark.parametrize(
    "make",
    [
        lambda n: DeviceMesh(n),
        lambda n: DeviceMesh([0, -n]),
        lambda n: DeviceMesh([0], hosts=[n]),
        lambda n: DeviceMesh.arange(tp=n),
    ],
)
def test_numbers_that_python_does_not_print(make: Callable[[int], DeviceMesh]) -> None:
    with pytest.raises(mf.MeshError, match="a number of 16610 bits is not a"):
        make(10**5000)


def test_a_copy_forgets_what_another_process_would_not_understand() -> None:
    """Hashes of texts differ between processes, and meshes and layouts remember theirs."""
    mesh = DeviceMesh([[3, 1], [0, 2]], ("dp", "tp"), hosts=[0, 0, 1, 1]).with_lost([2])
    layout = mf.Layout(mesh, {"dp": mf.Shard(0)}, stream=mf.Stream(1, 2))
    assert hash(layout) == hash(layout) and layout.local_shape((4, 6), 3) == (2, 6)
    vars(mesh)["_hash"] = vars(layout)["_hash"] = 1  # as another process has it
    for copied in (pickle.loads(pickle.dumps(layout)), copy.deepcopy(layout)):
        fresh = mf.Layout(
            DeviceMesh([[3, 1], [0, 2]], mesh.axes, mesh.hosts).with_lost([2]),
            {"dp": mf.Shard(0)},
            stream=mf.Stream(1, 2),
        )
        assert copied == fresh and hash(copied) == hash(fresh)
        assert copied.mesh.lost == {2} and copied.mesh.hosts == mesh.hosts
        assert copied.local_shape((4, 6), 3) == (2, 6)


class _Tagged(DeviceMesh):
    """A mesh of the user's."""

    __slots__ = ("later", "tag")


@dataclass(frozen=True)
class _Named(Fusion):
    """Declares one field itself."""

    title: str = ""


def test_a_copy_has_what_the_classes_above_declare() -> None:
    mesh = _Tagged([[0, 1], [2, 3]], ("dp", "tp"), hosts=[0, 0, 1, 1])
    mesh.tag, mesh.lost = "mine", frozenset({3})
    parts = {"values": {}, "exprs": (), "outputs": (), "reuse": {}, "ids": {}}
    fusion = _Named(name="f", inputs=("x",), title="mine", **parts)
    assert fusion.producers == {} and "producers" in vars(fusion)
    for copies in (copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
        copied, again = copies(mesh), copies(fusion)
        assert type(copied) is _Tagged and (copied.tag, copied.lost) == ("mine", {3})
        assert copied == mesh and copied.hosts == (0, 0, 1, 1) and not hasattr(copied, "later")
        assert (again.name, again.inputs, again.title) == ("f", ("x",), "mine")
        assert "producers" not in vars(again)
