"""Files of the Hugging Face hub, and what the card (README.md) of a dataset or model declares.

huggingface_hub downloads, resumes broken connections, caches and locks. This module adds what the
library lacks, as tests/unit/data/test_hub.py shows: every file is verified against its digest on
the hub, offline too, and errors are one line. The workflow imports this module while it plans.
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import yaml

from snakechat.data.model_files import CARD
from snakechat.data.yaml_files import load_yaml
from snakechat.workflow.errors import InputError
from snakechat.workflow.manifest import write_atomically

METADATA = re.compile(r"\A\s*---\r?\n(.*?)\r?\n---\s*$", re.DOTALL | re.MULTILINE)
# Metadata are at the start of a card; a file of a stranger may be of any size.
MAX_BYTES = 1 << 20
# Seconds after which a request for the list of files fails.
TIMEOUT = 30
WITHOUT_NETWORK = (
    "the Hub is unreachable: set path to a local copy, or HF_HUB_OFFLINE=1 if its cache has the"
    " files"
)


def fetch(
    repository: str,
    kind: Literal["model", "dataset"],
    revision: str,
    choose: Callable[[list[str], Path], Mapping[str, Sequence[str]]],
) -> tuple[Path, Mapping[str, Sequence[str]]]:
    """Download files of a repository, and its card, into huggingface_hub's cache.

    HF_ENDPOINT, HF_HUB_OFFLINE, HF_HOME and HF_TOKEN work as documented by huggingface_hub.

    Args:
        repository: OWNER/NAME on the hub.
        revision: Branch, tag or commit.
        choose: Selects the paths to download, in groups, from the sorted paths of the repository;
            offline, from those in the cache. Its second argument is the folder with the card.

    Returns:
        Folder of the files, whose name is the full commit id, and the selected paths.

    Raises:
        InputError: The hub, the cache or `choose` fails, or a file of the cache is damaged. A
            damaged file is deleted unless HF_HUB_OFFLINE is set.
    """
    # They take a second. httpx2 is the HTTP library of huggingface_hub.
    import httpx2
    from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download

    try:
        # `listed` has each path with its digest on the hub.
        if constants.HF_HUB_OFFLINE:
            # No patterns: the folder alone.
            folder = Path(
                snapshot_download(repository, repo_type=kind, revision=revision, allow_patterns=[])
            )
            found = [path for path in folder.rglob("*") if path.is_file()]
            listed: dict[str, str | None] = {
                path.relative_to(folder).as_posix(): None for path in found
            }
        else:
            info: Any = HfApi().repo_info(
                repository, repo_type=kind, revision=revision, files_metadata=True, timeout=TIMEOUT
            )
            listed = {
                each.rfilename: each.lfs.sha256 if each.lfs else each.blob_id
                for each in info.siblings or ()
            }
            cache = Path(constants.HF_HUB_CACHE, "--".join([f"{kind}s", *repository.split("/")]))
            folder = cache / "snapshots" / str(info.sha)
        paths = [path for path in listed if path == CARD]
        for path in paths:
            hf_hub_download(repository, path, repo_type=kind, revision=folder.name)
        chosen = choose(sorted(listed), folder)
        for path in chain(*chosen.values()):
            hf_hub_download(repository, path, repo_type=kind, revision=folder.name)
            paths.append(path)
        damaged = [folder / path for path in paths if not is_whole(folder / path, listed.get(path))]
        for path_in_cache in [] if constants.HF_HUB_OFFLINE else damaged:
            path_in_cache.resolve().unlink()
            path_in_cache.unlink(missing_ok=True)
        if damaged:
            raise ValueError(
                f"{damaged[0]} was edited or is damaged: start the build again, without"
                " HF_HUB_OFFLINE, to download it again"
            )
        # The commit of the revision, for offline runs. Written last: the revision is complete.
        ref = folder.parents[1] / "refs" / revision
        if revision != folder.name and not (ref.exists() and ref.read_text() == folder.name):
            write_atomically(ref, folder.name)
    # ValueError: an invalid repository name or a reply that is not JSON. RuntimeError: Xet.
    # ImportError: a SOCKS proxy.
    except (httpx2.HTTPError, OSError, ValueError, RuntimeError, ImportError, InputError) as error:
        # The first line is often only "404 Client Error.".
        reason = " ".join(str(error).split()) or type(error).__name__
        unreachable = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.ProxyError)
        hint = f": {WITHOUT_NETWORK}" if isinstance(error, unreachable) else ""
        raise InputError(f"hub {kind} {repository} at {revision}: {reason}{hint}") from None
    return folder, chosen


def is_whole(path: Path, digest: str | None) -> bool:
    """Return whether a file of the cache has the digest that the hub lists.

    digest: SHA-256 of a large file, or the git blob id of a small one; None for that in its name:
        the cache has links to files that are named by their digests.
    """
    if digest is None:
        digest = path.readlink().name if path.is_symlink() else ""
    is_large = len(digest) == hashlib.sha256().digest_size * 2
    found = hashlib.sha256() if is_large else hashlib.sha1(b"blob %d\0" % path.stat().st_size)
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: found).hexdigest() == digest


def card_facts(folder: Path) -> dict[str, Any]:
    """Return the licence (or None) that the card in a folder declares.

    A licence that the Hub does not know is "other (NAME)". Only words are returned, because they
    appear in generated pages.
    """
    metadata = card_metadata(folder)
    license, name = (
        text.lower() if isinstance(text, str) and re.fullmatch(r"[\w.+-]+", text) else None
        for text in map(metadata.get, ("license", "license_name"))
    )
    return {"licence": f"other ({name})" if license == "other" and name else license}


def card_metadata(folder: Path) -> dict[str, Any]:
    """Return the metadata of the card in a folder; {} if there are none that can be read."""
    try:
        with (folder / CARD).open("rb") as file:
            found = METADATA.match(file.read(MAX_BYTES).decode("utf-8-sig", "replace"))
        metadata = load_yaml(found[1]) if found else None
    except (OSError, ValueError, AttributeError, LookupError, yaml.YAMLError):
        return {}
    return metadata if isinstance(metadata, dict) else {}
