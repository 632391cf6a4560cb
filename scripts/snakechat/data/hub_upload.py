"""Upload of files to a model repository of the Hugging Face Hub, in one commit.

huggingface_hub uploads large files before the commit that names them: a repository changes as a
whole, or not at all.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx2
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    get_token,
)
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

from snakechat.data.hub import (
    ExpectedFile,
    content_digest,
    expected_file,
    one_line,
    repository_info,
)
from snakechat.data.model_files import CARD, model_files
from snakechat.workflow.errors import InputError
from snakechat.workflow.manifest import parse_manifest

MANIFEST, MAIN = "manifest.json", "main"
CONFLICT = "the repository changed during the upload, so nothing was uploaded: try again"
# What the Hub's response to a request means for the user, by its status.
REASONS = {
    401: "the Hub does not accept the token: run hf auth login, or set HF_TOKEN",
    403: "the token may not write to this repository: create one that may",
    409: CONFLICT,
    412: CONFLICT,
}


class Destination(NamedTuple):
    """A repository before an upload.

    Attributes:
        repository: OWNER/NAME.
        is_private: Whether it is private, or will be.
        commit: Its last commit; None if it does not exist.
        files: Its files, with their sizes and digests.
        uploaded: Those of an earlier upload.
    """

    repository: str
    is_private: bool
    commit: str | None
    files: Mapping[str, ExpectedFile | None]
    uploaded: frozenset[str]

    def obsolete(self, names: Collection[str]) -> list[str]:
        """Return the files of an earlier upload that are not among those of the next one."""
        return sorted(name for name in self.uploaded if name not in names)


def find_destination(repository: str, public: bool) -> Destination:
    """Ask the Hub for a repository, and whether the user may write to it.

    public: Whether the repository has to be public. A new one is private otherwise.

    Raises:
        InputError: There is no token or it may not write, the repository has the model of somebody
            else or is private although it has to be public, or the Hub is unavailable.
    """
    if get_token() is None:
        raise InputError("there is no token of the Hub: run hf auth login, or set HF_TOKEN")
    with _upload_errors(repository):
        _check_owner(repository)
        try:
            info = repository_info(repository, "model", MAIN, files=True)
        except RepositoryNotFoundError:
            return Destination(repository, not public, None, {}, frozenset())
        files = {file.rfilename: expected_file(file) for file in info.siblings or ()}
        uploaded = _uploaded_files(repository, str(info.sha), files)
    others = sorted({*model_files(files)} - uploaded - {CARD})
    if others:
        raise InputError(
            f"{repository} has a model that this program did not upload ({others[0]}): name another"
            " repository"
        )
    if public and info.private:
        raise InputError(f"{repository} is private: omit --public, or change it on the Hub")
    return Destination(repository, bool(info.private), str(info.sha), files, uploaded)


def upload(
    destination: Destination, files: Mapping[str, Path], digests: Mapping[str, str], message: str
) -> str:
    """Upload files in one commit, which removes those of earlier uploads, and check what arrived.

    Args:
        destination: The repository, which is created if it does not exist.
        files: Local paths by the paths in the repository.
        digests: sha256 of large files by their paths in the repository.
        message: Message of the commit.

    Returns:
        The address of the commit.

    Raises:
        InputError: The Hub rejects the request, is unavailable, or has other files afterwards.
    """
    repository, api = destination.repository, HfApi()
    operations: list[CommitOperationAdd | CommitOperationDelete] = [
        *(CommitOperationAdd(name, str(path)) for name, path in sorted(files.items())),
        *(CommitOperationDelete(name) for name in destination.obsolete(files)),
    ]
    with _upload_errors(repository):
        if destination.commit is None:
            api.create_repo(repository, private=destination.is_private)
        commit = api.create_commit(
            repository, operations, commit_message=message, parent_commit=destination.commit
        )
        info = repository_info(repository, "model", commit.oid, files=True)
    arrived = {file.rfilename: file for file in info.siblings or ()}
    for name, path in files.items():
        found = arrived.get(name)
        is_large = found is not None and found.lfs is not None
        digest = digests.get(name, "") if is_large else content_digest(path, is_lfs=False)
        if found is None or expected_file(found) != (path.stat().st_size, digest):
            raise InputError(f"{repository}: {name} arrived with other content: upload it again")
    return str(commit.commit_url)


def _check_owner(repository: str) -> None:
    """Raise InputError if the token may only read, or not write for the owner of a repository."""
    user, owner = HfApi().whoami(), repository.partition("/")[0]
    role = user.get("auth", {}).get("accessToken", {}).get("role")
    if role == "read":
        raise InputError("the token of the Hub may only read: create one with the role write")
    owners = [user["name"], *(of["name"] for of in user.get("orgs", ()))]
    if owner not in owners:
        raise InputError(
            f"{repository}: the token belongs to {owners[0]}, who is neither {owner} nor in such an"
            f" organization: name one of {', '.join(owners)}"
        )


def _uploaded_files(
    repository: str, commit: str, files: Mapping[str, ExpectedFile | None]
) -> frozenset[str]:
    """Return the files of a repository that an earlier upload has put there."""
    if MANIFEST not in files:
        return frozenset()
    manifest = parse_manifest(
        Path(HfApi().hf_hub_download(repository, MANIFEST, revision=commit)).read_text()
    )
    return frozenset({*manifest["files"], MANIFEST} & files.keys() if manifest else ())


def is_hub_license(license: str) -> bool:
    """Return whether the Hub accepts an identifier of a licence in cards."""
    text = Path(__file__).with_name("tables").joinpath("hub_licenses.txt").read_text()
    return license in {
        name for line in text.splitlines() if line[0] != "#" for name in line.split()
    }


@contextmanager
def _upload_errors(repository: str) -> Iterator[None]:
    """Turn errors of the Hub and the network into an InputError of one line."""
    try:
        yield
    except HfHubHTTPError as error:
        reason = REASONS.get(error.response.status_code, one_line(error))
        raise InputError(f"{repository}: {reason}") from None
    # ValueError: metadata that the Hub rejects. RuntimeError: Xet.
    except (httpx2.HTTPError, OSError, ValueError, RuntimeError) as error:
        raise InputError(f"{repository}: {one_line(error)}") from None
