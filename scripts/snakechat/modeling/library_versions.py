"""The oldest torch and transformers that the code runs with.

Results are made with the locked versions, which jobs check (workflow/pins.py). Measurements and
chats may run with others. Where the code needs a name that the oldest versions lack, it also takes
what they have instead.
"""

import re

from snakechat.workflow.errors import InputError
from snakechat.workflow.pins import installed_versions

# The unit tests of modeling and training pass with these.
OLDEST = {"torch": (2, 11), "transformers": (5, 17)}


def check_libraries() -> None:
    """Check that the installed torch and transformers are not too old.

    Raises:
        InputError: One is, or is not installed.
    """
    installed = installed_versions(OLDEST)
    for name, oldest in OLDEST.items():
        numbers = re.match(r"(\d+)\.(\d+)", installed.get(name, ""))
        if numbers and (int(numbers[1]), int(numbers[2])) >= oldest:
            continue
        found = f"{installed[name]} is" if name in installed else "is not"
        needed = ".".join(map(str, oldest))
        raise InputError(
            f"{name} {found} installed, and Snakechat needs {needed} or later:"
            f" pip install '{name}>={needed}'"
        )
