"""Which launcher is seen in which environment."""

from __future__ import annotations

import pytest

from mdfuse import bootstrap
from mdfuse.bootstrap import Launch, Launcher, address_of_rank_0, detect, gloo_devices
from mdfuse.errors import BackendError
from mdfuse.runtime.stores import open_store

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "29500",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
BATCH_SCRIPT = {
    "SLURM_JOB_ID": "17",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
}
SRUN = BATCH_SCRIPT | {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}

# As Slurm 22.05 sets them: rank 3 of `srun -N 2 --ntasks-per-node=2`, --mpi=none.
SLURM_22 = {
    "SLURM_JOB_ID": "3",
    "SLURM_JOB_NODELIST": "host[0-1]",
    "SLURM_LOCALID": "1",
    "SLURM_NNODES": "2",
    "SLURM_NPROCS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_PROCID": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "host[0-1]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
PMIX = {
    "SLURM_MPI_TYPE": "pmix",
    "PMIX_RANK": "3",
    "PMIX_NAMESPACE": "slurm.pmix.3.0",
    "PMIX_HOSTNAME": "host1",
    "SLURM_PMIX_MAPPING_SERV": "(vector,(0,2,2))",
}
PMI2 = {
    "SLURM_MPI_TYPE": "pmi2",
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "PMI_JOBID": "3.0",
    "PMI_FD": "13",
}
# mpirun's daemon is a step of one task on each other host.
MPIRUN_DAEMON = {
    "SLURM_JOB_ID": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "1",
    "SLURM_PROCID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
}


def _facts(launch: Launch) -> tuple[str, int, int, int, int | None]:
    return launch.name, launch.rank, launch.size, launch.local_rank, launch.local_size


@pytest.mark.parametrize(
    ("environment", "facts"),
    [
        pytest.param({}, ("single", 0, 1, 0, 1), id="nothing"),
        pytest.param(TORCHRUN, ("torchrun", 5, 8, 1, 4), id="torchrun"),
        pytest.param(OPEN_MPI, ("mpirun", 2, 4, 2, 4), id="open mpi"),
        pytest.param(HYDRA, ("mpirun", 1, 2, 0, 1), id="hydra"),
        pytest.param(SRUN, ("srun", 3, 4, 1, None), id="srun"),
        pytest.param(SRUN | {"SLURM_NNODES": "1"}, ("srun", 3, 4, 1, 4), id="srun, one node"),
        pytest.param(
            SRUN | {"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "1"},
            ("srun", 3, 8, 1, 8),
            id="a step smaller or larger than its job",
        ),
        pytest.param(
            {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, ("srun", 1, 2, 1, None), id="bare slurm"
        ),
        pytest.param(BATCH_SCRIPT, ("single", 0, 1, 0, 1), id="batch script"),
        pytest.param(TORCHRUN | OPEN_MPI, ("torchrun", 5, 8, 1, 4), id="torchrun under mpirun"),
        pytest.param(OPEN_MPI | SRUN, ("mpirun", 2, 4, 2, 4), id="mpirun under slurm"),
        pytest.param(HYDRA | SRUN, ("mpirun", 1, 2, 0, 1), id="hydra's proxy under srun"),
        pytest.param(SLURM_22, ("srun", 3, 4, 1, None), id="srun --mpi=none"),
        pytest.param(SLURM_22 | PMIX, ("srun", 3, 4, 1, None), id="srun --mpi=pmix"),
        pytest.param(SLURM_22 | PMI2, ("srun", 3, 4, 1, None), id="srun --mpi=pmi2"),
        pytest.param(TORCHRUN | SLURM_22, ("torchrun", 5, 8, 1, 4), id="torchrun under srun"),
        pytest.param(
            OPEN_MPI | MPIRUN_DAEMON, ("mpirun", 2, 4, 2, 4), id="mpirun in an allocation"
        ),
        pytest.param({"RANK": "3"}, ("single", 0, 1, 0, 1), id="RANK alone means nothing"),
        pytest.param(
            {"RANK": "3", "WORLD_SIZE": "4"}, ("single", 0, 1, 0, 1), id="no address, no torchrun"
        ),
        pytest.param(
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
            ("mpirun", 1, 2, 1, None),
            id="no local rank",
        ),
    ],
)
def test_launcher(
    environment: dict[str, str], facts: tuple[str, int, int, int, int | None]
) -> None:
    assert _facts(detect(environment)) == facts


@pytest.mark.parametrize(
    ("launcher", "environment", "needed", "facts"),
    [
        (
            bootstrap.TORCHRUN,
            TORCHRUN,
            ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
            ("torchrun", 5, 8, 1, 4),
        ),
        (
            bootstrap.OPEN_MPI,
            OPEN_MPI,
            ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
            ("mpirun", 2, 4, 2, 4),
        ),
        (bootstrap.HYDRA, HYDRA, ("PMI_RANK", "PMI_SIZE"), ("mpirun", 1, 2, 0, 1)),
        (
            bootstrap.SRUN,
            SRUN,
            ("SLURM_PROCID", "SLURM_STEP_ID", "SLURM_NTASKS"),
            ("srun", 3, 4, 1, None),
        ),
    ],
    ids=lambda x: x.rank if isinstance(x, Launcher) else "",
)
def test_each_launcher_by_itself(
    launcher: Launcher,
    environment: dict[str, str],
    needed: tuple[str, ...],
    facts: tuple[str, int, int, int, int | None],
) -> None:
    """It knows its own environment, no other one, and not its own with a variable missing."""
    assert launcher.is_present(environment)
    assert _facts(launcher.launch(environment)) == facts
    assert not launcher.is_present({})
    for name in needed:
        assert not launcher.is_present({k: v for k, v in environment.items() if k != name}), name
    others = [e for e in (TORCHRUN, OPEN_MPI, HYDRA, SRUN) if e is not environment]
    assert not any(launcher.is_present(other) for other in others)


def test_the_default_group_goes_first_and_borrows_the_local_rank() -> None:
    assert _facts(detect(TORCHRUN, (5, 8))) == ("default group", 5, 8, 1, 4)
    assert _facts(detect(OPEN_MPI, (3, 4))) == ("default group", 3, 4, 3, None)
    assert _facts(detect({}, (1, 2))) == ("default group", 1, 2, 1, None)


def test_why_names_what_was_seen() -> None:
    assert detect(OPEN_MPI).why == "OMPI_COMM_WORLD_RANK=2 and OMPI_COMM_WORLD_SIZE=4 are set"
    assert detect({}).why == "no launcher set its variables"


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "two"}, "OMPI_COMM_WORLD_RANK='two'"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "-1"}, "OMPI_COMM_WORLD_RANK='-1'"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK=2 does not fit"),
        (TORCHRUN | {"WORLD_SIZE": ""}, "WORLD_SIZE=''"),
        ({"PMIX_RANK": "1"}, "PMIX_RANK=1 is set, but not the number of ranks"),
        (TORCHRUN | {"RANK": "٣"}, "RANK='٣' is not a number of ranks or a rank"),
        (TORCHRUN | {"RANK": "1_0", "WORLD_SIZE": "16"}, "RANK='1_0'"),
        (TORCHRUN | {"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE='999"),
        (TORCHRUN | {"WORLD_SIZE": str((1 << 20) + 1)}, "WORLD_SIZE='1048577' is not a number"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "LOCAL_RANK=4 does not fit LOCAL_WORLD_SIZE=4"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9 does not fit WORLD_SIZE=8"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE=0 does not fit"),
        (SRUN | {"SLURM_LOCALID": "4"}, "SLURM_LOCALID=4 does not fit SLURM_NTASKS=4"),
        (SRUN | {"SLURM_NNODES": "two"}, "SLURM_NNODES='two'"),
    ],
)
def test_contradictions_are_errors(environment: dict[str, str], message: str) -> None:
    with pytest.raises(BackendError, match=message):
        detect(environment)


@pytest.mark.parametrize("port", ["0", "65536", "²", "a", "-1", "1 2"])
def test_a_port_that_is_none(port: str) -> None:
    with pytest.raises(BackendError, match=f"MASTER_PORT='{port}' is not a port"):
        address_of_rank_0({"MASTER_ADDR": "host", "MASTER_PORT": port})
    launch = detect(TORCHRUN | {"MASTER_PORT": port})
    with pytest.raises(BackendError, match="is not a port"):
        open_store(launch, 1.0, {"MASTER_ADDR": "host", "MASTER_PORT": port})


def test_where_rank_0_is() -> None:
    assert address_of_rank_0(TORCHRUN) == ("host", 29500)
    assert address_of_rank_0(TORCHRUN | {"MASTER_ADDR": ""}) is None
    with pytest.raises(BackendError, match="does not know where rank 0 is"):
        open_store(detect(TORCHRUN | {"MASTER_ADDR": ""}), 1.0, {"MASTER_PORT": "29500"})


def test_empty_interfaces_are_none() -> None:
    assert gloo_devices({"GLOO_SOCKET_IFNAME": ", "}, detect(TORCHRUN)) == ()
    assert gloo_devices({"GLOO_SOCKET_IFNAME": "eth0,"}, detect({})) == ({"interface": "eth0"},)


def test_gloo_uses_loopback_on_one_host_unless_told_otherwise() -> None:
    assert gloo_devices({}, detect(OPEN_MPI)) == ({"hostname": "127.0.0.1"},)
    assert gloo_devices({}, detect(TORCHRUN)) == ()
    assert gloo_devices({"GLOO_SOCKET_IFNAME": "eth0, eth1"}, detect(OPEN_MPI)) == (
        {"interface": "eth0"},
        {"interface": "eth1"},
    )
