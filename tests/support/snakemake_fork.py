"""Snakemake in forks of a process that has imported it.

The import of Snakemake and its plugins takes longer than a dry run, and the tests run Snakemake
hundreds of times.
"""

import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
from multiprocessing.connection import wait
from pathlib import Path

FORKS = multiprocessing.get_context("forkserver")
# Besides its own modules, what Snakemake imports while it plans.
FORKS.set_forkserver_preload(["snakemake.cli", "snakemake_logger_plugin_rich", "yte"])

# Both start() and join() read the exit codes of finished processes, also of other threads. Of two
# threads that read the same one, the second gets 255.
EXIT_CODES = threading.Lock()


def run_snakemake(folder, arguments, environment):
    """Run Snakemake in a folder; return the finished process with its output as text."""
    with tempfile.NamedTemporaryFile() as output:
        process = FORKS.Process(target=_main, args=(output.name, folder, arguments, environment))
        with EXIT_CODES:
            process.start()
        wait([process.sentinel])
        with EXIT_CODES:
            process.join()
        text = output.read().decode()
    return subprocess.CompletedProcess(["snakemake", *arguments], process.exitcode, text)


def _main(output, folder, arguments, environment):
    """Run the command in this process, as from a shell in the folder."""
    with open(output, "w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.chdir(folder)
    os.environ.clear()
    os.environ |= environment
    # Without the folders that pytest adds: the workflow imports its own copy of the package.
    tests = Path(__file__).resolve().parent.parent
    added = {str(tests), str(tests.parent / "scripts")}
    sys.path[:] = [path for path in sys.path if path not in added]
    sys.argv = ["snakemake", *arguments]
    from snakemake.cli import main

    main()
