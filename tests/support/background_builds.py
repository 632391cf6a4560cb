"""Snakemake in the background of a test."""

import contextlib
import os
import signal
import subprocess
import sys
import time

from conftest import PYTHON

# Starts Snakemake, which then starts its programs by the Python that is the first argument. A shell
# may have started the tests in the background, where SIGINT is ignored.
START = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.executable = sys.argv.pop(1)
from snakemake import cli
cli.main()
"""
# Seconds after which a build counts as hanging.
LIMIT = 600


class Build:
    """A Snakemake process in a new process group; its output goes into a file.

    Snakemake is not a fork, but its programs are. A program ends when the process of the group that
    waits for it ends.
    """

    def __init__(self, workflow, arguments, log, python):
        self.log = workflow.folder / log
        self.started = time.time()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", START, python, *arguments, *workflow.options],
                cwd=workflow.folder,
                env=workflow.variables(),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def runs(self):
        return self.process.poll() is None

    def wait_until(self, condition):
        """Wait until a condition holds or Snakemake ends."""
        while self.runs() and not condition():
            time.sleep(0.002)

    def send(self, number):
        """Send a signal to the whole group: to Snakemake, the shells and the programs."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def end(self):
        """Wait for the end; return the exit status and the output."""
        return self.process.wait(LIMIT), self.log.read_text()


@contextlib.contextmanager
def started(workflow, *arguments, log="build.log", python=PYTHON):
    """Yield a build; kill it with its programs at the end of the block if it still runs.

    python: The interpreter of its programs.
    """
    build = Build(workflow, arguments, log, python)
    try:
        yield build
    finally:
        build.send(signal.SIGKILL)
        build.process.wait()
