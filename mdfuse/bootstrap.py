"""Detect which launcher started this process, from its environment alone: no torch, no MPI."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mdfuse.errors import BackendError

#: The most ranks of a launch: a larger number is a mistake, and lists of ranks would not fit.
MOST_RANKS = 1 << 20

#: The variable by which `mdfuse launch` tells a process in a lost rank's place how many were there
#: before it.
RESPAWNED = "MDFUSE_RESPAWNED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The launch of this process.

    Attributes:
        name: "default group", "torchrun", "mpirun", "srun", "single", or "null" for a rank that
            nobody launched.
        rank: 0 <= rank < size.
        size: number of ranks.
        local_rank: the rank's number on its host; `rank` if the launcher does not tell.
        why: the evidence for the launcher, in words.
        local_size: ranks on this host; None if the launcher does not tell.
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
        """The other ranks, in the words of errors."""
        return "the other rank" if self.size == 2 else f"the other {self.size - 1} ranks"


def _nowhere(environment: Mapping[str, str]) -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """A launcher, by the environment variables in which it describes a launch.

    Attributes:
        name: as `Launch.name`.
        rank: the variable of the rank.
        sizes: variables of the number of ranks; the first one that is set counts.
        local_rank: the variable of the rank's number on its host.
        local_size: the variable of the number of ranks on this host; "" for none.
        nodes: variables of the number of hosts; on one host, all ranks are local.
        others: further variables that it always sets.
        excludes: whether it did not start this process, though the variables are set.
    """

    name: str
    rank: str
    sizes: tuple[str, ...]
    local_rank: str
    local_size: str = ""
    nodes: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    excludes: Callable[[Mapping[str, str]], bool] = _nowhere

    def is_present(self, environment: Mapping[str, str]) -> bool:
        """Return whether the variables are set, by this launcher."""
        is_set = all(name in environment for name in (self.rank, *self.others))
        has_size = _first(environment, self.sizes) is not None
        return is_set and has_size and not self.excludes(environment)

    def launch(self, environment: Mapping[str, str]) -> Launch:
        """Return the launch that the variables describe; only if `is_present`.

        Raises:
            BackendError: they contradict each other or are not numbers.
        """
        size = _first(environment, self.sizes)
        assert size is not None
        nodes = _first(environment, self.nodes)
        is_one_node = nodes is not None and _number(environment, nodes) == 1
        # on several nodes srun lists its tasks per node, which nothing needs
        local_size = size if is_one_node else self.local_size
        number, count = _number(environment, self.rank), _number(environment, size)
        local = _optional_number(environment, self.local_rank)
        on_host = _optional_number(environment, local_size)

        def check(is_right: bool, one: str, other: str, rule: str) -> None:
            if not is_right:
                raise BackendError(
                    f"{one}={environment[one]} does not fit {other}={environment[other]}",
                    because=rule,
                    hint=f"unset the variables, or start the program with {self.name}",
                )

        check(number < count, self.rank, size, "a rank is smaller than the number of ranks")
        if on_host is not None:
            rule = "this rank is on its host, and no host has more ranks than there are"
            check(0 < on_host <= count, local_size, size, rule)
        if local is not None:
            rule = "a rank's number on its host is smaller than the number of ranks there"
            limit = local_size if on_host else size
            check(local < (on_host or count), self.local_rank, limit, rule)
        return Launch(
            name=self.name,
            rank=number,
            size=count,
            local_rank=number if local is None else local,
            local_size=on_host,
            why=f"{self.rank}={number} and {size}={count} are set",
        )


def _is_sruns(environment: Mapping[str, str]) -> bool:
    """Return whether srun set the variables of Hydra, as it does with --mpi=pmi2.

    srun is preferred there, as it also tells the local rank. Below proxies that srun started,
    Slurm's numbers are those of the proxies, and differ.
    """
    pairs = (("PMI_RANK", "SLURM_PROCID"), ("PMI_SIZE", "SLURM_STEP_NUM_TASKS"))
    return all(environment[pmi] == environment.get(slurm) for pmi, slurm in pairs)


def _is_batch_script(environment: Mapping[str, str]) -> bool:
    """Return whether this process is a batch script of Slurm, and no task of a job step.

    A batch script has SLURM_PROCID=0 and SLURM_NTASKS=n without being one of n ranks. Only a job
    step has a step id.
    """
    return "SLURM_JOB_ID" in environment and "SLURM_STEP_ID" not in environment


#: torchrun, and every program that sets the variables of torch's own rendezvous
TORCHRUN = Launcher(
    name="torchrun",
    rank="RANK",
    sizes=("WORLD_SIZE",),
    local_rank="LOCAL_RANK",
    local_size="LOCAL_WORLD_SIZE",
    others=("MASTER_ADDR", "MASTER_PORT"),
)
#: mpirun of Open MPI, with ssh, Slurm or nothing below it
OPEN_MPI = Launcher(
    name="mpirun",
    rank="OMPI_COMM_WORLD_RANK",
    sizes=("OMPI_COMM_WORLD_SIZE",),
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
)
#: mpirun of MPICH and Intel MPI
HYDRA = Launcher(
    name="mpirun",
    rank="PMI_RANK",
    sizes=("PMI_SIZE",),
    local_rank="MPI_LOCALRANKID",
    local_size="MPI_LOCALNRANKS",
    excludes=_is_sruns,
)
#: a step of a Slurm job, with or without PMIx
SRUN = Launcher(
    name="srun",
    rank="SLURM_PROCID",
    sizes=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
    local_rank="SLURM_LOCALID",
    nodes=("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
    excludes=_is_batch_script,
)

#: All launchers in order of precedence, each with the reason for its place.
LAUNCHERS = (
    TORCHRUN,  # may itself have been started by srun or mpirun, one agent per host
    OPEN_MPI,  # inside a Slurm allocation it inherits SLURM_PROCID, so it goes before srun
    HYDRA,  # starts its ranks from a proxy that srun may have started
    SRUN,
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
