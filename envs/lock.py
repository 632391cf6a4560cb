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
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# One version of each distribution, for all platforms and for Python 3.11 and later.
RESOLUTION = (
    *("--universal", "--python-version", "3.11", "--fork-strategy", "fewest"),
    *("--generate-hashes", "--annotation-style", "split", "--no-header", "--quiet"),
)
BASE, TORCH = "requirements.txt", "requirements-torch.txt"
# Beside the locks themselves, it names no path: conda reads a copy of it in another folder.
ENVIRONMENT = """\
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
    locked = compile_lock("requirements.in", [BASE, TORCH], options)
    of_torch = [name for name in locked if OF_TORCH.match(name)]
    base = [name for name in locked if name not in of_torch]
    write_lock(BASE, "requirements.in", [locked[name] for name in base])
    write_lock(TORCH, "requirements.in", [locked[name] for name in of_torch])
    # Each requirement and its hashes in one line.
    lines = [re.sub(r" \\\n +", " ", locked[name]).partition("\n")[0] for name in base + of_torch]
    pip = "".join(f"      - {json.dumps(line)}\n" for line in lines)
    (ROOT / "envs/snakechat.yaml").write_text(ENVIRONMENT + pip)
    # The same versions, and further distributions.
    options = [*options, f"--constraints={BASE}", f"--constraints={TORCH}"]
    for extra in ("requirements-kubernetes", "requirements-test"):
        added = compile_lock(f"{extra}.in", [f"{extra}.txt"], options)
        blocks = [block for name, block in added.items() if name not in locked]
        write_lock(f"{extra}.txt", f"{extra}.in", blocks)


def compile_lock(source: str, locks: list[str], options: list[str]) -> dict[str, str]:
    """Return the lines of each distribution that a file of requirements leads to, by its name.

    Args:
        source: Name of the file.
        locks: Names of the locks whose versions stay where they satisfy the requirements.
        options: Further options of `uv pip compile`.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "lock.txt")
        output.write_text(
            "".join((ROOT / lock).read_text() for lock in locks if (ROOT / lock).exists())
        )
        # It prints the lock, too.
        command = ["uv", "pip", "compile", *RESOLUTION, *options, source, f"--output-file={output}"]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        blocks = re.findall(r"^[a-z0-9].*\n(?:[ \t]+.*\n)*", output.read_text(), re.MULTILINE)
    return {block.partition("==")[0]: block for block in blocks}


def write_lock(target: str, source: str, blocks: list[str]) -> None:
    """Write a lock; leave it as it is if it has this content, so that make installs nothing."""
    header = f"# Written by `make lock` from {source}: do not edit.\n"
    text, path = header + "".join(blocks), ROOT / target
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
