"""Tutorials of the documentation: the files and commands of a page, and what it shows of outputs.

A fenced block with a title is a file. A block of the language `console` has commands, each behind
"$ ", and lines of their outputs.
"""

import re
import shlex
from typing import NamedTuple

from conftest import ROOT

FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
# The tests do not have the environment in the folder.
ACTIVATE = ". .venv/bin/activate"


class Block(NamedTuple):
    """A fenced block: the file that it is, if it has a title, or commands."""

    language: str
    title: str
    text: str


def blocks_of(page):
    """Return the blocks of an English page, such as tutorials/trl."""
    text = (ROOT / f"docs/en/{page}.md").read_text()
    return [Block(*found) for found in FENCE.findall(text)]


def commands_of(block):
    """Return the commands of a block, each with the lines that its output has."""
    parts = re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]
    return [(command, lines) for command, *lines in map(str.splitlines, parts)]


def follow(page, workflow, run=None):
    """Write the files of a tutorial and run its commands in the folder of a workflow.

    run: runs a command; returns the finished process with its output as text.
    """
    for block in blocks_of(page):
        if block.title:
            path = workflow.folder / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
        elif block.language == "console":
            for command, lines in commands_of(block):
                if command != ACTIVATE:
                    process = (run or run_command)(workflow, command)
                    check_output(command, lines, process)


def run_command(workflow, command):
    """Run a command as in a shell; Snakemake alone, without its start."""
    words = shlex.split(command)
    if words[0] == "snakemake" and not {"|", "&&"} & set(words):
        return workflow.snakemake(*words[1:])
    return workflow.run("bash", "-o", "pipefail", "-c", command)


def check_output(command, lines, process):
    """Assert that a command ended as the page shows it.

    Each line occurs in the output. There, "..." is any text, and a number with a decimal point is
    any number: it depends on the processor.
    """
    shown = f"$ {command}\n{process.stdout[-5000:]}"
    fails = any(line.startswith("error: ") for line in lines)
    assert (process.returncode != 0) == fails, shown
    for line in lines:
        assert re.search(pattern_of(line), process.stdout), f"{line!r} is not in\n{shown}"


def pattern_of(line):
    """Return a regular expression of the lines that a page's line stands for."""
    pattern = r"\s+".join(map(re.escape, line.split())).replace(r"\.\.\.", ".*")
    return re.sub(r"\d[\d,]*\\\.\d+", r"[\\d.,]+", pattern)
