"""Start a program in the processes that its placement names: one per GPU of each node.

    python scripts/launch.py scripts/train_sft.py --spec ... --placement '{"nodes": 2, ...}'

A node without GPUs has one process on its CPU. One process is plain Python; torchrun starts several
processes of a node. For several nodes, this program starts itself on each node as a step of its
Slurm job (srun). On Kubernetes, a PyTorchJob starts it on each node. In both cases the environment
has the number of the node (PET_NODE_RANK or RANK) and the address of the first one (PET_MASTER_ADDR
and PET_MASTER_PORT, or without PET_).

The placement's `environment` comes first: variables for the network of a cluster, such as
NCCL_SOCKET_IFNAME, or MASTER_ADDR for another address of the first node of a Slurm job. Variables
of the user's shell that change how libraries compute are removed before. Options before the program
are options of torchrun, which replace the placement.

This program locks the job, and completes and publishes what its program wrote
(snakechat.workflow.publishing). A result that exists already is linked, and no process is started.
Otherwise the log of the last run, whose path is in SNAKECHAT_LOG, is emptied. Processes run within
the limits of their job (scripts/confined.py).

A training on GPUs whose placement has `auto` may run out of memory, or be killed for it. This
program stays, and starts its processes again with a placement that needs less memory
(snakechat/training/rungs.py). Several nodes learn of it from the folder of the checkpoints.

Each process reports its own errors, so that torchrun's stack traces are hidden. A process that was
killed cannot report anything: this program reports it.
"""

import fcntl
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from snakechat.training.rungs import Ladder, goes_down
from snakechat.workflow.code_digests import selected_code
from snakechat.workflow.commands import child_process, exit_code
from snakechat.workflow.errors import InputError, one_line_errors
from snakechat.workflow.hermetic import LIMITS, external_files, hub_folder
from snakechat.workflow.job import PREPARED, READING, STATES, read_spec, report_errors
from snakechat.workflow.manifest import planned_files
from snakechat.workflow.processes import (
    SERIAL,
    Placement,
    parse_options,
    parse_placement,
    prepare_environment,
    set_threads,
)
from snakechat.workflow.publishing import prepare, publish_result
from snakechat.workflow.store import AlreadyLocked, acquire_lock

# Variables that make a process part of a group.
GROUP_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Seconds that processes have to save a checkpoint after SIGTERM.
SHUTDOWN_TIMEOUT = 3600
# Seconds that a node waits, after its processes have failed, for another node to note why.
NODES_TIMEOUT = 60


@one_line_errors()
def main() -> None:
    # Another launcher, which started this one, has prepared it.
    if STATES not in os.environ:
        prepare_environment()
        # Commands of users, and jobs with limits, have another home.
        os.environ["HF_HOME"] = hub_folder()
    start = next(index for index, word in enumerate(sys.argv) if index and word[0] != "-")
    group, command = sys.argv[1:start], sys.argv[start:]
    spec_file = word_after("--spec", command, "")
    # Another launcher has prepared the job and publishes its result.
    is_inner = not spec_file or PREPARED in os.environ
    if group and is_inner:
        run_torchrun([*group, *command])
    placement = parse_placement(word_after("--placement", command, "{}"))
    options = parse_options(word_after("--options", command, "{}"))
    os.environ.update(placement.environment or {})
    # torchrun's options replace the placement.
    nodes = 1 if group else placement.nodes
    is_node = bool(group) or options_of_this_node() is not None or nodes == 1

    def launch() -> int:
        if not is_node:
            return run(slurm_step(placement))[0]
        return run_processes(command, placement, group)

    if is_inner:
        sys.exit(launch())
    connects = bool(group) or placement.num_processes > 1
    # Nodes that an operator of Kubernetes started have to decide the same.
    node = node_number() if nodes > 1 and is_node else None

    def make_result() -> int:
        started = time.time()
        job = prepare(spec_file, command[0], placement, options, connects, node)
        if job is None:
            return 0
        # A command of a user reads copies of its files.
        is_apart = node or "command" in job.spec["settings"]
        with planned_files({} if is_apart else external_files(job)):
            code = launch()
        if code == 0 and not node:
            publish_result(job, started)
        return code

    sys.exit(report_errors(make_result, spec_file))


def run_processes(command: Sequence[str], placement: Placement, group: Sequence[str]) -> int:
    """Run a program in the processes of this node; return the code to exit with.

    group: torchrun's options, which replace the placement.
    """
    nodes, gpus, threads = placement.nodes, placement.gpus_per_node, placement.threads
    # Snakemake lowers the threads of a job to --cores. The results of a model on the CPU depend on
    # their number: there, the placement decides.
    if gpus or placement == SERIAL:
        threads = int(os.environ.get("OMP_NUM_THREADS", threads))
    spec_file = word_after("--spec", command, "")
    spec: dict[str, Any] = {"rule": "", "settings": {}}
    spec |= read_spec(spec_file) if spec_file else {}
    if gpus:
        claim_gpus(gpus)
        if not selected_code(spec["settings"])[1]:
            # Blocks of memory grow in place: tensors of many sizes leave fewer gaps that are too
            # small for the next one. vLLM has memory pools that this does not work with.
            os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # The command of a user starts its own processes.
    is_command = "command" in spec["settings"]
    processes = 1 if is_command else max(gpus, 1)
    ladder = None if is_command else ladder_of(spec, placement)
    set_threads(max(threads // processes, 1))
    # The option --shutdown-timeout of torchrun, as a variable: torch 2.11 has no such option, and
    # ends the processes 30 seconds after SIGTERM.
    os.environ["PET_SHUTDOWN_TIMEOUT"] = str(SHUTDOWN_TIMEOUT)
    torchrun = [sys.executable, sys.argv[0]]
    # The program has a folder of its own for its temporary files and caches.
    with tempfile.TemporaryDirectory(prefix="snakechat-", ignore_cleanup_errors=True) as folder:
        words = list(command)
        if limits := os.environ.get(LIMITS):
            words = [str(Path(__file__).with_name("confined.py")), limits, folder, *words]
        if group:
            return run([*torchrun, *group, *words])[0]
        of_node = [f"--nproc-per-node={processes}", *words]
        if ladder:
            return run_on_rungs(ladder, nodes, torchrun, of_node)
        if nodes * processes > 1 and not is_command:
            return run([*torchrun, *group_options(nodes), *of_node])[0]
        if nodes > 1:
            prepare_node(nodes)
        else:
            for name in GROUP_VARIABLES:
                os.environ.pop(name, None)
        code, is_signalled = run([sys.executable, *words])
    if code > 128 and not is_signalled:
        print(f"error: {describe_kill(command[0], code - 128)}", file=sys.stderr)
    return code


def claim_gpus(number: int) -> None:
    """Reserve GPUs for this process and those that it starts; set CUDA_VISIBLE_DEVICES.

    Snakemake counts GPUs but does not say which ones a job may use. Each job locks the GPUs that it
    uses, by files in a folder of the user under the temporary directory. Does nothing if the
    machine has fewer GPUs: the program that needs them reports that. Raises InputError if other
    jobs use too many of the GPUs.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        # Importing torch takes seconds.
        import torch

        visible = ",".join(map(str, range(torch.cuda.device_count())))
    devices = [device for device in visible.replace(" ", "").split(",") if device]
    slurm_job = os.environ.get("SLURM_JOB_ID")
    # Slurm assigns each job its GPUs. In an interactive job with more of them, several of our jobs
    # may run at once.
    if len(devices) < number or (slurm_job and len(devices) == number):
        return
    names = ["snakechat", str(os.getuid()), *([slurm_job] if slurm_job else [])]
    folder = Path(tempfile.gettempdir(), "-".join(names))
    folder.mkdir(mode=0o700, exist_ok=True)
    claimed: list[str] = []
    # One job claims at a time: if two jobs each held half of the GPUs, neither could start.
    with open(folder / "choice.lock", "w") as choice:
        fcntl.flock(choice, fcntl.LOCK_EX)
        for device in devices:
            with suppress(AlreadyLocked):
                if len(claimed) < number:
                    acquire_lock(folder / f"{device.replace('/', '-')}.lock")
                    claimed.append(device)
    if len(claimed) < number:
        raise InputError(
            f"{len(claimed)} of {len(devices)} GPUs are free and this job needs {number}: start"
            f" Snakemake with --resources gpu={len(devices)}, so that it counts them"
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(claimed)


def describe_kill(program: str, number: int) -> str:
    """Describe in one line that a signal ended the only process of a job."""
    name, program = signal.Signals(number).name, Path(program).name
    if number == signal.SIGPROF:
        return (
            f"{program}: a chat template, or a regular expression of tokenizer.json, did not end:"
            " replace it in the tokenizer's files"
        )
    reading = Path(os.environ.get(STATES, ""), READING)
    if reading.is_file():
        return (
            f"{reading.read_text()}: {name} ended the process that reads: the file is damaged, or"
            " the memory is full"
        )
    return f"{program} was ended by {name}"


def group_options(nodes: int, number: int = 0) -> list[str]:
    """Return torchrun's options for the group of all processes, which starts for the n-th time."""
    if nodes == 1:
        # torchrun chooses a free port.
        return ["--standalone"]
    return [f"--nnodes={nodes}", *(options_of_this_node(number) or ())]


def ladder_of(spec: Mapping[str, Any], placement: Placement) -> Ladder | None:
    """Return the ladder of a job if it is a training that may go down, or None."""
    if not goes_down(placement) or not spec["rule"].startswith("train_"):
        return None
    ladder = Ladder(Path(os.environ[STATES]), placement, spec["settings"]["dtype"])
    if ladder.state == "trying":
        # The whole job was killed while it tried this rung, possibly for its memory.
        ladder.go_down()
    return ladder


def run_on_rungs(ladder: Ladder, nodes: int, torchrun: Sequence[str], words: Sequence[str]) -> int:
    """Run a training, again after each rung on which it ran out of memory; return its exit code."""
    while True:
        started = ladder.number

        def is_stepping_down(started: int = started) -> bool:
            ladder.read()
            return ladder.number > started

        launcher = [*torchrun, *group_options(nodes, started), *words]
        # A process has noted the next rung; the others may wait for it.
        code, is_signalled = run(launcher, is_stepping_down)
        ladder.read()
        is_trying = ladder.state == "trying"
        if is_signalled and is_trying:
            ladder.note("open")
        if is_signalled or code == 0:
            return code
        if code == 128 + signal.SIGKILL and is_trying and ladder.number == started:
            print(f"killed while it tried {ladder.rung}: trying with less memory", flush=True)
            ladder.go_down()
        for _ in range(NODES_TIMEOUT if nodes > 1 else 0):
            if is_stepping_down():
                break
            time.sleep(1)
        if ladder.number <= started:
            return code


def run(command: Sequence[str], should_end: Callable[[], bool] | None = None) -> tuple[int, bool]:
    """Run a command; return the code to exit with, and whether it got a signal of this process.

    It has a session of its own, so that a Ctrl-C reaches it once. It inherits the lock of the job,
    and ends with this process.

    should_end: Called every second; the command gets SIGTERM once it returns True.
    """
    with child_process(command, start_new_session=True) as (process, received):
        while process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(1 if should_end else None)
            if should_end and should_end():
                process.terminate()
                should_end = None
    return exit_code(process), bool(received)


def word_after(option: str, command: Sequence[str], default: str) -> str:
    """Return the value of an option of a command, or a default if it has no such option."""
    return command[command.index(option) + 1] if option in command else default


def prepare_node(nodes: int) -> None:
    """Set the variables by which torchrun, in the command of a user, finds the other nodes."""
    node = str(node_number())
    os.environ.update(PET_NNODES=str(nodes), PET_NODE_RANK=node)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        os.environ[f"PET_{name}"] = first_variable(f"PET_{name}", name) or ""
        os.environ.pop(name, None)
    # The first node completes the result.
    os.environ["RANK"] = node


def options_of_this_node(number: int = 0) -> list[str] | None:
    """Return torchrun's options for this node of several, or None if nothing started it as one.

    number: How many times the processes were started before. Each time has a port of its own.
    """
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


def slurm_step(placement: Placement) -> list[str]:
    """Return the command of a step of this Slurm job that starts this program on each node."""
    job, nodes, gpus = os.environ.get("SLURM_JOB_ID"), placement.nodes, placement.gpus_per_node
    if job is None:
        raise InputError(
            f"the placement has {nodes} nodes and this is one: run it with --profile slurm,"
            " or on Kubernetes with scripts/kubernetes_job.py"
        )
    # The batch script of a Slurm job runs on its first node.
    port = str(free_port(20000 + int(job) % 10000))
    address = first_variable("PET_MASTER_ADDR", "MASTER_ADDR") or socket.gethostname()
    os.environ.update(PET_MASTER_ADDR=address, PET_MASTER_PORT=port)
    step = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}"]
    step.append(f"--cpus-per-task={placement.threads}")
    # A node that fails ends the others, which would wait for it.
    step += ["--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    step += [f"--gres=gpu:{gpus}"] if gpus else []
    return [*step, sys.executable, *sys.argv]


def free_port(first: int) -> int:
    """Return the first free port from this one on; concurrent jobs begin at different ports."""
    for port in range(first, first + 1000):
        with socket.socket() as candidate, suppress(OSError):
            candidate.bind(("", port))
            return port
    raise InputError(f"no port between {first} and {first + 1000} is free")


def run_torchrun(arguments: list[str]) -> NoReturn:
    """Run a program by torchrun in several processes; exit with the code of the first failure."""
    # Importing torch takes seconds.
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    logging.disable(logging.ERROR)
    code = 0
    try:
        run(parse_args(arguments))
    except SignalException as stopped:
        code = 128 + stopped.sigval
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        # Of processes that end within a second, a killed one is the cause: it cannot say why.
        # Torchrun itself ends those that are left by SIGTERM.
        for rank, killed in error.failures.items():
            if killed.exitcode < 0 and killed.exitcode != -signal.SIGTERM:
                name = signal.Signals(-killed.exitcode).name
                print(f"error: process {rank} of the job was ended by {name}", file=sys.stderr)
                failure = killed
                break
        code = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    # Threads of torchrun's store now and then abort the interpreter while it shuts down.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
