"""Start a program in the processes that its placement names: one per GPU of each node.

    python scripts/launch.py scripts/train_sft.py --spec ... --placement '{"nodes": 2, ...}'

A node without GPUs has one process on its CPU. One process is plain Python; torchrun starts several
processes of a node. For several nodes, this program starts itself on each node as a step of its
Slurm job (srun). On Kubernetes, a PyTorchJob starts it on each node. In both cases the environment
has the number of the node (PET_NODE_RANK or RANK) and the address of the first one (PET_MASTER_ADDR
and PET_MASTER_PORT, or without PET_).

The placement's `environment` comes first: variables for the network of a cluster, such as
NCCL_SOCKET_IFNAME, or MASTER_ADDR for another address of the first node of a Slurm job. Variables
of the user's shell that change how libraries compute are removed before.

Options before the program are options of torchrun, which replace the placement.

Where the result exists already, for example because the inputs were rebuilt and came out the same,
no process is started: this program links it, within a second. Unless the result is kept, the
log of the last run, whose path is in SNAKECHAT_LOG, is emptied.

A training on GPUs whose placement has `auto` may run out of memory, or be killed for it. This
program stays, and starts its processes again with a placement that needs less memory
(snakechat/training/rungs.py). Several nodes learn of it from the folder of the checkpoints.

Each process reports its own errors, so that torchrun's stack traces are hidden. A process that was
killed cannot report anything: this program reports it.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from snakechat.training.rungs import Ladder, goes_down
from snakechat.workflow.environment import prepare_environment, set_threads
from snakechat.workflow.errors import InputError
from snakechat.workflow.gpus import claim_gpus
from snakechat.workflow.job import STATES, read_spec, reuse_result
from snakechat.workflow.placement import SERIAL, Placement, parse_options, parse_placement

# Variables that make a process part of a group.
GROUP_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Seconds that processes have to save a checkpoint after SIGTERM.
SHUTDOWN_TIMEOUT = 3600
# Seconds that a node waits, after its processes have failed, for another node to note why.
NODES_TIMEOUT = 60


def main() -> None:
    # Another launcher, which started this one, has prepared it.
    if STATES not in os.environ:
        prepare_environment()
    command = sys.argv[1:]
    if command[0].startswith("-"):
        run_torchrun(command)
        return
    placement = parse_placement(word_after("--placement", command, "{}"))
    options = parse_options(word_after("--options", command, "{}"))
    os.environ.update(placement.environment or {})
    nodes, gpus, threads = placement.nodes, placement.gpus_per_node, placement.threads
    # Snakemake lowers the threads of a job to --cores. The results of a model on the CPU depend on
    # their number: there, the placement decides.
    if gpus or placement is SERIAL:
        threads = int(os.environ.get("OMP_NUM_THREADS", threads))
    node_options = options_of_this_node(nodes)
    # Nodes that an operator of Kubernetes started have to decide the same.
    node = node_number() if nodes > 1 and node_options else None
    if "--spec" in command:
        spec = command[command.index("--spec") + 1]
        if reuse_result(spec, options, os.environ.get("SNAKECHAT_LOG"), node):
            return
    if nodes > 1 and node_options is None:
        become_slurm_step(nodes, gpus, threads)
    if gpus:
        claim_gpus(gpus)
        if not samples_by_vllm(command):
            # Blocks of memory grow in place: tensors of many sizes leave fewer gaps that are too
            # small for the next one. vLLM has memory pools that this does not work with.
            os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    processes = max(gpus, 1)
    ladder = ladder_of(command, placement)
    if nodes == 1 and processes == 1 and not ladder:
        for name in GROUP_VARIABLES:
            os.environ.pop(name, None)
        set_threads(threads)
        os.execv(sys.executable, [sys.executable, *command])
    set_threads(max(threads // processes, 1))
    # The option --shutdown-timeout of torchrun, as a variable: torch 2.11 has no such option, and
    # ends the processes 30 seconds after SIGTERM.
    os.environ["PET_SHUTDOWN_TIMEOUT"] = str(SHUTDOWN_TIMEOUT)
    words = [f"--nproc-per-node={processes}", *command]
    if ladder:
        sys.exit(run_on_rungs(ladder, nodes, words))
    run_torchrun([*group_options(nodes), *words])


def group_options(nodes: int, number: int = 0) -> list[str]:
    """Return torchrun's options for the group of all processes, which starts for the n-th time."""
    if nodes == 1:
        # torchrun chooses a free port.
        return ["--standalone"]
    return [f"--nnodes={nodes}", *(options_of_this_node(nodes, number) or ())]


def ladder_of(command: Sequence[str], placement: Placement) -> Ladder | None:
    """Return the ladder of a training that may go down, or None."""
    if not goes_down(placement) or "--spec" not in command:
        return None
    spec = read_spec(word_after("--spec", command, ""))
    if not spec["rule"].startswith("train_"):
        return None
    ladder = Ladder(Path(os.environ[STATES]), placement, spec["settings"]["dtype"])
    if ladder.is_trying:
        # The whole job was killed while it tried this rung, possibly for its memory.
        ladder.step_down()
    return ladder


def run_on_rungs(ladder: Ladder, nodes: int, words: Sequence[str]) -> int:
    """Run a training, again after each rung on which it ran out of memory; return its exit code."""
    signals: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def forward(number: int, _: FrameType | None) -> None:
        signals.append(number)
        if process:
            process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, forward)
    while True:
        started = ladder.number
        launcher = [sys.executable, sys.argv[0], *group_options(nodes, started), *words]
        process = subprocess.Popen(launcher, start_new_session=True)
        is_ending = False
        while process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(1)
            ladder.read()
            if ladder.number > started and not is_ending:
                # A process has noted the next rung; the others may wait for it.
                process.terminate()
                is_ending = True
        code = process.returncode
        if signals and ladder.is_trying:
            ladder.write(ladder.rung, ladder.number, is_tried=False, is_trying=False)
        if signals or code == 0:
            return code
        if code == 128 + signal.SIGKILL and ladder.is_trying and ladder.number == started:
            print(f"killed while it tried {ladder.rung}: trying with less memory", flush=True)
            ladder.step_down()
        for _ in range(NODES_TIMEOUT if nodes > 1 else 0):
            if ladder.number > started:
                break
            time.sleep(1)
            ladder.read()
        if ladder.number <= started:
            return code


def word_after(option: str, command: Sequence[str], default: str) -> str:
    """Return the value of an option of a command, or a default if it has no such option."""
    return command[command.index(option) + 1] if option in command else default


def samples_by_vllm(command: Sequence[str]) -> bool:
    """Return whether the command of a job samples responses by vLLM."""
    if "--spec" not in command:
        return False
    spec = read_spec(command[command.index("--spec") + 1])
    return spec["settings"].get("generation_backend") == "vllm"


def options_of_this_node(nodes: int, number: int = 0) -> list[str] | None:
    """Return torchrun's options for this node of several, or None if nothing started it as one.

    number: How many times the processes were started before. Each time has a port of its own.
    """
    started = os.environ.get("PET_NNODES", str(nodes))
    if started != str(nodes):
        sys.exit(
            f"error: the placement has {nodes} nodes and PET_NNODES is {started}: set both to the"
            " same number"
        )
    node = node_number()
    address = first_variable("PET_MASTER_ADDR", "MASTER_ADDR")
    port = first_variable("PET_MASTER_PORT", "MASTER_PORT")
    if node is None or address is None or port is None:
        return None
    port = str(int(port) + number)
    return [f"--node-rank={node}", f"--master-addr={address}", f"--master-port={port}"]


def node_number() -> int | None:
    """Return the number of this node among those that a cluster started, or None."""
    number = first_variable("PET_NODE_RANK", "RANK", "SLURM_NODEID")
    return None if number is None else int(number)


def first_variable(*names: str) -> str | None:
    """Return the value of the first environment variable that is set, or None."""
    return next((os.environ[name] for name in names if name in os.environ), None)


def become_slurm_step(nodes: int, gpus: int, threads: int) -> None:
    """Replace this process by a step of its Slurm job that starts this program on each node."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        sys.exit(
            f"error: the placement has {nodes} nodes and this is one: run it with --profile slurm,"
            " or on Kubernetes with scripts/kubernetes_job.py"
        )
    # The batch script of a Slurm job runs on its first node.
    port = str(free_port(20000 + int(job) % 10000))
    address = first_variable("PET_MASTER_ADDR", "MASTER_ADDR") or socket.gethostname()
    os.environ.update(PET_MASTER_ADDR=address, PET_MASTER_PORT=port)
    step = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", f"--cpus-per-task={threads}"]
    # A node that fails ends the others, which would wait for it.
    step += ["--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    step += [f"--gres=gpu:{gpus}"] if gpus else []
    os.execvp("srun", [*step, sys.executable, *sys.argv])


def free_port(first: int) -> int:
    """Return the first free port from this one on; concurrent jobs begin at different ports."""
    for port in range(first, first + 1000):
        with socket.socket() as candidate:
            try:
                candidate.bind(("", port))
            except OSError:
                continue
        return port
    sys.exit(f"error: no port between {first} and {first + 1000} is free")


def run_torchrun(arguments: list[str]) -> NoReturn:
    """Run a program in several processes of this node; exit with the code of the first failure."""
    code, line = end_of_processes(arguments)
    if line:
        print(line, file=sys.stderr)
    # Threads of torchrun's store now and then abort the interpreter while it shuts down.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def end_of_processes(arguments: list[str]) -> tuple[int, str | None]:
    """Run a program by torchrun; return the code to exit with, and what the program cannot say."""
    # Importing torch takes seconds.
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    logging.disable(logging.ERROR)
    try:
        run(parse_args(arguments))
    except SignalException as stopped:
        return 128 + stopped.sigval, None
    except ChildFailedError as error:
        # Of processes that end within a second, a killed one is the cause: it cannot say why.
        # Torchrun itself ends those that are left by SIGTERM.
        for rank, failure in error.failures.items():
            if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
                name = signal.Signals(-failure.exitcode).name
                return (
                    128 - failure.exitcode,
                    f"error: process {rank} of the job was ended by {name}",
                )
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode, None
    return 0, None


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(f"error: {error}")
