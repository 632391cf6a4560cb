"""Files of object stores, which `path` of a dataset or a model may name by a URL.

fsspec reads them. It and the libraries of the stores are imported only where files are listed or
downloaded: planning needs them for no other source.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from snakechat.data.model_files import CARD
from snakechat.workflow.digests import digest
from snakechat.workflow.errors import InputError
from snakechat.workflow.external_files import changed_since_planned
from snakechat.workflow.pins import LOCK, read_lock
from snakechat.workflow.progress_lines import FIRST_LINE, ProgressLines


class Scheme(NamedTuple):
    """What fsspec needs for the URLs of a scheme.

    Attributes:
        package: The package, which has the versions of fsspec.
        digests: Keys of fsspec's description of a file, whose values change with its content.
        options: Arguments of the file system.
    """

    package: str
    digests: tuple[str, ...]
    options: dict[str, Any]


# s3fs tries five times on top of this. The defaults wait for many minutes for a mute server.
S3_CONFIG = {
    "connect_timeout": 5,
    "read_timeout": 10,
    "retries": {"mode": "standard", "total_max_attempts": 2},
}
SCHEMES = {
    "s3": Scheme("s3fs", ("ETag",), {"config_kwargs": S3_CONFIG}),
    "gs": Scheme("gcsfs", ("crc32c", "md5Hash"), {}),
}
# SCHEME://BUCKET/FOLDER. Specs and pages are public: there is no place for a password or a query.
# fsspec chains URLs by "::".
URL = re.compile(r"([a-z0-9]+)://[^/@:?#\s]+(/((?!::)[^?#\x00-\x1f\x7f])*)?")
HINT = "check the address, the credentials and the network, or set path to a local copy"


class RemoteFile(NamedTuple):
    """A file of an object store: its path there, its size in bytes and its version."""

    path: str
    size: int
    version: str


def is_remote(path: str | Path) -> bool:
    """Return whether a path of the config is a URL."""
    return "://" in str(path)


def url_problem(url: str) -> str | None:
    """Return why a URL cannot be read, without showing it: it may have a password."""
    match = URL.fullmatch(url)
    if match and match[1] in SCHEMES:
        return None
    schemes = ", ".join(f"{scheme}://" for scheme in SCHEMES)
    return (
        f"expected a local path, or a URL that starts with one of {schemes} and has no user name,"
        " password or query: credentials come from the environment"
    )


def list_files(url: str) -> dict[str, str]:
    """Return the version of each file below a URL, by its path relative to the URL.

    A version is a digest: it differs if the content of the file differs. The URL may name one file,
    whose path is its name then.

    Raises:
        InputError: The library of the store is missing, the store rejects the request or cannot be
            reached, there are no files, or the name of one could not be that of a local file.
    """
    _, files = _find(url)
    return {name: file.version for name, file in files.items()}


@contextmanager
def downloaded(url: str, planned: Mapping[str, str], parent: Path) -> Iterator[Path]:
    """Download files below a URL, and the card if there is one, for the time of the context.

    Args:
        url: The URL of a folder or a file.
        planned: The planned version of each file, by its path relative to the URL.
        parent: Where to make the folder, which is deleted at the end.

    Yields:
        The folder. Errors of the context that name it will name the URL.

    Raises:
        InputError: As list_files; or a file has another version than planned, before the download
            or after it.
    """
    filesystem, files = _find(url)
    _check_versions(url, planned, files)
    names = list(planned.keys() | ({CARD} & files.keys()))
    with TemporaryDirectory(prefix=".download-", dir=parent) as folder:
        size, done = sum(files[name].size for name in names), 0
        progress = ProgressLines("download", "bytes", size, next_line=FIRST_LINE)
        for name in names:
            target = Path(folder, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            with _one_line_errors(url):
                filesystem.get_file(files[name].path, str(target))
            done += files[name].size
            progress.update(done)
        _check_versions(url, planned, _find(url)[1])
        try:
            yield Path(folder)
        except InputError as error:
            raise InputError(str(error).replace(folder, _folder_url(url, files))) from None


def _folder_url(url: str, names: Collection[str]) -> str:
    """Return the URL that the names of files are relative to: that of a file is its folder."""
    folder, _, name = url.rstrip("/").rpartition("/")
    return folder if list(names) == [name] else f"{folder}/{name}"


def _check_versions(url: str, planned: Mapping[str, str], files: Mapping[str, RemoteFile]) -> None:
    """Raise InputError unless the files have their planned versions."""
    for name, version in planned.items():
        if name not in files or files[name].version != version:
            raise changed_since_planned(f"{_folder_url(url, planned)}/{name}")


def _find(url: str) -> tuple[Any, dict[str, RemoteFile]]:
    """Return a new file system, which has cached nothing, and the files below a URL."""
    scheme = SCHEMES[url.partition("://")[0]]
    with _one_line_errors(url):
        from fsspec.core import url_to_fs

        filesystem, root = url_to_fs(url, skip_instance_cache=True, **scheme.options)
        found = filesystem.find(root, detail=True)
    files = {}
    for path, info in found.items():
        # Some tools write an empty object in place of a folder.
        if path.endswith("/") and not info["size"]:
            continue
        # The URL of a file finds itself.
        name = path.removeprefix(f"{root}/") if path != root else path.rpartition("/")[2]
        if not _is_local_name(name):
            raise InputError(f"{url}: {name!r} cannot be the name of a local file: rename it")
        digests = [info.get(key) for key in scheme.digests]
        if not any(digests):
            raise InputError(f"{url}: {name} has no {' or '.join(scheme.digests)}")
        files[name] = RemoteFile(path, info["size"], digest([info["size"], *map(str, digests)]))
    if not files:
        raise InputError(f"{url}: there are no files: {HINT}")
    return filesystem, files


def _is_local_name(name: str) -> bool:
    """Return whether a name stands for a file below any folder, on each system."""
    parts = name.split("/")
    return name.isprintable() and "\\" not in name and not {"", ".", ".."} & set(parts)


@contextmanager
def _one_line_errors(url: str) -> Iterator[None]:
    """Turn errors of a store, its library and the network into an InputError of one line."""
    try:
        yield
    except ImportError:
        package = SCHEMES[url.partition("://")[0]].package
        version = read_lock(LOCK).versions["fsspec"]
        raise InputError(f"{url} needs {package}: pip install {package}=={version}") from None
    # Each library raises exceptions of its own classes, and those of its HTTP library.
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        # The address of a store's endpoint may have a password.
        reason = re.sub(r"//[^/@\s]*@", "//", reason)
        raise InputError(f"{url}: {reason}: {HINT}") from None
