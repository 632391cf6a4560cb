"""What the GPUs of this machine and a process use, by nvidia-smi and ps; nothing without them."""

import subprocess
from typing import NamedTuple

GPU_FIELDS = "index,name,utilization.gpu,memory.used,memory.total,temperature.gpu,power.draw"
# Seconds until a program that does not respond is stopped.
TIMEOUT = 5


class GpuUsage(NamedTuple):
    """A GPU. Percent, MiB, degrees Celsius, watts; None for what it does not report."""

    number: str
    name: str
    utilization: float | None
    memory_used: float | None
    memory_total: float | None
    temperature: float | None
    power: float | None


class ProcessUsage(NamedTuple):
    """A process: cores that it has used on average, and resident memory in MB."""

    cores: float
    memory_mb: float


def gpu_usage() -> list[GpuUsage]:
    """Return the usage of each NVIDIA GPU."""
    output = _output("nvidia-smi", f"--query-gpu={GPU_FIELDS}", "--format=csv,noheader,nounits")
    rows = [[cell.strip() for cell in line.split(",")] for line in output.splitlines()]
    return [
        GpuUsage(row[0], row[1], *map(_number, row[2:]))
        for row in rows
        if len(row) == len(GpuUsage._fields)
    ]


def process_usage(process: int) -> ProcessUsage | None:
    """Return the usage of a process; None if it has ended."""
    words = _output("ps", "-o", "%cpu=,rss=", "-p", str(process)).split()
    return ProcessUsage(float(words[0]) / 100, int(words[1]) / 1024) if len(words) == 2 else None


def _number(text: str) -> float | None:
    """Return a number of nvidia-smi; None for "[N/A]"."""
    try:
        return float(text)
    except ValueError:
        return None


def _output(*command: str) -> str:
    """Return the output of a program; "" if it is missing or fails."""
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if process.returncode else process.stdout
