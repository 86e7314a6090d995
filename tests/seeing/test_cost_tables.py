"""Tables of costs in files: what was written is read; what is of no use is named and left alone."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

import mdfuse as mf
from mdfuse.seeing import Costs, CostTable, Link, LinkKey, cost_table
from mdfuse.seeing import cost_tables as tables
from mdfuse.seeing.cost_keys import links_of, works_of
from mdfuse.seeing.cost_tables import Machine, file_name, find_table, machine_of, parsed
from mdfuse.seeing.curves import Curve, Grid

MACHINE = Machine(device="a GPU", link="peer", backend="nccl", versions={"torch": "2.11"})
CURVE = Curve(((1024.0, 1e-6), (65536.0, 1e-5)))
COSTS = Costs(
    launch_s=2e-6,
    run_s=7e-6,
    posting_s=5e-6,
    flops=1e12,
    bandwidth=1e11,
    links=links_of({
        "Allreduce 2": Link(curve=CURVE, slows=0.06, cold=CURVE), "*": Link(1e-5, 1e9),
        "symmetric: Allreduce 2": Link(4e-6, 2e9), "symmetric: *": Link(3e-6, 2e9, slows=0.02),
    }),
    works=works_of({"* f32": CURVE}),
    products=works_of({"linear f32": Grid(((1.0, 2.0), (4.0,), (8.0,)), (1e-6, 2e-6))}),
    attentions=works_of({"bf16 causal": Grid(((1.0,), (4.0, 9.0), (64.0,)), (1e-6, 3e-6))}),
    multiprocessors=132,
    cache=50,
)  # fmt: skip
TABLE = CostTable(
    costs=COSTS, machine=MACHINE, ranks=2, date="2026-11-23", mean_error=0.04, p95_error=0.09,
    held_out={"mlp": (1e-3, 1.1e-3)}, spread=0.02,
)  # fmt: skip


def write(place: Path, table: CostTable, name: str | None = None) -> None:
    place.mkdir(exist_ok=True)
    (place / (name or file_name(table.machine, table.ranks))).write_text(table.as_json())


def test_a_table_comes_back_as_it_was() -> None:
    back = parsed(TABLE.as_json())
    assert replace(back, costs=replace(back.costs, name=COSTS.name)) == TABLE
    assert (
        back.costs.name
        == "calibrated: a GPU (peer, nccl), 2 ranks, 2026-11-23, off by 4% on average"
    )


def test_a_table_from_before_runs_had_a_cost_is_read() -> None:
    """And from before attention was measured by blocks, and communications behind much work."""
    fields = json.loads(TABLE.as_json())
    assert fields["costs"].pop("attentions") and fields["costs"].pop("multiprocessors") == 132
    assert fields["costs"].pop("run_s") == 7e-6
    assert fields["costs"].pop("posting_s") == 5e-6
    assert fields["costs"].pop("cache") == 50
    assert fields["costs"]["links"]["Allreduce 2"].pop("cold")
    back = parsed(json.dumps(fields)).costs
    assert back.attentions == {} and back.multiprocessors == back.cache == 0
    assert back.links[LinkKey("Allreduce", ranks=2)].cold is None
    assert back.run_s == back.posting_s == 0.0


#: What a file had that modelled the caches and the clock of a processor, or work behind other work.
RETIRED = {
    "pace_s": 6.5e-05,
    "switch_s": 3e-7,
    "caches": {
        "core": 1048576, "returns": {"gelu": 3e-5, "any": 4e-5}, "shared": 33554432,
        "stale": [[4.0, 2e-11], [32.0, 1e-12]],
    },
}  # fmt: skip


@pytest.mark.parametrize("caches", [RETIRED["caches"], None])
def test_retired_keys_are_left_out(caches: object, tmp_path: Path) -> None:
    """Tables of a file in its earlier form, and of costs by themselves, as users write them."""
    fields = json.loads(TABLE.as_json())
    fields["pace_s"] = RETIRED["pace_s"]
    fields["costs"] |= {"caches": caches, "switch_s": RETIRED["switch_s"]}
    (tmp_path / "before.json").write_text(json.dumps(fields))
    table, told = find_table(MACHINE, tmp_path)
    assert table == parsed(TABLE.as_json()) and not told
    assert "pace_s" not in table.as_json() and "caches" not in table.as_json()
    assert tables.costs_of(fields["costs"]) == COSTS
    assert {*RETIRED} == tables._RETIRED


def test_the_table_of_most_ranks_counts(tmp_path: Path) -> None:
    write(tmp_path, TABLE)
    write(tmp_path, replace(TABLE, ranks=4, mean_error=0.03))
    best, told = find_table(MACHINE, tmp_path)
    assert best is not None and best.ranks == 4 and not best.is_default and not told


def test_tables_of_other_machines_are_left_alone(tmp_path: Path) -> None:
    write(tmp_path, replace(TABLE, machine=replace(MACHINE, versions={"torch": "2.10"})))
    best, told = find_table(MACHINE, tmp_path)
    assert best is None
    assert told == [
        "a_GPU-peer-nccl-0-2.json is of another machine: "
        "versions {'torch': '2.10'}, here {'torch': '2.11'}"
    ]


def test_threads_may_be_others_where_nothing_runs(tmp_path: Path) -> None:
    processor = replace(MACHINE, threads=1)
    write(tmp_path, replace(TABLE, machine=processor))
    assert find_table(replace(processor, threads=2), tmp_path)[0] is None
    assert find_table(replace(processor, threads=2), tmp_path, any_threads=True)[0] is not None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "Expecting value"),
        ("[]", "does not say"),
        ('{"format": "mdfuse costs 0"}', "does not say"),
        ('{"format": "mdfuse costs 1"}', "'machine'"),
        (TABLE.as_json().replace('"launch_s"', '"lunch_s"'), "lunch_s"),
        (TABLE.as_json().replace("1e-05", '"fast"', 1), "a time of 'fast'"),
        (TABLE.as_json().replace("2e-06", "-1", 1), "launch_s=-1"),
        (TABLE.as_json().replace('"ranks"', '"pace"'), "pace"),
        (TABLE.as_json()[:-40], "Expecting"),
    ],
)
def test_damaged_tables_are_named(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "damaged.json").write_text(text)
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    best, told = find_table(MACHINE, tmp_path)
    assert best is None and len(told) == 2
    assert told[0].startswith("bytes.json cannot be read: 'utf-8' codec")
    assert told[1].startswith("damaged.json is no table of costs: ") and why in told[1]


def test_posts_that_name_a_backend_take_its_links() -> None:
    def at(kind: str, backend: str | None, costs: Costs = COSTS) -> float:
        return costs.link(kind, "tp", 2, backend).seconds(0)

    assert at("Allreduce", None) == pytest.approx(1e-6) and at("Gather", None) == 1e-5
    assert at("Allreduce", "symmetric") == 4e-6 and at("Gather", "symmetric") == 3e-6
    assert at("Allreduce", "mpi") == pytest.approx(1e-6), "nobody measured it: as the usual one"
    by = COSTS.by("symmetric")
    assert by is not None and at("Allreduce", None, by) == 4e-6 and at("Gather", None, by) == 3e-6


def test_with_two_backends_each_post_takes_its_own_links(tmp_path: Path) -> None:
    """Whichever is the usual one: what the table was measured with is what posts name then."""
    write(tmp_path, TABLE)
    for usual, other in (("nccl", "symmetric"), ("symmetric", "nccl")):
        table, _ = find_table(replace(MACHINE, backend=usual), tmp_path)
        assert table is not None
        seconds = {
            name: table.costs.link("Allreduce", "tp", 2, backend).seconds(0)
            for name, backend in ((usual, None), (other, other))
        }
        assert seconds == {"nccl": pytest.approx(1e-6), "symmetric": 4e-6}
    assert table.by("nccl").costs.link("Allreduce", "tp").seconds(0) == pytest.approx(1e-6)


def test_programs_of_another_backend_have_its_table(tmp_path: Path) -> None:
    write(tmp_path, TABLE)
    table, told = find_table(replace(MACHINE, backend="symmetric"), tmp_path)
    assert table is not None and not told
    assert table.machine.backend == "symmetric" and "(peer, symmetric)" in table.costs.name
    assert table.costs.link("Allreduce", "tp").latency_s == 4e-6
    assert find_table(replace(MACHINE, backend="mpi"), tmp_path)[0] is None


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of tables that ship, which is empty."""

    class Package:
        @staticmethod
        def files(package: str) -> Path:
            assert package == "mdfuse"
            return tmp_path / "package"

    monkeypatch.setattr(tables, "resources", Package)
    place = tmp_path / "package" / "seeing" / "tables"
    place.mkdir(parents=True)
    return place


def test_one_gpu_alone_takes_the_table_of_several(shipped: Path, tmp_path: Path) -> None:
    """But not the other way round: a table of one would say that communications take no time."""
    alone = replace(MACHINE, link="alone")
    write(shipped, TABLE)
    write(shipped, replace(TABLE, machine=replace(MACHINE, device="another GPU")))
    table, told = find_table(alone, tmp_path)
    assert table is not None and table.is_default and not told
    assert table.costs.links == COSTS.links and table.machine == MACHINE
    for path in shipped.iterdir():
        path.unlink()
    write(shipped, replace(TABLE, machine=alone, ranks=1))
    table, told = find_table(MACHINE, tmp_path)
    assert table is None and len(told) == 1
    assert "a GPU (alone, nccl), 1 ranks" in told[0] and told[0].endswith("not of link peer")


def test_a_local_calibration_goes_before_a_shipped_table(shipped: Path, tmp_path: Path) -> None:
    write(shipped, TABLE)
    other_versions = replace(MACHINE, versions={"torch": "2.13"}, backend="ucx")
    default, _ = find_table(other_versions, tmp_path / "local")
    assert default is not None and default.is_default
    assert default.costs.name.startswith("default: a GPU (peer, nccl), 2 ranks, 2026-11-23")
    assert find_table(replace(MACHINE, link="host"), tmp_path / "local")[0] is None
    write(tmp_path / "local", replace(TABLE, machine=other_versions))
    local, _ = find_table(other_versions, tmp_path / "local")
    assert local is not None and not local.is_default


def test_tables_that_ship_can_be_read() -> None:
    for path in (Path(mf.__file__).parent / "seeing" / "tables").glob("*.json"):
        table = parsed(path.read_text(encoding="utf-8"))
        assert table.spread <= 0.2 and table.held_out and table.costs.works, path.name
        fields = json.loads(path.read_text(encoding="utf-8"))
        assert not tables._RETIRED & {*fields, *fields["costs"]}, path.name


@dataclass
class Ranks:
    """Rank 1 of two: `first` is what rank 0 says."""

    first: str | None
    device = torch.device("cpu")
    backend = "gloo"

    def all_ok(self, error_text: str | None) -> tuple[str | None, ...]:
        return self.first, error_text


def test_the_table_of_rank_0_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    here = machine_of(torch.device("cpu"), "gloo")
    mine = replace(TABLE, machine=here, mean_error=0.5)
    write(tmp_path, mine)
    table = cost_table(Ranks(TABLE.as_json()), tmp_path)
    assert table is not None and table.mean_error == 0.04
    assert "rank 0 has another table" in caplog.text
    caplog.clear()
    same = cost_table(Ranks(mine.as_json()), tmp_path)
    assert same is not None and same.mean_error == 0.5 and not caplog.text
    assert cost_table(Ranks(None), tmp_path) is None


def test_a_default_table_says_so_on_all_ranks(tmp_path: Path) -> None:
    table = cost_table(Ranks(replace(TABLE, is_default=True).as_json()), tmp_path)
    assert table is not None and table.is_default and table.costs.name.startswith("default: ")


def test_links_follow_the_number_of_ranks() -> None:
    curves = {n: Curve(((1.0, float(n)),)) for n in (2, 4)}
    links = {LinkKey("Allreduce", ranks=n): Link(curve=curve) for n, curve in curves.items()}
    costs = Costs(links=links | {LinkKey(): Link(9.0)})
    at = {n: costs.link("Allreduce", "tp", n).seconds(1) for n in (2, 3, 4, 8)}
    assert at == {2: 2.0, 3: 2.0, 4: 4.0, 8: 4.0}
    assert costs.link("Gather", "tp", 2).seconds(0) == 9.0
    assert json.loads(TABLE.as_json())["costs"]["links"]["*"]["latency_s"] == 1e-5
