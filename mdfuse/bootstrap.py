"""Detect which launcher started this process, from its environment alone: no torch, no MPI."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from mdfuse.errors import BackendError

#: More than any launcher starts: a number beyond is a mistake, and lists of ranks would not fit.
MOST_RANKS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The launch of this process.

    Attributes:
        name: "default group", "torchrun", "mpirun", "srun", "single", or "null" where nobody
            launched this rank.
        rank: 0 <= rank < size.
        size: number of ranks.
        local_rank: the rank's number on its host; `rank` where the launcher does not tell.
        why: the evidence for the launcher, in words.
        local_size: ranks on this host, or None where the launcher does not tell.
    """

    name: str
    rank: int
    size: int
    local_rank: int
    why: str
    local_size: int | None = None

    @property
    def is_one_host(self) -> bool:
        """True if all ranks are known to be on one host."""
        return self.local_size == self.size

    @property
    def others(self) -> str:
        """The words of errors for the ranks that are not this one."""
        return "the other rank" if self.size == 2 else f"the other {self.size - 1} ranks"


class Launcher(Protocol):
    """A launcher, as its environment variables tell of it."""

    def is_present(self, environment: Mapping[str, str]) -> bool: ...

    def launch(self, environment: Mapping[str, str]) -> Launch:
        """Return the launch that the variables describe; only where `is_present`.

        Raises:
            BackendError: they contradict each other or are not numbers.
        """


class Torchrun:
    """torchrun, and whatever else sets the variables of torch's own rendezvous."""

    def is_present(self, environment: Mapping[str, str]) -> bool:
        return _has_all(environment, "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

    def launch(self, environment: Mapping[str, str]) -> Launch:
        return _launch(
            environment,
            "torchrun",
            rank="RANK",
            size="WORLD_SIZE",
            local_rank="LOCAL_RANK",
            local_size="LOCAL_WORLD_SIZE",
        )


class OpenMpi:
    """mpirun of Open MPI, with ssh, Slurm or nothing below it."""

    def is_present(self, environment: Mapping[str, str]) -> bool:
        return _has_all(environment, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")

    def launch(self, environment: Mapping[str, str]) -> Launch:
        return _launch(
            environment,
            "mpirun",
            rank="OMPI_COMM_WORLD_RANK",
            size="OMPI_COMM_WORLD_SIZE",
            local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
            local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        )


class Hydra:
    """mpirun of MPICH and Intel MPI."""

    def is_present(self, environment: Mapping[str, str]) -> bool:
        """Return whether Hydra set the variables, and not srun.

        srun sets PMI_RANK and PMI_SIZE, too, with --mpi=pmi2, and is preferred there, as it also
        tells the local rank. Below proxies that srun started, Slurm's numbers are those of the
        proxies, and differ.
        """
        is_sruns = all(
            pmi in environment and environment[pmi] == environment.get(slurm)
            for pmi, slurm in (("PMI_RANK", "SLURM_PROCID"), ("PMI_SIZE", "SLURM_STEP_NUM_TASKS"))
        )
        return _has_all(environment, "PMI_RANK", "PMI_SIZE") and not is_sruns

    def launch(self, environment: Mapping[str, str]) -> Launch:
        return _launch(
            environment,
            "mpirun",
            rank="PMI_RANK",
            size="PMI_SIZE",
            local_rank="MPI_LOCALRANKID",
            local_size="MPI_LOCALNRANKS",
        )


class Srun:
    """A step of a Slurm job, with or without PMIx."""

    sizes = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    nodes = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES")

    def is_present(self, environment: Mapping[str, str]) -> bool:
        """Return whether this process is a task of a job step, and no batch script.

        A batch script has SLURM_PROCID=0 and SLURM_NTASKS=n without being one of n ranks. Only a
        job step has a step id.
        """
        is_batch_script = "SLURM_JOB_ID" in environment and "SLURM_STEP_ID" not in environment
        has_size = _first(environment, self.sizes) is not None
        return "SLURM_PROCID" in environment and has_size and not is_batch_script

    def launch(self, environment: Mapping[str, str]) -> Launch:
        size = _first(environment, self.sizes)
        assert size is not None
        nodes = _first(environment, self.nodes)
        is_one_node = nodes is not None and _number(environment, nodes) == 1
        return _launch(
            environment,
            "srun",
            rank="SLURM_PROCID",
            size=size,
            local_rank="SLURM_LOCALID",
            # the tasks per node of larger steps are not needed
            local_size=size if is_one_node else None,
        )


#: In order of precedence, each with the reason why it stands there.
LAUNCHERS: tuple[Launcher, ...] = (
    Torchrun(),  # may itself have been started by srun or mpirun, one agent per host
    OpenMpi(),  # inside a Slurm allocation it inherits SLURM_PROCID, so it goes before srun
    Hydra(),  # starts its ranks from a proxy that srun may have started
    Srun(),
)


def _launch(
    environment: Mapping[str, str],
    name: str,
    *,
    rank: str,
    size: str,
    local_rank: str,
    local_size: str | None,
) -> Launch:
    """Return the launch that the variables of these names describe.

    Raises:
        BackendError: they contradict each other or are not numbers.
    """
    number, count = _number(environment, rank), _number(environment, size)
    local = _optional_number(environment, local_rank)
    on_host = None if local_size is None else _optional_number(environment, local_size)

    def check(is_right: bool, one: str, other: str | None, rule: str) -> None:
        if not is_right and other is not None:
            raise BackendError(
                f"{one}={environment[one]} does not fit {other}={environment[other]}",
                because=rule,
                hint=f"unset the variables, or start the program with {name}",
            )

    check(number < count, rank, size, "a rank is smaller than the number of ranks")
    if on_host is not None:
        rule = "this rank is on its host, and no host has more ranks than there are"
        check(0 < on_host <= count, str(local_size), size, rule)
    if local is not None:
        rule = "a rank's number on its host is smaller than the number of ranks there"
        check(local < (on_host or count), local_rank, local_size if on_host else size, rule)
    return Launch(
        name=name,
        rank=number,
        size=count,
        local_rank=number if local is None else local,
        local_size=on_host,
        why=f"{rank}={number} and {size}={count} are set",
    )


def detect(environment: Mapping[str, str], default_group: tuple[int, int] | None = None) -> Launch:
    """Return the launch of this process, with its launcher.

    Args:
        environment: the process's environment variables.
        default_group: (rank, size) of torch's default process group where one exists; it overrides
            the launchers.

    Raises:
        BackendError: a launcher's variables contradict each other or are not numbers.

    >>> detect({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}).name
    'mpirun'
    >>> detect({}).why
    'no launcher set its variables'
    """
    if default_group is not None:
        return _default_group_launch(environment, *default_group)
    for launcher in LAUNCHERS:
        if launcher.is_present(environment):
            return launcher.launch(environment)
    if "PMIX_RANK" in environment:
        raise BackendError(
            f"PMIX_RANK={environment['PMIX_RANK']} is set, but not the number of ranks",
            because="PMIx alone does not tell a process how many ranks there are",
            hint="start with Open MPI's mpirun, srun or torchrun, or unset PMIX_RANK",
        )
    return Launch(
        name="single",
        rank=0,
        size=1,
        local_rank=0,
        local_size=1,
        why="no launcher set its variables",
    )


def _default_group_launch(environment: Mapping[str, str], rank: int, size: int) -> Launch:
    """Return the default group's launch, with the local rank of a launcher that agrees with it."""
    local_rank, local_size = rank, None
    for launcher in LAUNCHERS:
        if launcher.is_present(environment):
            seen = launcher.launch(environment)
            if (seen.rank, seen.size) == (rank, size):
                local_rank, local_size = seen.local_rank, seen.local_size
                break
    return Launch(
        name="default group",
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        why="torch's default process group is initialised",
    )


def is_behind_mpirun(environment: Mapping[str, str]) -> bool:
    """Return whether Open MPI started this process.

    Its ranks write to a terminal of their own, even where the output ends in a file.
    """
    return any(name.startswith("OMPI_COMM_WORLD_") for name in environment)


def gloo_devices(environment: Mapping[str, str], launch: Launch) -> tuple[dict[str, str], ...]:
    """Return arguments of gloo's network devices: the user's interfaces, or loopback on one host.

    An empty tuple leaves the choice to gloo, which resolves the host's name.
    """
    names = [name.strip() for name in environment.get("GLOO_SOCKET_IFNAME", "").split(",")]
    if any(names):
        return tuple({"interface": name} for name in names if name)
    return ({"hostname": "127.0.0.1"},) if launch.is_one_host else ()


def address_of_rank_0(environment: Mapping[str, str]) -> tuple[str, int] | None:
    """Return MASTER_ADDR and MASTER_PORT; None where one of them is missing.

    Raises:
        BackendError: the port is not a number from 1 to 65535.
    """
    host, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if not host or not port:
        return None
    number = _natural(port)
    if number is None or not 0 < number < 1 << 16:
        raise BackendError(
            f"MASTER_PORT={port!r} is not a port",
            because="all ranks meet at one port of rank 0's host, from 1 to 65535",
            hint="set it to a free port there, the same on all ranks",
        )
    return host, number


def _has_all(environment: Mapping[str, str], *names: str) -> bool:
    return all(name in environment for name in names)


def _first(environment: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in environment), None)


def _optional_number(environment: Mapping[str, str], name: str) -> int | None:
    return _number(environment, name) if name in environment else None


def _number(environment: Mapping[str, str], name: str) -> int:
    value = _natural(environment[name])
    if value is None or value > MOST_RANKS:
        raise BackendError(
            f"{name}={environment[name]!r} is not a number of ranks or a rank",
            because=f"the launcher sets it to an integer from 0 to {MOST_RANKS}",
            hint="unset it, or start the program with its launcher",
        )
    return value


def _natural(text: str) -> int | None:
    """Return the number that ASCII digits write, else None.

    `int` would also take digits of other scripts, signs and underscores.

    >>> _natural("07"), _natural("-1"), _natural("٣"), _natural("1_0")
    (7, None, None, None)
    """
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None
