"""The files of launch/ that users copy, and the Dockerfile: what they run, with which settings."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAUNCH = ROOT / "launch"


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    settings = {**os.environ, "MDFUSE_PYTHON": sys.executable} | environment
    return subprocess.run(command, env=settings, capture_output=True, text=True)


@pytest.fixture
def stubs(tmp_path: Path) -> Path:
    """Programs that print what they are called with, for launchers that are not here.

    The Python is one, too: it passes on what is not a launcher's call.
    """
    settings = "env | grep -E '^(GLOO|NCCL|OMP|MASTER|OMPI|PRTE|SRUN)'"
    say = f'#!/bin/sh\necho "$(basename $0)" "$@"\n{settings}\n'
    for name in ("srun", "mpirun"):
        _write(tmp_path / name, say)
    _write(tmp_path / "scontrol", "#!/bin/sh\nprintf 'host0\\n127.0.0.1\\n'\n")
    passing = f'case "$*" in *torch.distributed.run*) ;; *) exec {sys.executable} "$@" ;; esac\n'
    _write(tmp_path / "python", say.replace("#!/bin/sh\n", f"#!/bin/sh\n{passing}"))
    return tmp_path


def _write(file: Path, text: str) -> None:
    file.write_text(text)
    file.chmod(0o755)


@pytest.mark.parametrize("name", ["torchrun", "torchrun_nodes", "mpirun", "mpirun_nodes", "srun"])
def test_usage(name: str) -> None:
    done = run(LAUNCH / name)
    assert done.returncode == 2
    assert f"launch/{name}" in done.stderr


def test_address_of_this_host() -> None:
    assert run(LAUNCH / "addresses", "127.0.0.1").stdout == "1 127.0.0.1 lo\n"


def test_address_of_a_host_that_is_not_there() -> None:
    done = run(LAUNCH / "addresses", "x" * 64)  # no name is so long, and nobody is asked
    assert done.returncode == 1
    assert re.search(r"launch/addresses: x+ cannot be reached: ", done.stderr)


def test_torchrun_on_several_hosts(stubs: Path) -> None:
    python = str(stubs / "python")
    command = (
        LAUNCH / "torchrun_nodes",
        "2",
        "4",
        "127.0.0.1:1234",
        "-m",
        "program",
        "--rows",
        "3",
    )
    lines = run(*command, MDFUSE_PYTHON=python, NCCL_SOCKET_IFNAME="ib0").stdout.splitlines()
    assert lines[0] == (
        "python -m torch.distributed.run --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d "
        "--rdzv-endpoint 127.0.0.1:1234 --rdzv-id mdfuse --rdzv-conf is_host=1 "
        "--local-addr 127.0.0.1 -m program --rows 3"
    )
    assert {"GLOO_SOCKET_IFNAME=lo", "NCCL_SOCKET_IFNAME=ib0"} <= {*lines}
    other = run(LAUNCH / "torchrun_nodes", "2", "4", "127.0.0.1", "x.py", MDFUSE_PYTHON=python)
    assert "--rdzv-endpoint 127.0.0.1:29400 " in other.stdout


def test_mpirun_on_several_hosts(stubs: Path) -> None:
    python = str(stubs / "python")
    command = (LAUNCH / "mpirun_nodes", "a:4,b:2", "x.py")
    agent = {"MPIRUN_AGENT": "/bin/reach", "NETWORK": "10.0.0.0/24", "GLOO_SOCKET_IFNAME": "eth1"}
    lines = run(*command, MDFUSE_PYTHON=python, **agent).stdout.splitlines()
    assert lines[0].startswith("mpirun -n 6 --host a:4,b:2 -x ")
    assert lines[0].endswith(f" {python} -m mpi4py x.py")
    assert "-x GLOO_SOCKET_IFNAME -x" in lines[0] and "MDFUSE_ONE_NODE" not in lines[0]
    assert {
        "PRTE_MCA_plm_ssh_agent=/bin/reach",
        "PRTE_MCA_prte_if_include=10.0.0.0/24",
        "OMPI_MCA_btl_tcp_if_include=10.0.0.0/24",
    } <= {*lines}


def test_mpirun_wants_ranks_per_host() -> None:
    done = run(LAUNCH / "mpirun_nodes", "a:4,b", "x.py")
    assert done.returncode == 2
    assert "launch/mpirun_nodes: b has no number of ranks" in done.stderr


def test_srun(stubs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = {
        "PATH": f"{stubs}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_ID": "123456",
        "SLURM_JOB_NODELIST": "host0,127.0.0.1",
        "SLURM_CPUS_PER_TASK": "8",
    }
    spool = stubs / "slurm_script"  # Slurm runs a copy
    spool.write_bytes((LAUNCH / "srun").read_bytes())
    for name in ("OMP_NUM_THREADS", "SRUN_CPUS_PER_TASK", "MASTER_ADDR", "MASTER_PORT"):
        job[name] = ""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    lines = run("bash", spool, "x.py", "--rows", "3", **job).stdout.splitlines()
    called = f"srun --mpi=pmix --kill-on-bad-exit=1 {sys.executable} -m mpi4py x.py --rows 3"
    assert lines[0] == called
    # the first host's address on the way to the last one, and not its name
    assert {"MASTER_ADDR=127.0.0.1", "MASTER_PORT=23456", "GLOO_SOCKET_IFNAME=lo"} <= {*lines}
    assert {"SRUN_CPUS_PER_TASK=8", "OMP_NUM_THREADS=8"} <= {*lines}
    chosen = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5", "GLOO_SOCKET_IFNAME": "ib0"}
    lines = run("bash", spool, "x.py", **(job | chosen)).stdout.splitlines()
    assert {f"{name}={value}" for name, value in chosen.items()} <= {*lines}


def test_srun_needs_sbatch() -> None:
    done = run(LAUNCH / "srun", "x.py", SLURM_SUBMIT_DIR="")
    assert done.returncode != 0
    assert "submit it with sbatch" in done.stderr


# -- scripts that need root and Debian's packages --------------------------------------------------


@pytest.fixture
def bare(tmp_path: Path) -> str:
    """A path with what every Linux has, and no more."""
    for name in ("bash", "env", "dirname", "mktemp", "rm", "rmdir", "grep"):
        found = shutil.which(name)
        assert found is not None
        (tmp_path / name).symlink_to(found)
    return str(tmp_path)


@pytest.mark.parametrize(
    ("command", "as_root", "as_user"),
    [
        (
            ("namespaces/two_hosts", "--check"),
            "no ip: apt-get install iproute2",
            "network namespaces need root",
        ),
        (
            ("namespaces/slurm", "--check"),
            "no munged slurmctld slurmd srun sbatch scontrol",
            "no munged slurmctld slurmd srun sbatch scontrol",
        ),
        (("image/build",), "no buildah: apt-get install buildah", "tests/image/build: needs root"),
    ],
    ids=lambda x: x[0] if isinstance(x, tuple) else "",
)
def test_what_a_script_lacks(
    command: tuple[str, ...], as_root: str, as_user: str, bare: str
) -> None:
    done = run(ROOT / "tests" / command[0], *command[1:], PATH=bare)
    assert done.returncode == 1
    assert (as_user if os.geteuid() else as_root) in done.stderr


# -- the image -------------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    """(instruction, arguments) of the Dockerfile, continued lines joined."""
    text = re.sub(r"(?m)^#.*\n", "", (ROOT / "Dockerfile").read_text(encoding="utf-8"))
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines if line]


def test_both_stages_have_the_base_that_is_asked_for() -> None:
    name, value = instructions()[0]
    assert name == "ARG" and re.fullmatch(r"BASE=python:3\.12\S*@sha256:[0-9a-f]{64}", value)
    assert [a for i, a in instructions() if i == "FROM"] == ["${BASE} AS build", "${BASE}"]


def pins(file: str) -> dict[str, str]:
    """The version of each package that a file of requirements names."""
    text = (ROOT / "launch" / file).read_text(encoding="utf-8")
    found = re.findall(r"(?m)^([\w.-]+)==([^ \n]+)", text)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}


def test_the_image_installs_by_hash_what_the_scripts_install() -> None:
    parts = pins("image-requirements.txt"), pins("image-torch.txt")
    assert not parts[0].keys() & parts[1].keys() and "torch" in parts[1]
    named = pins("requirements.txt")
    assert {name: (parts[0] | parts[1]).get(name) for name in named} == named
    for file in ("image-requirements.txt", "image-torch.txt", "model-requirements.txt"):
        text = (ROOT / "launch" / file).read_text(encoding="utf-8")
        blocks = re.split(r"(?m)^(?=[^\s#])", text)[1:]
        assert all("--hash=sha256:" in block for block in blocks)
    installs = [a for i, a in instructions() if i == "RUN" and "pip install" in a]
    options = re.findall(r"pip install (.*?)(?:;|\|\||&&|$)", " ".join(installs))
    loose = [o for o in options if "--require-hashes" not in o]
    assert len(options) == 4 and len(loose) == 2
    assert any("TORCH_INDEX" in o for o in loose) and any(o.startswith("--no-build") for o in loose)


def test_the_image_runs_doctor_and_is_not_root() -> None:
    last = instructions()[-3:]
    assert [i for i, _ in last] == ["USER", "ENV", "CMD"]
    assert last[0][1] == "10001:10001"
    assert last[2][1] == '["mdfuse", "doctor"]'


def test_the_image_has_no_ssh_server() -> None:
    assert not [a for i, a in instructions() if i in ("RUN", "EXPOSE") and re.search("ssh|^22", a)]


def test_the_builder_gets_what_the_image_copies() -> None:
    sent = re.findall(r"(?m)^!(\S+)", (ROOT / ".dockerignore").read_text(encoding="utf-8"))
    needed = {"mdfuse", "tests", "examples", "launch", "docs", "pyproject.toml", "README.md"}
    assert needed <= {*sent}
    assert all((ROOT / name).exists() for name in sent)
