"""Files that a job reads and that no job of the build made: sources, local models, prompts.

Standard library only, as the modules of planning.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from snakechat.workflow.digests import file_digests, file_identity
from snakechat.workflow.errors import InputError


@contextmanager
def planned_files(planned: Mapping[Path, str]) -> Iterator[None]:
    """Check that files have the planned content until the end of the context, which reads them.

    planned: The sha256 of each file.

    Raises:
        InputError: A file has another content, or was edited or replaced before the end.
    """
    for path in planned:
        if not path.is_file():
            raise changed_since_planned(path)
    with unchanged_files(planned):
        found = file_digests(planned)
        for path, digest in planned.items():
            if found[path] != digest:
                raise changed_since_planned(path)
        yield


@contextmanager
def unchanged_files(paths: Iterable[Path]) -> Iterator[None]:
    """Check that files stay as they are until the end of the context, which reads them.

    A file that was replaced and put back has its digest again, although the other one may have been
    read. Its times differ, so that they decide; a file that was only touched is an error too.

    Raises:
        InputError: A file was edited or replaced before the end.
    """
    before = {path: file_identity(path) for path in paths}
    yield
    for path, identity in before.items():
        if not path.exists() or file_identity(path) != identity:
            raise InputError(f"{path} changed while it was read: start the build again")


def changed_since_planned(path: str | Path) -> InputError:
    """Return the error of a file that has another content than planned."""
    return InputError(f"{path} changed since this build was planned: start it again")
