"""Run a dry run of Snakemake and read the planned jobs from its output.

The output names the spec of each job, which contains all that its result is made from, and its
placement. Both are part of the command that `snakemake -n -p` prints: no private interface of
Snakemake is used. A dry run writes no spec files; the workflow writes them to the folder that the
variable SNAKECHAT_SPECS names.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from snakechat.workflow.errors import NOT_IN_CONFIG
from snakechat.workflow.specs import FOLDER

# First line of an error of the workflow, of Snakemake or of its command line.
ERROR = re.compile(r"(\S+: )?[Ee]rror: |\w+(Error|Exception)\b")


class PlannedJob(NamedTuple):
    """A job that Snakemake would run.

    spec: Its spec. placement: Where and how it would run. reason: Why Snakemake runs it.
    """

    spec: dict[str, Any]
    placement: dict[str, Any]
    reason: str


def parse_arguments(
    parser: argparse.ArgumentParser, command_line: list[str]
) -> tuple[argparse.Namespace, list[str]]:
    """Parse a command line that ends in options of Snakemake.

    Snakemake's options begin at the first option that the parser does not have, or after `--`.

    Args:
        parser: The parser of the program's own options and targets.
        command_line: The words of the command line.

    Returns:
        The parsed arguments, and the options for Snakemake.
    """
    if "--" in command_line:
        end = command_line.index("--")
        return parser.parse_args(command_line[:end]), command_line[end + 1 :]
    _, unrecognized = parser.parse_known_args(command_line)
    end = command_line.index(unrecognized[0]) if unrecognized else len(command_line)
    return parser.parse_args(command_line[:end]), command_line[end:]


def dry_run(arguments: list[str]) -> tuple[str, dict[str, PlannedJob]]:
    """Run `snakemake ARGUMENTS -n`; return its working directory and its jobs (planned_jobs).

    Exits with Snakemake's code and message if it fails.
    """
    with tempfile.TemporaryDirectory() as specs:
        return dry_run_with_specs(arguments, Path(specs))


def dry_run_with_specs(arguments: list[str], specs: Path) -> tuple[str, dict[str, PlannedJob]]:
    """Run a dry run, as `dry_run`.

    specs: Folder that gets the specs of all jobs that the targets depend on, up to date or not.
    """
    # The Snakemake of this Python's environment, even if the environment is not active.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    # The lowest level of --quiet overrides a profile that hides the commands, which are needed.
    command = ["snakemake", *arguments, "-n", "-p", "--nocolor", "--quiet", "progress"]
    environment = {**os.environ, "PATH": path, "SNAKECHAT_SPECS": str(specs)}
    try:
        process = subprocess.run(command, env=environment, capture_output=True, text=True)
    except FileNotFoundError:
        sys.exit("error: snakemake is not installed: activate its environment")
    check_success(process)
    folder = re.search(r"^ *Working directory: (.*)$", process.stdout, re.MULTILINE)
    if not folder:
        sys.exit("error: Snakemake prints no plan with these options")
    return folder[1], planned_jobs(process.stdout, specs)


def find_spec(specs: Path, rule: str, name: str) -> dict[str, Any]:
    """Return the spec of a job that a dry run has written (dry_run_with_specs)."""
    # The name, a hyphen and 16 digits of the digest.
    [path] = specs.joinpath(rule, name).parent.glob(f"{Path(name).name}-{'?' * 16}.json")
    spec: dict[str, Any] = json.loads(path.read_text())
    return spec


def check_success(process: subprocess.CompletedProcess[str]) -> None:
    """Exit with the code and the message of a process that failed; repeat its warnings."""
    if process.returncode:
        lines = [*process.stdout.splitlines(), *process.stderr.splitlines()]
        lines = [line for line in lines if line.strip() and not line.startswith("Using ")]
        first = next((number for number, line in enumerate(lines) if ERROR.match(line)), 0)
        print(*lines[first:], sep="\n", file=sys.stderr)
        sys.exit(process.returncode)
    for line in process.stderr.splitlines():
        if NOT_IN_CONFIG in line:
            print(line, file=sys.stderr)


def planned_jobs(output: str, specs: Path) -> dict[str, PlannedJob]:
    """Return the jobs in the output of a dry run, by the paths of their results.

    Jobs follow their upstream jobs.

    Args:
        output: The output.
        specs: The folder with the specs of the jobs.
    """
    jobs: dict[str, PlannedJob] = {}
    reason = ""
    for line in output.splitlines():
        kind, _, text = line.partition(": ")
        if kind == "Reason":
            reason = text
        # Rules without a command ("None") stand for the folders that users request.
        if kind == "Shell command" and "--spec" in text:
            command = shlex.split(text)
            path = Path(command[command.index("--spec") + 1]).relative_to(FOLDER)
            spec = json.loads((specs / path).read_text())
            placement = (
                command[command.index("--placement") + 1] if "--placement" in command else "{}"
            )
            jobs[spec["path"]] = PlannedJob(spec, json.loads(placement), reason)

    @cache
    def depth(path: str) -> int:
        return 1 + max(map(depth, upstream_paths(jobs[path].spec, jobs)), default=0)

    return {path: jobs[path] for path in sorted(jobs, key=lambda path: (depth(path), path))}


def upstream_paths(spec: Mapping[str, Any], jobs: Mapping[str, Any]) -> list[str]:
    """Return the paths of a job's inputs that are results of planned jobs."""
    paths = [entry["path"] for entry in spec["inputs"].values()]
    return [path for path in paths if path in jobs]
