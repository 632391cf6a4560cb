"""What Snakemake would run, read from a dry run: each job with its spec and its placement.

Specs name all that a result is made from; the placement is in the command that a dry run prints.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

# The first line of an error: of our rules, of Snakemake, of its command line.
ERROR = re.compile(r"(\S+: )?[Ee]rror: |\w+(Error|Exception)\b")


class Planned(NamedTuple):
    """A job that would run: its spec, what its program is told of its placement, and why Snakemake
    runs it.
    """

    spec: dict
    placement: dict
    reason: str


def arguments_of(parser, words):
    """What a parser makes of the words before --, and those behind it, which are Snakemake's."""
    end = words.index("--") if "--" in words else len(words)
    return parser.parse_args(words[:end]), words[end + 1 :]


def dry_run(arguments):
    """The folder that Snakemake plans for, and what it prints of its plan.

    Exits with Snakemake's own code and message where it fails.
    """
    # The one of this Python's environment, active or not.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    # The least of quiet: a profile may hide the commands, which are what is wanted.
    command = ["snakemake", *arguments, "-n", "-p", "--nocolor", "--quiet", "progress"]
    try:
        process = subprocess.run(
            command, env={**os.environ, "PATH": path}, capture_output=True, text=True
        )
    except FileNotFoundError:
        sys.exit("error: no snakemake here: activate its environment")
    if process.returncode:
        lines = [*process.stdout.splitlines(), *process.stderr.splitlines()]
        lines = [line for line in lines if line.strip() and not line.startswith("Using ")]
        first = next((number for number, line in enumerate(lines) if ERROR.match(line)), 0)
        print(*lines[first:], sep="\n", file=sys.stderr)
        sys.exit(process.returncode)
    folder = re.search(r"^ *Working directory: (.*)$", process.stdout, re.MULTILINE)
    if not folder:
        sys.exit("error: with these options Snakemake prints no plan")
    return folder[1], process.stdout


def planned_jobs(plan):
    """The Planned jobs of a printed plan, by the paths of their results, each behind those before
    it. Paths are told from the folder that is planned for.
    """
    jobs, reason = {}, ""
    for line in plan.splitlines():
        kind, _, text = line.partition(": ")
        if kind == "Reason":
            reason = text
        # Rules without a command ("None") stand for the folders that users ask for.
        if kind == "Shell command" and "--spec" in text:
            words = shlex.split(text)
            spec = json.loads(Path(words[words.index("--spec") + 1]).read_text())
            placement = words[words.index("--placement") + 1] if "--placement" in words else "{}"
            jobs[spec["path"]] = Planned(spec, json.loads(placement), reason)

    @cache
    def depth(path):
        return 1 + max(map(depth, before(jobs[path].spec, jobs)), default=0)

    return {path: jobs[path] for path in sorted(jobs, key=lambda path: (depth(path), path))}


def before(spec, jobs):
    """The paths of the results that a job reads, of those that would be made."""
    paths = [entry["path"] for entry in spec["inputs"].values()]
    return [path for path in paths if path in jobs]
