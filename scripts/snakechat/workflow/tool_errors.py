"""How the tools end: explain, estimate, verify, find_row, accept, store and kubernetes_job."""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import wraps

from snakechat.workflow.errors import InputError
from snakechat.workflow.printable import printable_line


def one_line_errors(code: int = 1) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Decorate `main` of a tool: an error that the user can act on ends it with one line.

    They are InputError, and errors of files and of the machine. The end of what reads the output,
    such as `head`, ends the tool without a message.

    Args:
        code: Exit code of an error.
    """

    def decorate(main: Callable[[], None]) -> Callable[[], None]:
        @wraps(main)
        def decorated() -> None:
            try:
                try:
                    main()
                finally:
                    sys.stdout.flush()
            except BrokenPipeError:
                discard_output()
                sys.exit(code)
            except InputError as error:
                print(f"error: {error}", file=sys.stderr)
                sys.exit(code)
            except OSError as error:
                discard_output()
                place = f": {printable_line(error.filename)}" if error.filename else ""
                print(f"error: {error.strerror or error}{place}", file=sys.stderr)
                sys.exit(code)

        return decorated

    return decorate


def discard_output() -> None:
    """Discard what is left of the output, which Python would try to write again at its end."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
