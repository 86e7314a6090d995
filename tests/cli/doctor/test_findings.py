"""`mdfuse doctor`: what it says, and its exit status."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner, Result

from mdfuse.cli.doctor import collective, examination, findings, gpus, host, libraries, ranks
from mdfuse.cli.doctor.findings import Finding
from mdfuse.cli.main import app
from mdfuse.config import Options
from mdfuse.errors import BackendError
from mdfuse.runtime.backend_rows import BACKENDS, BackendRow

_NO_LAUNCHER = {"COLUMNS": "200", "NO_COLOR": "1"}


def doctor(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *arguments], env=_NO_LAUNCHER | environment)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries are not loaded, but in the tests of that."""
    monkeypatch.setattr(libraries, "findings", lambda environment: [])


def text(*found: Finding) -> str:
    console = Console(width=200, no_color=True, record=True, file=io.StringIO())
    console.print(findings.table(list(found)))
    return console.export_text()


# -- the command -----------------------------------------------------------------------------------


def test_all_is_well() -> None:
    result = doctor()
    assert result.exit_code == 0, result.output
    for what in ("torch", "launcher", "single: rank 0 of 1", "shared memory", "ports", "gloo"):
        assert what in result.output
    assert result.output.endswith("no problem found\n")
    assert "\x1b" not in result.output


def test_every_backend_of_the_table_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def why_not() -> tuple[str, str]:
        return "its cable is missing", "plug it in"

    def no_open(world: object) -> Any:
        raise AssertionError

    row = BackendRow(devices=("cpu",), why_not=why_not, open=no_open)
    monkeypatch.setitem(BACKENDS, "telegraph", row)
    result = doctor()
    assert result.exit_code == 0
    assert "its cable is missing; plug it in" in result.output
    assert all(name in result.output for name in BACKENDS)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"MDFUSE_BACKEND": "smoke"}, "there is no such backend; choose one of auto, gloo"),
        ({"MDFUSE_BACKEND": "nccl"}, "nccl is not usable"),
        ({"MDFUSE_TIMEOUT_S": "soon"}, "MDFUSE_TIMEOUT_S='soon' cannot be read"),
        (
            {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "2"},
            "OMPI_COMM_WORLD_RANK=3 does not fit OMPI_COMM_WORLD_SIZE=2; unset the variables",
        ),
        ({"GLOO_SOCKET_IFNAME": "nowhere0"}, "there is no interface nowhere0"),
        ({"MASTER_ADDR": "no-such-host.invalid"}, "no-such-host.invalid has no address"),
    ],
)
def test_problems_exit_1(
    environment: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", _resolves_nothing)
    result = doctor(**environment)
    assert result.exit_code == 1
    assert message in result.stderr.split("problems:")[1]
    assert "no problem found" not in result.output


def _resolves_nothing(*arguments: object) -> Any:
    raise socket.gaierror("no such name")


def test_one_rank_cannot_communicate() -> None:
    result = doctor("--collective")
    assert result.exit_code == 1
    assert "--collective needs at least two ranks, and this is single" in result.stderr


# -- launcher and variables ------------------------------------------------------------------------


def test_launcher_and_why() -> None:
    found = examination.launcher({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"})
    assert [f.text for f in found] == [
        "mpirun: rank 1 of 2, local rank 1",
        "because OMPI_COMM_WORLD_RANK=1 and OMPI_COMM_WORLD_SIZE=2 are set",
    ]


def test_what_auto_comes_to() -> None:
    chosen, why = ("nccl", "has a GPU") if torch.cuda.is_available() else ("gloo", "nccl cannot be")
    (line,) = [x for x in doctor().output.splitlines() if x.startswith("backend  ")]
    assert f"auto: {chosen}, because" in line and why in line


def test_every_backend_that_is_named_is_looked_at() -> None:
    result = doctor(MDFUSE_BACKEND="gloo, dp=smoke")
    assert result.exit_code == 1
    assert "gloo, because MDFUSE_BACKEND names it" in result.output
    assert "smoke is not usable: there is no such backend" in result.stderr


def test_variables_that_matter() -> None:
    shown = examination.variables({"NCCL_DEBUG": "INFO", "HOME": "/", "MDFUSE_STREAMS": "2"})
    assert [(f.name, f.what) for f in shown] == [("MDFUSE_STREAMS", "2"), ("NCCL_DEBUG", "INFO")]


def test_what_wants_a_remedy_shows_it() -> None:
    shown = text(Finding(name="a", what="b", remedy="c"), Finding(name="", what="d"))
    assert [line.split() for line in shown.splitlines()] == [["a", "b;", "c"], ["d"]]


# -- the host --------------------------------------------------------------------------------------


def test_little_shared_memory_has_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert host.shared_memory(tmp_path / "none").remedy
    blocks = SimpleNamespace(f_bavail=16384, f_blocks=16384, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda folder: blocks)
    found = host.shared_memory(tmp_path)
    assert found.what == f"64 MiB of 64 MiB free in {tmp_path}"
    assert found.remedy is not None and "--shm-size" in found.remedy
    blocks.f_bavail = 1 << 20
    assert host.shared_memory(tmp_path).remedy is None
    monkeypatch.setattr(os, "access", lambda folder, mode: False)
    assert "cannot be written" in host.shared_memory(tmp_path).what


def test_no_loopback_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> Any:
        raise OSError("Network is unreachable")

    assert not host.loopback().is_problem
    monkeypatch.setattr(socket, "create_connection", refuse)
    found = host.loopback()
    assert found.is_problem and "Network is unreachable" in found.text


def test_a_name_that_others_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = {"near": "127.0.1.1", "far": "10.0.0.7"}

    def resolve(name: str) -> str:
        if name not in addresses:
            raise socket.gaierror("no such name")
        return addresses[name]

    monkeypatch.setattr(socket, "gethostbyname", resolve)
    assert host.host_name("far") == Finding(name="host name", what="far is 10.0.0.7")
    assert [bool(host.host_name(n).remedy) for n in ("near", "unknown")] == [True, True]


def test_address_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    found = host.network({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"})
    assert found[-1].text == "127.0.0.1, 29500"


# -- GPUs ------------------------------------------------------------------------------------------


class _Nvml(ModuleType):
    """The management library on a host with as many GPUs, of which each two neighbours are linked.

    GPUs are numbers.
    """

    NVML_NVLINK_MAX_LINKS = 18
    NVML_FEATURE_ENABLED = 1
    NVML_P2P_CAPS_INDEX_NVLINK = 2
    NVML_P2P_STATUS_OK = 0

    class NVMLError(Exception):
        pass

    def __init__(self, count: int, fails: str = "") -> None:
        super().__init__("pynvml")
        self._count, self._fails, self.is_open = count, fails, False

    def nvmlInit(self) -> None:
        if self._fails == "init":
            raise self.NVMLError("Driver Not Loaded")
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def nvmlSystemGetDriverVersion(self) -> str:
        if self._fails == "version":
            raise self.NVMLError("Not Supported")
        return "580.1"

    def nvmlDeviceGetCount(self) -> int:
        return self._count

    def nvmlDeviceGetHandleByIndex(self, i: int) -> int:
        return 1000 + i

    def nvmlDeviceGetP2PStatus(self, a: int, b: int, index: int) -> int:
        if self._fails == "pair":
            raise self.NVMLError("Unknown Error")
        return 0 if abs(a - b) == 1 else 5

    def nvmlDeviceGetTopologyCommonAncestor(self, a: int, b: int) -> int:
        return 30 if abs(a - b) == 2 else 77

    def nvmlDeviceGetNvLinkState(self, gpu: int, link: int) -> int:
        if link >= 4:
            raise self.NVMLError("Not Supported")
        return 0 if link == 3 else 1


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Callable[..., _Nvml]:
    def install(count: int, fails: str = "") -> _Nvml:
        module = _Nvml(count, fails)
        monkeypatch.setitem(sys.modules, "pynvml", module)
        return module

    return install


def _shown(renderable: object) -> list[list[str]]:
    console = Console(width=200, no_color=True, record=True, file=io.StringIO())
    console.print(renderable)
    lines = (" ".join(line.split()) for line in console.export_text().splitlines())
    return [line.split("GPU")[1:] for line in lines if line.startswith("GPU")]


def test_links_between_gpus(nvml: Callable[..., _Nvml]) -> None:
    module = nvml(4)
    found, matrix = gpus.links()
    assert found[0].text == "580.1, 4 GPUs"
    assert matrix is not None and not module.is_open
    assert [row[0].split(maxsplit=1) for row in _shown(matrix)][1:] == [
        ["0", "NVLink x3 one PCIe host bridge PCIe level 77"],
        ["1", "NVLink x3 NVLink x3 one PCIe host bridge"],
        ["2", "one PCIe host bridge NVLink x3 NVLink x3"],
        ["3", "PCIe level 77 one PCIe host bridge NVLink x3"],
    ]


def test_gpus_that_torch_does_not_see(
    nvml: Callable[..., _Nvml], monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml(1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found, matrix = gpus.links()
    assert matrix is None
    assert [f.name for f in found] == ["driver", "GPUs", "links"]
    assert "sees none; install a CUDA build of torch" in found[1].text


@pytest.mark.parametrize(
    ("fails", "what"),
    [
        ("init", "unknown: no NVIDIA driver (Driver Not Loaded)"),
        ("version", "unknown: the driver does not tell (Not Supported)"),
    ],
)
def test_links_that_nobody_tells(nvml: Callable[..., _Nvml], fails: str, what: str) -> None:
    module = nvml(2, fails)
    found, matrix = gpus.links()
    assert [f.text for f in found] == [what]
    assert matrix is None and not module.is_open


def test_one_pair_that_nobody_tells(nvml: Callable[..., _Nvml]) -> None:
    nvml(2, "pair")
    _, matrix = gpus.links()
    assert "unknown (Unknown Error)" in str(_shown(matrix))


def test_no_management_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpus.links()[0][0].text.endswith("not installed; pip install mdfuse[cli]")


# -- libraries -------------------------------------------------------------------------------------


def test_libraries_are_loaded_apart() -> None:
    """An abort of one is a line with a remedy."""
    environment = dict(os.environ)
    fine = libraries.probe("x", "print('x 1.2')", "install x", environment)
    assert fine == Finding(name="x", what="usable, x 1.2")
    broken = libraries.probe("x", "import no_such_module", "install x", environment)
    assert broken.text.startswith("not usable: ModuleNotFoundError: ")
    assert broken.text.endswith("; install x")
    aborted = libraries.probe("x", "import os; os.abort()", "install x", environment)
    assert aborted.what == "not usable: SIGABRT when it is loaded"
    silent = libraries.probe("x", "raise SystemExit(3)", "install x", environment)
    assert silent.what == "not usable: exit status 3"


def test_a_library_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(command: list[str], **settings: Any) -> Any:
        raise subprocess.TimeoutExpired(command, settings["timeout"])

    monkeypatch.setattr(subprocess, "run", hang)
    assert libraries.probe("x", "", "install x", {}).text == (
        "hangs when it is loaded (30 s); install x"
    )


def test_mpi_is_loaded_and_not_started() -> None:
    found = libraries.probe("MPI", libraries._MPI_PROBE, "", dict(os.environ))
    assert found.what.startswith("usable, "), found
    assert "\n" not in found.what


def test_mpirun_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries.shutil, "which", lambda name, path=None: None)
    assert libraries.mpirun().text == "not found; pip install mdfuse[mpi]"


# -- all ranks -------------------------------------------------------------------------------------


class _Alone:
    """A communicator of two ranks of which the other says what it is told to."""

    rank, size, backend = 0, 2, "gloo"

    def __init__(self, other: str | None) -> None:
        self._other = other

    def all_ok(self, mine: str | None) -> tuple[str | None, ...]:
        return mine, self._other

    def close(self) -> None:
        pass


def measured(wrong: str | None) -> collective.Measured:
    return collective.Measured(
        backend="gloo", what="allreduce", size=1 << 20, arrives=1 << 20, seconds=0.5, wrong=wrong
    )


def test_wrong_values_are_told_to_all_ranks() -> None:
    comm: Any = _Alone("3 of 4 elements of allgather are wrong")
    assert collective.wrong_values(comm, [measured(None)]) == [
        "gloo: rank 1: 3 of 4 elements of allgather are wrong"
    ]
    both = collective.wrong_values(comm, [measured("a"), measured(None), measured("b")])
    assert both[0] == "gloo: rank 0: a; b" and len(both) == 2


def test_bandwidth_is_what_arrives() -> None:
    shown = Console(width=100, record=True, file=io.StringIO())
    shown.print(collective.table([measured(None)]))
    row = "gloo allreduce 1 MiB 500.0 ms 2 MiB/s"
    assert row in " ".join(shown.export_text().split())


@pytest.mark.parametrize("backend", ["auto", "nccl"])
def test_a_problem_of_another_rank_stops_the_check(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MDFUSE_BACKEND", backend)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setattr(ranks, "init", lambda options, backend: _Alone("no loopback"))
    found = ranks.check_ranks(Console(quiet=True), ["here"])
    assert found[:2] == ["rank 0: here", "rank 1: no loopback"]


@pytest.mark.parametrize(
    ("text", "names"),
    [("auto, dp=gloo", list(BACKENDS)), ("gloo", ["gloo"]), ("gloo, dp=ucx", ["gloo", "ucx"])],
)
def test_what_is_measured(text: str, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each backend that the variable names; all, where one of them is "auto"."""
    monkeypatch.setattr(ranks, "init", lambda options, backend: _Alone(None))
    monkeypatch.setattr(ranks, "_refusals", lambda comm, name: (None, None))
    _, usable = ranks._meet(Options(backend=text), [])
    assert usable == [name for name in names if name != "null"]


def test_the_null_backend_is_no_way_to_communicate(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would bring nothing, and nothing to measure is no success."""
    launched = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    monkeypatch.setattr(ranks, "init", lambda options, backend: _Alone(None))
    result = doctor("--collective", MDFUSE_BACKEND="null", **launched)
    assert result.exit_code == 1
    assert "backend null: nothing that all ranks could communicate by" in result.stderr


def test_ranks_that_do_not_meet_exit_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(options: object, backend: str) -> Any:
        raise BackendError("rank 0 cannot reach the other rank", hint="check the address")

    monkeypatch.setattr(ranks, "init", fail)
    result = doctor(
        "--collective", RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1"
    )
    assert result.exit_code == 1
    assert "BackendError: rank 0 cannot reach the other rank" in result.stderr
    assert "Traceback" not in result.output


def test_two_ranks_communicate() -> None:
    """As processes: rank 0 prints the table, rank 1 nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    outputs = _both_ranks({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
    assert [status for status, _ in outputs] == [0, 0], outputs
    lines = [line.split() for line in outputs[0][1].splitlines()]
    assert sum(line[:2] == ["gloo", "allreduce"] for line in lines) == len(collective.SIZES)
    assert outputs[0][1].endswith("no problem found\n")
    assert outputs[1][1] == ""


def _both_ranks(where: dict[str, str]) -> list[tuple[int, str]]:
    command = [sys.executable, "-m", "mdfuse", "doctor", "--collective"]
    common = dict(os.environ) | where | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    environments = [common | {"RANK": r, "LOCAL_RANK": r} for r in ("0", "1")]
    pipe, joined = subprocess.PIPE, subprocess.STDOUT
    started = [
        subprocess.Popen(command, env=e, stdout=pipe, stderr=joined, text=True)
        for e in environments
    ]
    outputs = [p.communicate(timeout=60)[0] for p in started]
    return [(p.returncode, text) for p, text in zip(started, outputs, strict=True)]
