"""Run a program within the limits of its job.

    python scripts/confined.py LIMITS FOLDER PROGRAM ARGUMENTS...

LIMITS is a file of scripts/launch.py (limits_of of snakechat.workflow.publishing) with these keys:

- read, folders, write: The paths that the program may read, import from and write.
- network: Whether it may connect to any server.
- connects: Whether its processes connect to each other.
- nodes: Whether they run on several nodes, whose names they may have to ask a server for.
- gpus: Whether they use GPUs, and connect by Unix sockets too.

The limits hold before the program imports anything, and for all that it starts. FOLDER is for its
temporary files and caches.
"""

import glob
import json
import os
import site
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from snakechat.workflow import kernel_limits
from snakechat.workflow.processes import end_with_parent

# The version of Landlock under which this process runs; not set without limits.
CONFINED = "SNAKECHAT_HERMETIC"
# Variables that name the folder of the job: a cache that jobs share would not be counted.
FOLDER_VARIABLES = ("HOME", "TMPDIR", "XDG_CACHE_HOME", "MPLCONFIGDIR")
# Variables that name other caches of compiled code. Without them, it is in a folder of the job.
COMPILER_CACHES = (
    *("TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR", "TRITON_HOME"),
    *("CUDA_CACHE_PATH", "NUMBA_CACHE_DIR", "VLLM_CACHE_ROOT"),
)
# What every job may read besides what its key counts, by the reason. Its content is not counted: it
# belongs to the system that the locks name, or to this machine. What GPUs and InfiniBand need is
# taken from the documentation of their drivers and not yet tried.
SYSTEM = {
    "programs and libraries, CUDA and ROCm; their loader": "/usr /lib /lib64 /bin /opt"
    " /etc/ld.so.cache /etc/ld.so.conf /etc/ld.so.conf.d",
    "processors, memory and GPUs; of other processes no memory and no environment": "/proc /sys",
    "GPUs of NVIDIA's container runtime and of OpenCL": "/run/nvidia /etc/OpenCL",
    "names of hosts and users, and the order of addresses": "/etc/nsswitch.conf /etc/host.conf"
    " /etc/hosts /etc/hostname /etc/gai.conf /etc/resolv.conf /etc/passwd /etc/group",
    "certificates": "/etc/ssl /etc/pki /etc/ca-certificates",
    "local times in logs": "/etc/localtime",
    "types of files, which the clients of HTTP import": "/etc/mime.types",
    "fonts of plots": "/etc/fonts",
    "NCCL and InfiniBand": "/etc/nccl.conf /etc/libibverbs.d /etc/rdma",
}
# Devices that libraries also write.
DEVICES = {
    "discarded output, zeros, random numbers": "/dev/null /dev/zero /dev/random /dev/urandom",
    "tests of full disks": "/dev/full",
    "questions for passwords, which fail": "/dev/tty",
    "GPUs of NVIDIA, of AMD and in WSL": "/dev/nvidia* /dev/dri /dev/kfd /dev/dxg",
    "InfiniBand, and transfers between GPUs and the network": "/dev/infiniband /dev/gdrdrv",
}
# Ports that the kernel chooses for those who listen without naming one.
PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
# Variables with the port at which processes meet.
MASTER_PORTS = ("MASTER_PORT", "PET_MASTER_PORT")


def main() -> None:
    path, folder, *sys.argv = sys.argv[1:]
    limits = json.loads(Path(path).read_text())
    network, connects = limits.get("network"), limits.get("connects")
    variables = FOLDER_VARIABLES if network else (*FOLDER_VARIABLES, "HF_HOME")
    os.environ.update(dict.fromkeys(variables, folder))
    for name in COMPILER_CACHES:
        os.environ.pop(name, None)
    # It may have found another folder before.
    tempfile.tempdir = folder
    end_with_parent()
    kernel_limits.drop_capabilities(kernel_limits.READING_CAPABILITIES)
    ports: Iterable[int] | None = None if network else ()
    # A cluster may choose another port at which processes meet.
    named = [os.environ.get(name) for name in MASTER_PORTS] if connects else []
    listens = [int(port) for port in named if port]
    if connects and not network:
        # torch warns for each connection that it finds no name of the other side.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        first, last = map(int, PORT_RANGE.read_text().split())
        ports = {*range(first, last + 1), *listens}
    kernel_limits.restrict(
        read=[*" ".join(SYSTEM.values()).split(), *python_folders(), *limits["read"]],
        folders=limits["folders"],
        write=["/dev/shm", folder, *limits.get("write", ())],
        devices=[path for each in " ".join(DEVICES.values()).split() for path in glob.glob(each)],
        ports=ports,
        listens=listens,
    )
    kernel_limits.deny_uncovered_calls(
        has_network=bool(network or limits.get("nodes")),
        has_unix_sockets=bool(limits.get("gpus")),
    )
    os.environ[CONFINED] = str(kernel_limits.landlock_version())
    # In place of this module.
    program = sys.argv[0]
    globals()["__file__"] = program
    exec(compile(Path(program).read_bytes(), program, "exec"), globals())


def python_folders() -> Iterator[str]:
    """Yield the folders of this Python, its environment and what .pth files add to its path."""
    yield from {sys.prefix, sys.base_prefix, sys.exec_prefix, *site.getsitepackages()}
    scripts = str(Path(__file__).resolve().parent)
    yield from (entry for entry in sys.path if entry and os.path.realpath(entry) != scripts)


if __name__ == "__main__":
    main()
