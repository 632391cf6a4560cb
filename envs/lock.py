"""Lock the environments: write requirements*.txt from requirements*.in, with hashes of all files.

Run by `make lock`. Locked versions stay as long as they satisfy requirements*.in; options are those
of `uv pip compile`, such as --upgrade or --upgrade-package numpy.

torch has one version for CPUs, CUDA and ROCm, and each build has files of its own. PyPI's build is
locked in requirements-torch.txt, so that the rest can be installed with hashes next to any build.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# One version of each distribution, for all platforms and for Python 3.11 and later.
RESOLUTION = (
    *("--universal", "--python-version", "3.11", "--fork-strategy", "fewest"),
    *("--generate-hashes", "--annotation-style", "split", "--no-header", "--quiet"),
)
BASE, TORCH = "requirements.txt", "requirements-torch.txt"
ENVIRONMENT = ROOT / "envs/snakechat.yaml"
HEADER = """\
# Written by `make lock`: do not edit. Used with --sdm conda; otherwise jobs run in the active
# environment.
channels:
  - conda-forge
dependencies:
  - python=3.11
  - pip
  - pip:
"""
# torch and what its builds for CUDA require.
OF_TORCH = re.compile(r"(torch|triton|nvidia-.*|cuda-.*)$")


def main(options: list[str]) -> None:
    """Write all locks. options: further options of `uv pip compile`."""
    source = ["requirements.in"]
    locked = compile_lock(source, [BASE, TORCH], options)
    write(BASE, source, (block for name, block in locked.items() if not OF_TORCH.match(name)))
    write(TORCH, source, (block for name, block in locked.items() if OF_TORCH.match(name)))
    # The same versions, and further distributions.
    options = [*options, f"--constraints={BASE}", f"--constraints={TORCH}"]
    # In addition to requirements.txt.
    for extra in ("kubernetes", "test"):
        target, source = f"requirements-{extra}.txt", [f"requirements-{extra}.in"]
        added = compile_lock(source, [target], options)
        write(target, source, (block for name, block in added.items() if name not in locked))
    write_environment()


def compile_lock(sources: list[str], locks: list[str], options: list[str]) -> dict[str, str]:
    """Return the lines of each distribution that some requirements lead to, by its name.

    Args:
        sources: Names of files of requirements.
        locks: Names of the locks whose versions stay where they satisfy the requirements.
        options: Further options of `uv pip compile`.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "lock.txt")
        former = [(ROOT / lock).read_text() for lock in locks if (ROOT / lock).exists()]
        output.write_text("".join(former))
        arguments = [*RESOLUTION, *options, *sources, f"--output-file={output}"]
        # It prints the lock, too.
        command = ["uv", "pip", "compile", *arguments]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        blocks = re.findall(r"^[a-z0-9].*\n(?:[ \t]+.*\n)*", output.read_text(), re.MULTILINE)
    return {block.partition("==")[0]: block for block in blocks}


def write(target: str, sources: list[str], blocks: Iterable[str]) -> None:
    """Write a lock; leave it as it is if it has this content, so that make installs nothing."""
    header = f"# Written by `make lock` from {' and '.join(sources)}: do not edit.\n"
    text, path = header + "".join(blocks), ROOT / target
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def locked_requirements(lock: str) -> list[str]:
    """Return the requirements of a lock, each with its hashes in one line."""
    text = re.sub(r" \\\n +", " ", (ROOT / lock).read_text())
    return re.findall(r"^[a-z0-9].*", text, re.MULTILINE)


def write_environment() -> None:
    """Write the conda environment for Snakemake's --sdm conda.

    It has the locks themselves and no path: conda reads a copy of the file in another folder. It
    changes with them, and Snakemake then installs the environment again.
    """
    lines = [line for lock in (BASE, TORCH) for line in locked_requirements(lock)]
    pip = "".join(f"      - {json.dumps(line)}\n" for line in lines)
    ENVIRONMENT.write_text(HEADER + pip)


if __name__ == "__main__":
    main(sys.argv[1:])
