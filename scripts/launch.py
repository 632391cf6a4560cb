"""Start a program in the processes that its placement names: one per GPU of each node.

    python scripts/launch.py scripts/train_sft.py --spec ... --placement '{"nodes": 2, ...}'

A node without GPUs has one process on its CPU. One process is plain Python; torchrun starts several
processes of a node. For several nodes, this program starts itself on each node as a step of its
Slurm job (srun). On Kubernetes, a PyTorchJob starts it on each node. With options before the
program, it is torchrun.

The placement's `environment` has variables for the network of a cluster, such as
NCCL_SOCKET_IFNAME, or MASTER_ADDR for another address of the first node of a Slurm job. Variables
of the user's shell that change how libraries compute are removed before.

This program locks the job, and completes and publishes what its program wrote
(snakechat.workflow.publishing). Processes run within the limits of their job (confined.py).

A training on GPUs whose placement has `auto` may run out of memory, or be killed for it. This
program stays, and starts its processes again with a placement that needs less memory
(snakechat/training/rungs.py). Several nodes learn of it from the folder of the checkpoints.

Each process reports its own errors. This program reports that a process was killed.
"""

import fcntl
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from snakechat.training.rungs import Ladder, goes_down
from snakechat.workflow.code_digests import selected_code
from snakechat.workflow.commands import run_child
from snakechat.workflow.errors import InputError
from snakechat.workflow.job import PREPARED, READING, STATES, parse_words, report_errors
from snakechat.workflow.manifest import planned_files
from snakechat.workflow.printable import printable_line
from snakechat.workflow.processes import SERIAL, Placement, prepare_environment, set_threads
from snakechat.workflow.publishing import LIMITS, external_files, prepare, publish_result
from snakechat.workflow.store import AlreadyLocked, acquire_lock


def main() -> None:
    # Another launcher, which started this one, has prepared it.
    if STATES not in os.environ:
        prepare_environment()
        # The cache and the token of huggingface_hub. Commands of users, and jobs with limits, have
        # another home.
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        os.environ["HF_HOME"] = os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    command = sys.argv[1:]
    if command[0].startswith("-"):
        run_torchrun(command)
    spec_file, placement, options, _ = parse_words(command[1:])
    os.environ.update(placement.environment or {})
    node = this_node() if placement.nodes > 1 else {}

    def launch(spec: Mapping[str, Any]) -> int:
        if placement.nodes > 1 and not node:
            return run_child(slurm_step(placement))[0]
        return run_processes(command, spec, placement, node)

    def make_result(spec: Mapping[str, Any]) -> int:
        started = time.time()
        # Nodes that an operator of Kubernetes started have to decide the same.
        number = int(node["NODE_RANK"]) if node else None
        job = prepare(spec_file, command[0], placement, options, number)
        if job is None:
            return 0
        # A command of a user reads copies of its files.
        is_apart = number or "command" in spec["settings"]
        with planned_files({} if is_apart else external_files(job)):
            code = launch(spec)
        if code == 0 and not number:
            publish_result(job, started)
        return code

    # Another launcher has prepared the job and publishes its result.
    is_inner = not spec_file or PREPARED in os.environ
    sys.exit(report_errors(launch if is_inner else make_result, spec_file))


def run_processes(
    command: Sequence[str], spec: Mapping[str, Any], placement: Placement, node: Mapping[str, str]
) -> int:
    """Run a program in the processes of this node; return the code to exit with.

    command: The program and its arguments. node: As of this_node, if the job has several.
    """
    gpus, threads = placement.gpus_per_node, placement.threads
    # Snakemake lowers the threads of a job to --cores. The results of a model on the CPU depend on
    # their number: there, the placement decides.
    if gpus or placement == SERIAL:
        threads = int(os.environ.get("OMP_NUM_THREADS", threads))
    if gpus:
        claim_gpus(gpus)
        if not selected_code(spec["settings"])[1]:
            # Blocks of memory grow in place: tensors of many sizes leave fewer gaps that are too
            # small for the next one. vLLM has memory pools that this does not work with.
            os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # The command of a user starts its own processes.
    is_command = "command" in spec["settings"]
    processes = 1 if is_command else max(gpus, 1)
    set_threads(max(threads // processes, 1))
    # Seconds to save a checkpoint after SIGTERM. Torch 2.11 has no option of torchrun for it.
    os.environ["PET_SHUTDOWN_TIMEOUT"] = "3600"
    # The program has a folder of its own for its temporary files and caches.
    with tempfile.TemporaryDirectory(prefix="snakechat-", ignore_cleanup_errors=True) as folder:
        words = list(command)
        if limits := os.environ.get(LIMITS):
            words = [str(Path(__file__).with_name("confined.py")), limits, folder, *words]
        # By these, torchrun finds the other nodes, also in the command of a user.
        found = {"NNODES": str(placement.nodes), **node} if node else {}
        os.environ.update({f"PET_{name}": value for name, value in found.items()})
        torchrun = [
            *(sys.executable, sys.argv[0], f"--nproc-per-node={processes}"),
            # It chooses a free port of a single node.
            *([] if node else ["--standalone"]),
            *words,
        ]
        if goes_down(placement) and spec["rule"].startswith("train_") and not is_command:
            ladder = Ladder(Path(os.environ[STATES]), placement, spec["settings"]["dtype"])
            return run_on_rungs(ladder, torchrun, int(node.get("MASTER_PORT", 0)))
        if not is_command and (node or processes > 1):
            return run_child(torchrun)[0]
        # These make a process part of a group.
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        if node:
            # The first node completes the result.
            os.environ["RANK"] = node["NODE_RANK"]
        code, signals = run_child([sys.executable, *words])
    if code > 128 and not signals:
        print(f"error: {describe_kill(Path(command[0]).name, code - 128)}", file=sys.stderr)
    return code


def describe_kill(program: str, number: int) -> str:
    """Describe in one line that a signal ended the only process of a job."""
    if number == signal.SIGPROF:
        return (
            f"{program}: a chat template, or a regular expression of tokenizer.json, did not end:"
            " replace it in the tokenizer's files"
        )
    name, reading = signal.Signals(number).name, Path(os.environ.get(STATES, ""), READING)
    if reading.is_file():
        return (
            f"{printable_line(reading.read_text())}: {name} ended the process that reads: the file"
            " is damaged, or the memory is full"
        )
    return f"{program} was ended by {name}"


def run_on_rungs(ladder: Ladder, torchrun: Sequence[str], port: int) -> int:
    """Run a training, again after each rung on which it ran out of memory; return its exit code.

    port: Where its nodes meet the first time; 0 for a single node.
    """
    if ladder.state == "trying":
        # The whole job was killed while it tried this rung, possibly for its memory.
        ladder.go_down()
    while True:
        number = ladder.number
        # Each time has a port of its own.
        os.environ.update({"PET_MASTER_PORT": str(port + number)} if port else {})
        # A process has noted the next rung; the others may wait for it.
        code, signals = run_child(torchrun, partial(is_below, ladder, number))
        ladder.read()
        is_trying = ladder.state == "trying"
        if signals and is_trying:
            ladder.note("open")
        if signals or code == 0:
            return code
        if code == 128 + signal.SIGKILL and is_trying and ladder.number == number:
            print(f"killed while it tried {ladder.rung}: trying with less memory", flush=True)
            ladder.go_down()
        # For a minute, another node may note why its processes failed.
        deadline = time.monotonic() + (60 if port else 0)
        while not is_below(ladder, number):
            if time.monotonic() >= deadline:
                return code
            time.sleep(1)


def is_below(ladder: Ladder, number: int) -> bool:
    """Return whether a training has gone down the ladder more often than a number of times."""
    ladder.read()
    return ladder.number > number


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
    slurm_job = os.environ.get("SLURM_JOB_ID", "")
    # Slurm assigns each job its GPUs. In an interactive job with more of them, several of our jobs
    # may run at once.
    if len(devices) < number or (slurm_job and len(devices) == number):
        return
    folder = Path(tempfile.gettempdir(), f"snakechat-{os.getuid()}-{slurm_job}")
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


def this_node() -> dict[str, str]:
    """Return the number of this node, and address and port of the first one, by torchrun's names.

    Returns {} if no cluster started it as one of several.
    """
    names = {"NODE_RANK": ("RANK", "SLURM_NODEID"), "MASTER_ADDR": (), "MASTER_PORT": ()}
    found = {name: first_variable(f"PET_{name}", name, *others) for name, others in names.items()}
    return found if all(found.values()) else {}


def first_variable(*names: str) -> str:
    """Return the value of the first environment variable that is set, or ""."""
    return next((os.environ[name] for name in names if name in os.environ), "")


def slurm_step(placement: Placement) -> list[str]:
    """Return the command of a step of this Slurm job that starts this program on each node."""
    job, nodes, gpus = os.environ.get("SLURM_JOB_ID"), placement.nodes, placement.gpus_per_node
    if job is None:
        raise InputError(
            f"the placement has {nodes} nodes and this is one: run it with --profile slurm,"
            " or on Kubernetes with scripts/kubernetes_job.py"
        )
    # The batch script of a Slurm job runs on its first node.
    os.environ.update(
        PET_MASTER_ADDR=first_variable("PET_MASTER_ADDR", "MASTER_ADDR") or socket.gethostname(),
        PET_MASTER_PORT=str(free_port(20000 + int(job) % 10000)),
    )
    return [
        *("srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"),
        *(f"--cpus-per-task={placement.threads}", *([f"--gres=gpu:{gpus}"] if gpus else [])),
        # A node that fails ends the others, which would wait for it.
        *("--kill-on-bad-exit=1", sys.executable, *sys.argv),
    ]


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
        code = error.get_first_failure()[1].exitcode
        # Of processes that end within a second, a killed one is the cause: it cannot say why.
        # Torchrun itself ends those that are left by SIGTERM.
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        killed = [rank for rank in codes if codes[rank] < 0 and codes[rank] != -signal.SIGTERM]
        if killed:
            code = codes[killed[0]]
            name = signal.Signals(-code).name
            print(f"error: process {killed[0]} of the job was ended by {name}", file=sys.stderr)
        code = code if code > 0 else 128 - code
    # Threads of torchrun's store now and then abort the interpreter while it shuts down.
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
