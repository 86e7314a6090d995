"""What the ranks of `test_faults.py` run; arguments: a fault, when it befalls, and which rank."""

import os
import signal
import sys
import threading
import time

import torch

import mdfuse as mf

fault, moment, guilty = sys.argv[1:4]
comm = mf.init()
mesh = mf.DeviceMesh([0, 1, 2])
#: Rows of each rank: so many that no rank can send all of them ahead.
ROWS = 1 << 18


def program(name, *, with_sum=False):
    with mf.FusionDefinition(name) as fd:
        x = fd.define_tensor([3 * ROWS], mesh=mesh, layout={"x": mf.Shard(0)})
        y = fd.ops.sum(x, dims=[0]) if with_sum else x
        fd.add_output(fd.ops.set(y).on(mesh, {}))  # the line
    return mf.compile(fd)


gather, total = program("gather"), program("total", with_sum=True)
x = torch.ones(ROWS)
DEEDS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "sleep": lambda: time.sleep(600),
    "raise": lambda: 1 / 0,
    "leave": sys.exit,
    "other": lambda: total.run(x),
    "refuse": lambda: refuse(),
}


def refuse():
    try:
        gather.run(torch.ones(5))
    except mf.ProgramError:
        print("refused")
    time.sleep(600)


def do_it():
    open("fault", "w").close()
    DEEDS[fault]()


def is_here(when):
    return moment == when and comm.rank == int(guilty)


comm.barrier()
if is_here("before"):
    do_it()
for _ in range(2):
    gather.run(x)
    if moment == "after":
        total.run(x)
if is_here("in"):
    threading.Timer(0.5, do_it).start()
if is_here("after"):
    do_it()
if moment == "in" and comm.rank != int(guilty):
    time.sleep(1)  # a rank that came sooner would have all it needs of the guilty one, on MPI
gather.run(x)
sys.exit("it ran on")
