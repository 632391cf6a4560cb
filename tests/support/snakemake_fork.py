"""Snakemake in forks of a process that has imported it.

The import of Snakemake and its plugins takes longer than a dry run, and the tests run Snakemake
hundreds of times.
"""

import functools
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent.parent
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["support.snakemake_preload"])

# Both start() and join() read the exit codes of finished processes, also of other threads. Of two
# threads that read the same one, the second gets 255.
EXIT_CODES = threading.Lock()
# Of two threads that change a variable at once, the second would keep the value of the first.
START = threading.Lock()


def run_snakemake(folder, arguments, environment):
    """Run Snakemake in a folder; return the finished process with its output as text."""
    with START:
        _start_server()
    with tempfile.NamedTemporaryFile() as output:
        process = FORKS.Process(target=_main, args=(output.name, folder, arguments, environment))
        with EXIT_CODES:
            process.start()
        wait([process.sentinel])
        with EXIT_CODES:
            process.join()
        text = output.read().decode()
    return subprocess.CompletedProcess(["snakemake", *arguments], process.exitcode, text)


@functools.cache
def _start_server():
    """Start the process that forks, which has only this way to find the modules of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(TESTS))
        forkserver.ensure_running()


def _main(output, folder, arguments, environment):
    """Run the command in this process, as from a shell in the folder."""
    with open(output, "w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.chdir(folder)
    os.environ.clear()
    os.environ |= environment
    # Without the folders that pytest adds: the workflow imports its own copy of the package.
    added = {str(TESTS), str(TESTS.parent / "scripts")}
    sys.path[:] = [path for path in sys.path if path not in added]
    sys.path += filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.argv = ["snakemake", *arguments]
    from snakemake.cli import main

    main()
