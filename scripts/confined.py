"""Run a program within the limits of its job.

    python scripts/confined.py LIMITS FOLDER PROGRAM ARGUMENTS...

LIMITS is a file of scripts/launch.py (snakechat.workflow.hermetic). They hold before the program
imports anything, and for all that it starts. FOLDER is for its temporary files and caches.
"""

import sys
from pathlib import Path

from snakechat.workflow.hermetic import confine


def main() -> None:
    limits, folder, *sys.argv = sys.argv[1:]
    confine(limits, folder)
    program = Path(sys.argv[0])
    # In place of this module.
    main_module = vars(sys.modules["__main__"])
    main_module["__file__"] = sys.argv[0]
    exec(compile(program.read_bytes(), program, "exec"), main_module)


if __name__ == "__main__":
    main()
