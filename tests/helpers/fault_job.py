"""What the ranks of `test_faults.py` run; arguments: a fault, when it befalls, and which rank."""

import os
import signal
import sys
import threading
import time
import types

import torch

import mdfuse as mf
from mdfuse.backends.mpi import mpi_library as mpi_library
from mdfuse.plan import inductor
from mdfuse.runtime import opening

fault, moment, guilty = sys.argv[1:4]
if fault == "fork":  # a fault of nobody: all end well, however long the child takes to go
    os.environ["MDFUSE_TIMEOUT_S"] = "60"


def do_it():
    with open("fault.new", "w") as file:
        file.write(str(os.getpid()))
    os.rename("fault.new", "fault")
    DEEDS[fault]()


def await_it():
    """Return once the guilty rank has done it: who came sooner might have all it needs of it."""
    while not os.path.exists("fault"):
        time.sleep(0.01)
    with open("fault") as file:
        process = file.read()
    while fault in ("stop", "kill") and state(process) not in ("T", "Z", None):
        time.sleep(0.01)


def state(process):
    """As the kernel says it: T is stopped, Z dead; None: gone."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(") ")[2][0]
    except FileNotFoundError:
        return None


def is_here(when):
    return moment == when and int(guilty) == RANK


def opened(*arguments):
    store = open_store(*arguments)
    do_it()
    return store


RANK = int(os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))
DEEDS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "sleep": lambda: time.sleep(600),
    "raise": lambda: 1 / 0,
    "leave": sys.exit,
    "other": lambda: total.run(x),
    "refuse": lambda: refuse(),
    "fork": lambda: fork(),
    "threads": lambda: time.sleep(1),  # the others are two each by then
    "compile": lambda: run_compiled(),
}
if is_here("join"):
    do_it()
if is_here("opened"):
    open_store, opening.open_store = opening.open_store, opened
if is_here("MPI_Init"):
    stand_in = types.SimpleNamespace(MPI_Init_thread=lambda *_: do_it())
    mpi_library._linked = lambda mpi: stand_in
comm = mf.init()
mesh = mf.DeviceMesh([0, 1, 2])
#: Seconds in which a rank surely gives a first sign of life: the others know then where it was.
SIGN_S = 1.0
#: Rows of each rank: so many that no rank can send all of them ahead.
ROWS = 1 << 20


def program(name, *, with_sum=False):
    with mf.FusionDefinition(name) as fd:
        x = fd.define_tensor([3 * ROWS], mesh=mesh, layout={"x": mf.Shard(0)})
        y = fd.ops.sum(x, dims=[0]) if with_sum else x
        fd.add_output(fd.ops.set(y).on(mesh, {}))  # the line
    return mf.compile(fd)


gather, total = program("gather"), program("total", with_sum=True)
x = torch.ones(ROWS, device=comm.device)


def refuse():
    try:
        gather.run(torch.ones(5))
    except mf.ProgramError:
        print("refused")
    time.sleep(600)


def fork():
    """A child that does what its parent does, and ends as a process does."""
    child = os.fork()
    if not child:
        for attempt in (lambda: gather.run(x), comm.barrier, mf.init):
            try:
                attempt()
            except mf.BackendError as error:
                print(error)
        sys.exit()
    assert os.waitpid(child, 0) == (child, 0)


def run_compiled():
    """Run a program whose launch the guilty rank compiles for ten minutes, the others at once."""
    inductor.folder = lambda: None  # nobody waits for the files of another rank
    inductor.compiled = lambda found: (is_here(moment) and time.sleep(600)) or found.graph
    with mf.FusionDefinition("waves") as fd:
        y = fd.define_tensor([3 * ROWS], mesh=mesh, layout={"x": mf.Shard(0)}).sin() * 0.5
        fd.add_output(fd.ops.set(y.exp()).on(mesh, {}))
    mf.compile(fd, mf.Options(compile="always")).run(x)


def run_in_threads():
    """Two programs at once, on one rank in another order."""
    here = [gather, total] if comm.rank != int(guilty) else [total, gather]
    threads = [threading.Thread(target=program.run, args=(x,)) for program in here]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.exit("both are over")


comm.barrier()
if is_here("before"):
    do_it()
if fault == "threads":
    run_in_threads()
if fault == "compile":
    run_compiled()
for _ in range(2):
    gather.run(x)
    if moment == "after":
        total.run(x)
if is_here("in"):
    threading.Timer(0.5, do_it).start()
if is_here("after"):
    time.sleep(SIGN_S)
    do_it()
if moment == "in" and comm.rank != int(guilty):
    await_it()
gather.run(x)
if x.is_cuda:  # the third run replays a graph, and the host goes on
    torch.cuda.synchronize()
if moment not in ("after", "close", "MPI_Finalize") or fault not in ("fork", "stop", "sleep"):
    sys.exit("it ran on")
if is_here("close"):
    do_it()
if moment == "close":
    await_it()
if is_here("MPI_Finalize"):
    mpi_library._linked = lambda mpi: types.SimpleNamespace(MPI_Finalize=do_it)
