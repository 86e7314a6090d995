"""Which launcher started this process, from its environment alone: no torch, no MPI."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mdfuse.errors import BackendError


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How this process was started.

    Attributes:
        name: "default group", "torchrun", "mpirun", "srun", "single", or "null" where nobody
            launched this rank.
        rank: 0 <= rank < size.
        size: number of ranks.
        local_rank: the rank's number on its host; `rank` where the launcher does not tell.
        why: what was seen that decided it.
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
        """Whether all ranks are known to be on one host."""
        return self.local_size == self.size


def _nothing(environment: Mapping[str, str]) -> int | None:
    return None


def _slurm_local_size(environment: Mapping[str, str]) -> int | None:
    """Tasks of a step of one node; the per-node counts of larger steps are not needed."""
    nodes = _first(environment, ("SLURM_STEP_NUM_NODES", "SLURM_NNODES"))
    tasks = _first(environment, _SLURM_SIZES)
    return _number(environment, tasks) if nodes and tasks and environment[nodes] == "1" else None


_SLURM_SIZES = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """The variables by which a launcher tells a process who it is.

    Attributes:
        name: the name that `Launch.name` takes.
        rank: the variable that holds the rank.
        size: variables that may hold the number of ranks; the first that is set counts.
        local_rank: likewise for the rank on this host.
        local_size: likewise for the number of ranks on this host.
        needs: variables without which the others mean nothing.
        needs_beside: (a, b): where `a` is set, `b` must be too.
        count_local: finds the ranks on this host where no variable of `local_size` is set.
    """

    name: str
    rank: str
    size: tuple[str, ...]
    local_rank: str
    local_size: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    needs_beside: tuple[str, str] | None = None
    count_local: Callable[[Mapping[str, str]], int | None] = _nothing

    def is_present(self, environment: Mapping[str, str]) -> bool:
        needed = (self.rank, *self.needs)
        if self.needs_beside and self.needs_beside[0] in environment:
            needed += self.needs_beside[1:]
        return all(v in environment for v in needed) and bool(_first(environment, self.size))

    def launch(self, environment: Mapping[str, str]) -> Launch:
        size_name = _first(environment, self.size)
        assert size_name is not None
        rank, size = _number(environment, self.rank), _number(environment, size_name)
        if rank >= size:
            raise BackendError(
                f"{self.rank}={rank} does not fit {size_name}={size}",
                because="a rank is smaller than the number of ranks",
                hint=f"unset the variables, or start the program with {self.name}",
            )
        local = _number(environment, self.local_rank) if self.local_rank in environment else rank
        local_size = _first(environment, self.local_size)
        return Launch(
            name=self.name,
            rank=rank,
            size=size,
            local_rank=local,
            local_size=_number(environment, local_size)
            if local_size
            else self.count_local(environment),
            why=f"{self.rank}={rank} and {size_name}={size} are set",
        )


#: In order of precedence, each row with the reason why it stands there.
LAUNCHERS: tuple[Launcher, ...] = (
    # torchrun may itself have been started by srun or mpirun, one agent per host
    Launcher(
        name="torchrun",
        rank="RANK",
        size=("WORLD_SIZE",),
        local_rank="LOCAL_RANK",
        local_size=("LOCAL_WORLD_SIZE",),
        needs=("MASTER_ADDR", "MASTER_PORT"),
    ),
    # mpirun inside a Slurm allocation inherits SLURM_PROCID, so it goes before srun
    Launcher(
        name="mpirun",
        rank="OMPI_COMM_WORLD_RANK",
        size=("OMPI_COMM_WORLD_SIZE",),
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    # Hydra (MPICH, Intel MPI) starts its ranks from a proxy that srun may have started
    Launcher(
        name="mpirun",
        rank="PMI_RANK",
        size=("PMI_SIZE",),
        local_rank="MPI_LOCALRANKID",
        local_size=("MPI_LOCALNRANKS",),
    ),
    # a batch script has SLURM_PROCID=0 and SLURM_NTASKS=n without being one of n ranks:
    # only a job step (srun) has a step id
    Launcher(
        name="srun",
        rank="SLURM_PROCID",
        size=_SLURM_SIZES,
        local_rank="SLURM_LOCALID",
        needs_beside=("SLURM_JOB_ID", "SLURM_STEP_ID"),
        count_local=_slurm_local_size,
    ),
)


def detect(environment: Mapping[str, str], default_group: tuple[int, int] | None = None) -> Launch:
    """Say which launcher started this process.

    Args:
        environment: the process's environment variables.
        default_group: (rank, size) of torch's default process group where one exists; it goes
            before everything else.

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
    """The default group's launch, with the local rank of the launcher that agrees with it."""
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


def gloo_devices(environment: Mapping[str, str], launch: Launch) -> tuple[dict[str, str], ...]:
    """Arguments of gloo's network devices: the user's interfaces, loopback on one host, or none.

    An empty tuple leaves the choice to gloo, which resolves the host's name.
    """
    names = environment.get("GLOO_SOCKET_IFNAME", "")
    if names:
        return tuple({"interface": name.strip()} for name in names.split(","))
    return ({"hostname": "127.0.0.1"},) if launch.is_one_host else ()


def _first(environment: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in environment), None)


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        value = int(environment[name])
    except ValueError:
        value = -1
    if value < 0:
        raise BackendError(
            f"{name}={environment[name]!r} is not a number of ranks or a rank",
            because="the launcher sets it to an integer that is not negative",
            hint="unset it, or start the program with its launcher",
        )
    return value
