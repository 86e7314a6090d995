"""Environment variables: every `MDFUSE_*` one, and those by which launchers tell a rank its number.

What is drawn goes through the functions that read them; nobody joins, listens or connects. Each
answer is compared with a second reading of the same variables, written here; each error must name
one of the variables that are wrong.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from typing import Any

from mdfuse.bootstrap import address_of_rank_0, detect, gloo_devices
from mdfuse.cli.doctor.examination import launcher
from mdfuse.config import VARIABLES, Options, backend_choice, options_from_environment
from mdfuse.errors import BackendError, MdfuseError
from mdfuse.runtime.null_world import null_launch

#: What nobody would write, but somebody does.
ODD = ("", " ", "-1", "+1", "01", "1_0", "1.0", "1e3", "0x10", "٣", "²", "1\n", "nan", "inf", "-0")
ODD += ("one", "None", "true", "9" * 18, "9" * 5000, str(2**63), str(2**31), "\udcff", "é", "a=b")
ODD += (",", "=", "a,,b", "1 2", "\t", "1\u00a0", "%s", "{}", "auto ", "AUTO", "/", "1048576")

#: Launcher -> the variables that it needs, and rank, size, local rank and local size.
LAUNCHERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "torchrun": (
        ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ),
    "open mpi": (
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        tuple(f"OMPI_COMM_WORLD_{n}" for n in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    ),
    "hydra": (
        ("PMI_RANK", "PMI_SIZE"),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ),
}
SIZES = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
NODES = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES")
SLURM = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_STEP_ID", *SIZES, *NODES)
OTHERS = ("PMIX_RANK", "GLOO_SOCKET_IFNAME", "TORCHELASTIC_USE_AGENT_STORE")
MOST_RANKS = 1 << 20


def fuzz(drawn: random.Random) -> None:
    """Draw an environment, and read it."""
    environment = _launchers(drawn)
    before = dict(environment)
    group = (1, 2) if drawn.random() < 0.1 else None
    for read in (_check_launch, _check_null, _check_port, _check_gloo):
        read(environment, group)
    _check_options(drawn)
    _check_carriers(drawn)
    assert environment == before


def _tried(read: Callable[[], Any]) -> tuple[Any, MdfuseError | None]:
    """An answer, or an error of mdfuse."""
    try:
        return read(), None
    except MdfuseError as error:
        return None, error


# -- launchers -------------------------------------------------------------------------------------


def _launchers(drawn: random.Random) -> dict[str, str]:
    """No, some, or all variables of each launcher; mostly the values that a launcher would set."""
    found: dict[str, str] = {}
    for needed, told in LAUNCHERS.values():
        if drawn.random() < 0.4:
            found |= _told(drawn, dict.fromkeys((*needed, *told)))
    if drawn.random() < 0.5:
        found |= _told(drawn, dict.fromkeys(SLURM))
    for name in OTHERS:
        if drawn.random() < 0.15:
            found[name] = _text(drawn)
    return found


def _told(drawn: random.Random, names: Mapping[str, object]) -> dict[str, str]:
    """One launcher's variables: few of them missing, few of them odd."""
    size = drawn.choice((1, 2, 8, 1 << 20))
    keep, odd = drawn.choice((0.5, 0.9, 1.0)), drawn.choice((0.0, 0.0, 0.1, 0.5))
    found = {}
    for name in names:
        is_size = name.endswith(("SIZE", "NRANKS", "TASKS", "NPROCS", "NODES", "NNODES"))
        usual = drawn.choice((size, size, 1)) if is_size else drawn.randrange(size)
        if drawn.random() < keep:
            found[name] = _text(drawn) if drawn.random() < odd else str(usual)
    return found


def _text(drawn: random.Random) -> str:
    return drawn.choice((*ODD, str(drawn.randrange(-3, 40)), str(drawn.randrange(70_000))))


def _whole(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[0-9]{1,19}", text) else None


def _expected(environment: Mapping[str, str]) -> tuple[tuple[Any, ...] | None, set[str]]:
    """(launcher, rank, size, local rank, local size), or None and the variables to blame."""
    for name, (needed, told) in LAUNCHERS.items():
        if name == "hydra" and _is_slurms_pmi(environment):
            continue
        if all(n in environment for n in needed):
            return _numbers("mpirun" if name != "torchrun" else name, environment, told)
    size = next((n for n in SIZES if n in environment), None)
    is_batch = "SLURM_JOB_ID" in environment and "SLURM_STEP_ID" not in environment
    if "SLURM_PROCID" in environment and size is not None and not is_batch:
        return _slurm(environment, size)
    if "PMIX_RANK" in environment:
        return None, {"PMIX_RANK"}
    return ("single", 0, 1, 0, 1), set()


def _is_slurms_pmi(environment: Mapping[str, str]) -> bool:
    pairs = (("PMI_RANK", "SLURM_PROCID"), ("PMI_SIZE", "SLURM_STEP_NUM_TASKS"))
    return all(a in environment and environment.get(b) == environment[a] for a, b in pairs)


def _slurm(environment: Mapping[str, str], size: str) -> tuple[tuple[Any, ...] | None, set[str]]:
    nodes = next((n for n in NODES if n in environment), None)
    if nodes is not None and (_whole(environment[nodes]) or 0) != 1:
        number = _whole(environment[nodes])
        if number is None or number > MOST_RANKS:
            return None, {nodes, "SLURM_PROCID", size, "SLURM_LOCALID"}
        nodes = None
    told = ("SLURM_PROCID", size, "SLURM_LOCALID", size if nodes else "")
    return _numbers("srun", environment, told)


def _numbers(
    name: str, environment: Mapping[str, str], told: tuple[str, ...]
) -> tuple[tuple[Any, ...] | None, set[str]]:
    values = [_whole(environment[n]) if n in environment else None for n in told]
    blame = {n for n, v in zip(told, values, strict=True) if n in environment and v is None}
    blame |= {n for n, v in zip(told, values, strict=True) if v is not None and v > MOST_RANKS}
    if blame:
        return None, blame | set(told)
    rank, size, local, here = values
    assert rank is not None and size is not None
    is_right = rank < size and (here is None or 1 <= here <= size)
    if not is_right or (local is not None and local >= (here or size)):
        return None, {*told}
    return (name, rank, size, rank if local is None else local, here), set()


def _check_launch(environment: Mapping[str, str], group: tuple[int, int] | None) -> None:
    expected, blame = _expected(environment)
    launch, error = _tried(lambda: detect(environment))
    if error is not None:
        assert expected is None, (error, expected)
        assert any(f"{name}=" in error.what for name in blame if name), (error.what, blame)
        assert isinstance(error, BackendError) and error.hint
    else:
        found = launch.name, launch.rank, launch.size, launch.local_rank, launch.local_size
        assert found == expected, (found, expected)
    told = launcher(environment)
    assert told[0].is_problem == (error is not None) and told[0].what
    if group is not None and expected is not None:
        launch = detect(environment, group)
        assert (launch.name, launch.rank, launch.size) == ("default group", *group)


def _check_null(environment: Mapping[str, str], group: tuple[int, int] | None) -> None:
    """The backend that contacts nobody needs no address."""
    complete = {"MASTER_ADDR": "", "MASTER_PORT": "", **environment}
    expected, _ = _expected(complete)
    launch, error = _tried(lambda: null_launch(environment, None, None, None))
    if error is not None:
        assert expected is None
    else:
        assert expected is not None and (launch.rank, launch.size) == expected[1:3]
    assert null_launch(environment, None, None, 4).size == 4


def _check_port(environment: Mapping[str, str], group: object) -> None:
    host, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    number = _whole(port or "")
    found, error = _tried(lambda: address_of_rank_0(environment))
    if error is not None:
        assert host and port and not (number is not None and 1 <= number <= 65535)
        assert error.what.startswith(f"MASTER_PORT={port!r}")
    else:
        assert found == ((host, number) if host and port else None)


def _check_gloo(environment: Mapping[str, str], group: object) -> None:
    names = re.findall(r"[^,]+", environment.get("GLOO_SOCKET_IFNAME", ""))
    named = [{"interface": name.strip()} for name in names if name.strip()]
    found = [*gloo_devices(environment, detect({}))]
    assert found == (named or [{"hostname": "127.0.0.1"}])


# -- options ---------------------------------------------------------------------------------------


def _one_of(*words: str) -> Callable[[str], Any]:
    return lambda text: text if text in words else ...


def _integer(text: str) -> Any:
    number = _whole(text.strip())
    return number if number else ...


def _seconds(text: str) -> Any:
    is_number = re.fullmatch(r"\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?\s*", text, re.A)
    return float(text) if is_number and 1e-3 <= float(text) <= 1e9 else ...


#: Variable -> the option's value by a second reading; `...`: an error.
READINGS: dict[str, Callable[[str], Any]] = {
    "MDFUSE_STREAMS": lambda t: n if (n := _integer(t)) is not ... and n <= 1024 else ...,
    "MDFUSE_STREAM_POLICY": _one_of("auto", "round_robin", "copy_compute"),
    "MDFUSE_GRAPH": _one_of("auto", "always", "never"),
    "MDFUSE_PLANS": lambda t: n if (n := _integer(t)) is not ... and n <= 1 << 31 else ...,
    "MDFUSE_FAST_LANE": _one_of("auto", "always", "never"),
    "MDFUSE_VERIFY": lambda t: t == "1" if t in ("0", "1") else ...,
    "MDFUSE_TIMEOUT_S": _seconds,
    "MDFUSE_POISON": lambda t: t == "1" if t in ("0", "1") else ...,
    "MDFUSE_TRACE": str,
    "MDFUSE_REPORTS": str,
}
RIGHT = ("auto", "never", "always", "round_robin", "copy_compute", "0", "1", "0.5", "1e2", "32")


def _check_options(drawn: random.Random) -> None:
    names = drawn.sample([*READINGS], drawn.randrange(1, 4))
    variables = {name: drawn.choice((_text(drawn), drawn.choice(RIGHT))) for name in names}
    wanted = {n: READINGS[n](text) for n, text in variables.items() if text}
    found, error = _tried(lambda: options_from_environment(None, variables))
    if error is not None:
        wrong = [name for name, value in wanted.items() if value is ...]
        if wanted.get("MDFUSE_TRACE") and wanted.get("MDFUSE_GRAPH") == "always":
            wrong.append("MDFUSE_TRACE")  # a graph has no lines to time
        assert any(error.what.startswith(f"{name}=") for name in wrong), (error.what, wanted)
        assert error.because and len(str(error)) < 1000
        return
    usual = Options()
    for name, (option, _, _) in VARIABLES.items():
        expected = wanted.get(name, getattr(usual, option))
        assert getattr(found, option) == expected, (name, variables.get(name), expected)
    assert options_from_environment(found, variables) is found


def _check_carriers(drawn: random.Random) -> None:
    """Text made of entries that are known, and text that is not."""
    usual = drawn.sample(["gloo", "nccl", "ucx", "auto"], drawn.choice((0, 1, 1, 2)))
    axes = drawn.sample(["dp", "tp", "meshes", "µ"], drawn.randrange(3))
    by_axis = {axis: drawn.choice(("mpi", "ucx", "gloo")) for axis in axes}
    pad = lambda: drawn.choice(("", " ", "\t"))  # noqa: E731
    entries = [f"{pad()}{name}{pad()}" for name in usual]
    entries += [f"{pad()}{axis}{pad()}={pad()}{name}{pad()}" for axis, name in by_axis.items()]
    drawn.shuffle(entries)
    text = ",".join(entries)
    found, error = _tried(lambda: options_from_environment(None, {"MDFUSE_BACKEND": text}))
    if error is not None:
        assert len(usual) > 1 and error.what.startswith("MDFUSE_BACKEND=")
    else:
        carriers = backend_choice(found.backend)
        assert len(usual) < 2 and carriers.usual == (usual[0] if usual else "auto")
        assert carriers.by_axis == by_axis
    other = _text(drawn) + drawn.choice(("", ",", "=", "=gloo", "=auto"))
    carriers, error = _tried(lambda: backend_choice(other))
    if error is not None:
        assert error.what.startswith("backend=")
    else:
        assert all(carriers.names) and "auto" not in carriers.by_axis.values()
