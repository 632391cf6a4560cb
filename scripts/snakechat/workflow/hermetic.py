"""What the job of a build may read and write: what its key counts, and its result.

The launcher (scripts/launch.py) is not limited: it locks, checks, publishes and links. It writes
the limits of a job into a file, and scripts/confined.py takes them on before a program of the job
imports anything. Landlock enforces them, in the versions that the kernel has
(snakechat.workflow.landlock), and a filter of system calls what Landlock does not cover
(snakechat.workflow.seccomp).

Standard library only.
"""

import glob
import json
import os
import platform
import site
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from snakechat.workflow.digests import write_atomically
from snakechat.workflow.errors import InputError
from snakechat.workflow.landlock import (
    READING_CAPABILITIES,
    drop_capabilities,
    end_with_parent,
    landlock_version,
    restrict,
)
from snakechat.workflow.seccomp import AUDIT_ARCH, deny_uncovered_calls

# The version of Landlock under which this process runs; not set without limits.
CONFINED = "SNAKECHAT_HERMETIC"
# The file with the limits of a job; not set without limits.
LIMITS = "SNAKECHAT_LIMITS"
# Variables that name the folder of the job: a cache that jobs share would not be counted.
FOLDER_VARIABLES = ("HOME", "TMPDIR", "XDG_CACHE_HOME", "MPLCONFIGDIR")
# Variables that name other caches of compiled code. Without them, it is in a folder of the job.
COMPILER_CACHES = (
    *("TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR", "TRITON_HOME"),
    *("CUDA_CACHE_PATH", "NUMBA_CACHE_DIR", "VLLM_CACHE_ROOT"),
)
# `hermetic: require` needs rights on TCP ports.
REQUIRED_VERSION = 4

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
    "discarded output, empty memory, random numbers": "/dev/null /dev/zero /dev/random"
    " /dev/urandom",
    "tests of full disks": "/dev/full",
    "questions for passwords, which fail": "/dev/tty",
    "GPUs of NVIDIA, of AMD and in WSL": "/dev/nvidia* /dev/dri /dev/kfd /dev/dxg",
    "InfiniBand, and transfers between GPUs and the network": "/dev/infiniband /dev/gdrdrv",
}
SHARED_MEMORY = "/dev/shm"
# Ports that the kernel chooses for those who listen without naming one.
PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
# Variables with the port at which processes meet.
MASTER_PORTS = ("MASTER_PORT", "PET_MASTER_PORT")
# Variables with the path of a cache of the Hub; of a file or a folder of certificates.
HUB_CACHES = ("HF_HUB_CACHE", "HF_XET_CACHE")
CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a job may do, beyond the system and the Python environment.

    Attributes:
        read: Files and folders that it may read.
        folders: Folders in which imports look for files.
        write: Folders that it may also write.
        network: Whether it may use the network.
        connects: Whether it has several processes, which connect to each other.
        nodes: Whether they are on several nodes, whose names they may have to ask a server for.
        gpus: Whether they use GPUs; then they also connect by Unix sockets.
    """

    read: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    write: list[str] = field(default_factory=list)
    network: bool = False
    connects: bool = False
    nodes: bool = False
    gpus: bool = False


def hermetic_version(mode: str) -> int:
    """Return the version of Landlock under which jobs run; 0 if they run without limits.

    Args:
        mode: `auto`: limited where the kernel can; `require`: an error where it cannot; `off`.

    Raises:
        InputError: The mode is `require`, and the kernel has no Landlock or an older one.
    """
    if mode == "off":
        return 0
    version = landlock_version() if platform.machine() in AUDIT_ARCH else 0
    if mode == "require" and version < REQUIRED_VERSION:
        found = f"version {version}" if version else "none"
        raise InputError(
            f"hermetic: require needs version {REQUIRED_VERSION} of Landlock (Linux 6.7), and this"
            f" kernel ({platform.release()}) has {found}: use `hermetic: auto`"
        )
    return version


def write_limits(limits: Limits, path: Path) -> None:
    """Write the limits of a job into a file for scripts/confined.py."""
    write_atomically(path, json.dumps(asdict(limits)), durable=False)


def confine(path: str, folder: str) -> None:
    """Take on the limits in a file for this process and what it starts, for good.

    folder: A folder of the job, for temporary files and caches.

    Raises:
        OSError: The kernel denies a call.
    """
    limits = Limits(**json.loads(Path(path).read_text()))
    variables = FOLDER_VARIABLES if limits.network else (*FOLDER_VARIABLES, "HF_HOME")
    os.environ.update(dict.fromkeys(variables, folder))
    for name in COMPILER_CACHES:
        os.environ.pop(name, None)
    # It may have found another folder before.
    tempfile.tempdir = folder
    end_with_parent()
    drop_capabilities(READING_CAPABILITIES)
    ports: Iterable[int] | None = ()
    # A cluster may choose another port at which processes meet.
    named = [int(os.environ[name]) for name in MASTER_PORTS if os.environ.get(name)]
    if limits.network:
        ports = None
    elif limits.connects:
        # torch warns for each connection that it finds no name of the other side.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        first, last = map(int, PORT_RANGE.read_text().split())
        ports = {*range(first, last + 1), *named}
    patterns = " ".join(DEVICES.values()).split()
    restrict(
        read=[*" ".join(SYSTEM.values()).split(), *python_folders(), *limits.read],
        folders=limits.folders,
        write=[SHARED_MEMORY, folder, *limits.write],
        devices=[path for pattern in patterns for path in glob.glob(pattern)],
        ports=ports,
        listens=named if limits.connects else (),
    )
    deny_uncovered_calls(limits.network or limits.nodes, has_unix_sockets=limits.gpus)
    os.environ[CONFINED] = str(landlock_version())


def python_folders() -> Iterator[str]:
    """Yield the folders of this Python, its environment and what .pth files add to its path."""
    yield from {sys.prefix, sys.base_prefix, sys.exec_prefix, *site.getsitepackages()}
    scripts = str(Path(__file__).resolve().parents[2])
    yield from (entry for entry in sys.path if entry and os.path.realpath(entry) != scripts)


def named_by(variables: Iterable[str]) -> list[str]:
    """Return the paths in those environment variables that are set."""
    return [path for name in variables if (path := os.environ.get(name))]


def hub_folder() -> str:
    """Return the folder of huggingface_hub's cache and token."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")
