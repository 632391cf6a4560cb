"""The start of every program that a placement has several processes or GPUs for, wherever it runs.

    python scripts/launch.py scripts/train_sft.py --spec ... --placement '{"nodes": 2, ...}'

Each GPU of each node has a process, a node without has one on its CPU. One process is plain Python,
those of a node are torchrun's. Several nodes are a step of the Slurm job that this runs in (srun),
in which this program starts again on each. Kubernetes (a PyTorchJob or TrainJob) starts it on each
node by itself; there as here the environment tells a node its number (PET_NODE_RANK or RANK), and
where the first one is (PET_MASTER_ADDR, PET_MASTER_PORT, or without PET_).

Options before the program are torchrun's, and hold instead of the placement.

The processes say themselves what is wrong; torchrun would bury it under its own stack. Only of one
that was killed nothing is heard: that is told here.
"""

import json
import logging
import os
import signal
import socket
import sys

from snakechat.workflow.gpus import GpusBusy, claim_gpus

# What tells a process that it is one of a group.
GROUP = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Seconds that processes have to save when they are asked to stop.
TO_SAVE = 3600


def main():
    # A thread that waits for another spins for some tenths of a millisecond, by when the next
    # operation is mostly there, and then sleeps: it would keep others from the cores they need.
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    command = sys.argv[1:]
    if command[0].startswith("-"):
        torchrun(command)
        return
    where = json.loads(command[command.index("--placement") + 1])
    nodes, gpus = where["nodes"], where["gpus_per_node"]
    # Snakemake gives a job fewer where there are fewer.
    threads = int(os.environ.get("OMP_NUM_THREADS", where["threads"]))
    node = node_of_group(nodes)
    if nodes > 1 and node is None:
        start_step(nodes, gpus, threads)
    if gpus:
        claim_gpus(gpus)
    if nodes == 1 and gpus < 2:
        for name in GROUP:
            os.environ.pop(name, None)
        os.execv(sys.executable, [sys.executable, *command])
    processes = max(gpus, 1)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(max(threads // processes, 1))
    # By itself it finds a port that nobody has.
    place = ["--standalone"] if nodes == 1 else [f"--nnodes={nodes}", *node]
    options = [f"--nproc-per-node={processes}", f"--shutdown-timeout={TO_SAVE}"]
    torchrun([*place, *options, *command])


def node_of_group(nodes):
    """torchrun's options for this node where something started it as one of several, or None."""
    told = os.environ.get("PET_NNODES", str(nodes))
    if told != str(nodes):
        sys.exit(f"error: placement asks for {nodes} nodes and PET_NNODES is {told}: make them one")
    number = first_of("PET_NODE_RANK", "RANK", "SLURM_NODEID")
    address = first_of("PET_MASTER_ADDR", "MASTER_ADDR")
    port = first_of("PET_MASTER_PORT", "MASTER_PORT")
    if None in (number, address, port):
        return None
    return [f"--node-rank={number}", f"--master-addr={address}", f"--master-port={port}"]


def first_of(*names):
    """The first variable of the environment that is set; None if none is."""
    return next((os.environ[name] for name in names if name in os.environ), None)


def start_step(nodes, gpus, threads):
    """Become a step of this Slurm job, which starts this program again on each of its nodes."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        sys.exit(
            f"error: placement asks for {nodes} nodes and this is one: run it with --profile slurm,"
            " or on Kubernetes by scripts/kubernetes_job.py"
        )
    # The shell of a job runs on the first of its nodes.
    port = str(free_port(20000 + int(job) % 10000))
    os.environ.update(PET_MASTER_ADDR=socket.gethostname(), PET_MASTER_PORT=port)
    step = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", f"--cpus-per-task={threads}"]
    # One that fails ends the others, which would wait for it.
    step += ["--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    step += [f"--gres=gpu:{gpus}"] if gpus else []
    os.execvp("srun", [*step, sys.executable, *sys.argv])


def free_port(first):
    """The first port from this one on that nobody has. Jobs beside each other begin apart."""
    for port in range(first, first + 1000):
        with socket.socket() as free:
            try:
                free.bind(("", port))
            except OSError:
                continue
        return port
    sys.exit(f"error: no port between {first} and {first + 1000} is free")


def torchrun(words):
    """Run a program in several processes of this node; exits as they do."""
    # Only here: it takes seconds.
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    logging.disable(logging.ERROR)
    try:
        run(parse_args(words))
    except SignalException as stopped:
        sys.exit(128 + stopped.sigval)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:
            sys.exit(failure.exitcode)
        name = signal.Signals(-failure.exitcode).name
        sys.exit(f"error: process {rank} of the job was ended by {name}")


if __name__ == "__main__":
    try:
        main()
    except GpusBusy as busy:
        sys.exit(f"error: {busy}")
