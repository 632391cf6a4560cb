"""Names: links below output/ that lead to results in the store.

    output/data/NAME               a link to the version that is up to date
    output/data/NAME.manifest.json a link to its manifest
    output/versions/data/NAME/KEY  a link to the result in the store: each version of the name

What belongs to a name and not to a result, such as the card of a model, lies in output/versions: a
version of a model or a report is a folder with a link to each file, in which people and builds may
write.

Each build registers its output/ in STORE/roots. `scripts/store.py gc` keeps what the links of any
root lead to.

Standard library only: the workflow imports this module while it plans.
"""

import os
import platform
import secrets
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

from snakechat.workflow.errors import InputError
from snakechat.workflow.manifest import (
    MANIFEST,
    STORE,
    content_digest,
    digest,
    file_digest,
    fsync,
    manifest_path,
    read_manifest,
    require_manifest,
    result_id,
    write_atomically,
)
from snakechat.workflow.store import (
    KEY,
    ROOTS,
    AlreadyLocked,
    acquire_lock,
    is_copy,
    make_folders,
    stored_folders,
    walk_files,
)

VERSIONS = "versions"
# The file in output/ with a text that no other output folder has, apart from copies.
IDENTITY = ".identity"
# The folders of output/ whose results users name as targets: Snakemake writes its timestamp into
# them, and the end of a build a card and the links PARTS.
TARGETS = ("sft", "reward", "dpo", "rlhf", "report")
PARTS = ("evaluation", "report")

_real = cache(os.path.realpath)


def lock_output() -> None:
    """Lock output/ for the lifetime of this process; raise InputError if another one holds it."""
    try:
        acquire_lock(Path("output/.lock"))
    except AlreadyLocked as other:
        raise InputError(f"{other} is building in {Path.cwd()}: wait for it, or stop it") from None


def link_result(path: str | Path, folder: Path) -> None:
    """Have the path of a result, such as output/sft/NAME, lead to a folder of a store.

    Killed anywhere, it leaves the earlier link or the new one. Raises InputError if the path has a
    folder or a file of its own, or the folder in the store was removed since it was found.
    """
    path = Path(path)
    with suppress(OSError):
        # The time of the last use. A store may be read-only.
        os.utime(folder)
    for link, text in _links(path, folder):
        replace_link(link, text)
    fsync(path.parent)
    if not (folder / MANIFEST).exists():
        raise InputError(f"{folder} was removed since this build was planned: start it again")


def link_part(path: str | Path, model: Path, part: str, folder: Path) -> None:
    """Have a folder `part` of a model contain links to the files of another result, in a folder.

    Programs that upload a folder follow links to files, and none to folders.

    path: Path of the model, such as output/sft/NAME.
    model: Its folder in the store.
    """
    place = versions_folder(path) / model.name / part
    links = {place / file.relative_to(folder): file for file in walk_files(folder)}
    for link in list(walk_files(place)):
        # Of another result, and not of the user.
        if link not in links and link.is_symlink() and KEY.search(os.readlink(link)):
            link.unlink()
    for link, file in links.items():
        replace_link(link, link_text(link, file))


def is_linked(path: str | Path, folder: Path) -> bool:
    """Return whether the path of a result leads to a folder of a store."""
    # A version is complete with its last link; people may replace links to its files.
    *_, last, of_path, of_manifest = _links(Path(path), folder)
    return all(_has_text(link, text) for link, text in (last, of_path, of_manifest))


def _links(path: Path, folder: Path) -> list[tuple[Path, str]]:
    """Return the links by which a path leads to a folder, and their texts.

    They are made in this order: of the version, of the path itself, and of its manifest.
    """
    version, files = versions_folder(path) / folder.name, [folder]
    if path.parts[1] in TARGETS:
        # The manifest completes it.
        files = sorted(walk_files(folder), key=lambda file: file == folder / MANIFEST)
    targets = {version / file.relative_to(folder): file for file in files} | {path: version}
    links = [(link, link_text(link, target)) for link, target in targets.items()]
    return [*links, (manifest_path(path), f"{path.name}/{MANIFEST}")]


def replace_link(path: Path, text: str) -> None:
    """Have a path be a link with a text. One process at a time does this for a path."""
    if _has_text(path, text):
        return
    check_link(path)
    make_folders(path.parent)
    temporary = path.with_name(f".{path.name}.link")
    # Of a process that was killed.
    temporary.unlink(missing_ok=True)
    try:
        os.symlink(text, temporary)
    except OSError as error:
        # The error names the target.
        raise OSError(error.errno, error.strerror, str(temporary)) from None
    os.replace(temporary, path)


def _has_text(link: Path, text: str) -> bool:
    return link.is_symlink() and os.readlink(link) == text


def check_link(path: Path) -> None:
    """Raise InputError if the path of a result has a file or a folder of its own."""
    if os.path.lexists(path) and not path.is_symlink():
        raise InputError(
            f"{path}: expected a link to a result in the store, found a file or a folder of its"
            " own: move it to another place"
        )


def link_text(link: Path, target: Path) -> str:
    """Return the text of a link: relative within the working directory, otherwise absolute.

    A folder on the way may be a link itself, to another disk.
    """
    here, folder = (_real(os.path.abspath(path.parent)) for path in (link, target))
    there, tree = os.path.join(folder, target.name), os.path.join(_real(os.getcwd()), "")
    is_inside = here.startswith(tree) and there.startswith(tree)
    return os.path.relpath(there, here) if is_inside else there


# --- where links lead -------------------------------------------------------------------------


def linked_folder(path: str | Path) -> Path:
    """Return the real folder that the path, a version or a copy of a result leads to."""
    return Path(os.path.realpath(Path(path, MANIFEST))).parent


def find_results(tree: Path) -> dict[Path, Path]:
    """Return the real folders of the results in a tree by the paths that lead to them.

    The tree is an output folder, a store, or any folder with copies of results. What a store has
    and no link of the tree leads to is among them, also without a manifest.
    """
    found = {
        path: linked_folder(path)
        for path in _links_and_copies(tree)
        # A link may lead to a result that was removed.
        if not path.is_file()
        and (os.path.lexists(path / MANIFEST) or KEY.fullmatch(Path(os.readlink(path)).name))
    }
    stored = [*stored_folders(tree), *stored_folders(tree / STORE.name)]
    linked = set(found.values())
    return found | {path: path.resolve() for path in stored if path.resolve() not in linked}


def _links_and_copies(tree: Path) -> Iterator[Path]:
    """Yield the links in a tree, and the folders and manifests that `cp -rL` makes of results.

    Its store, its versions and hidden files do not count. Its folders may be links to other disks.
    """
    seen: set[str] = set()
    pending = [tree]
    while pending:
        parent = pending.pop()
        real = os.path.realpath(parent)
        # Links may lead in a circle.
        if real in seen:
            continue
        seen.add(real)
        # Another process may delete a folder.
        with suppress(FileNotFoundError, NotADirectoryError):
            for name in sorted(os.listdir(parent)):
                path = parent / name
                if name.startswith(".") or path in (tree / STORE.name, tree / VERSIONS):
                    continue
                if path.is_symlink() or is_copy(path) or is_manifest(path):
                    yield path
                if path.is_dir() and not is_copy(path):
                    pending.append(path)


def is_manifest(path: Path) -> bool:
    """Return whether a path has the name of a manifest beside the path of a result."""
    return path.name.endswith(f".{MANIFEST}")


# --- versions ---------------------------------------------------------------------------------


def versions_folder(path: str | Path) -> Path:
    """Return the folder of the versions of a result, given its path below output/."""
    output, *names = Path(path).parts
    return Path(output, VERSIONS, *names)


def named_versions(output: Path) -> dict[Path, list[str]]:
    """Return the paths of results that lead, or led once, to each real folder of the store."""
    found: dict[Path, list[str]] = {}
    for entry in sorted((output / VERSIONS).rglob("*")):
        # Not a name, or a version that was removed.
        if KEY.fullmatch(entry.name) and (entry / MANIFEST).exists():
            path = output / entry.parent.relative_to(output / VERSIONS)
            found.setdefault(linked_folder(entry), []).append(str(path))
    return found


def versions_of(path: Path) -> list[Path]:
    """Return the real folders that the path of a result leads to, or led to once."""
    folders = named_versions(Path(*path.parts[:1]))
    return [folder for folder, paths in folders.items() if str(path) in paths]


def find_version(stage: str, recipe: str) -> dict[str, Path]:
    """Return the folders in the store with the training of a version and its newest evaluation.

    Raises InputError if not one training has this name and key, or it has no evaluation.

    stage: sft, reward, dpo or rlhf.
    recipe: NAME@KEY, with the start of the key of the training.
    """
    name, _, start = recipe.partition("@")
    path = Path("output", stage, name)
    trainings = [folder for folder in versions_of(path) if start and folder.name.startswith(start)]
    if len(trainings) != 1:
        raise InputError(
            f"{recipe}: {path} has {len(trainings)} versions with this key: python"
            f" scripts/store.py list {path}"
        )
    content = content_digest(require_manifest(trainings[0] / MANIFEST))
    evaluations = [
        folder
        for folder in versions_of(Path("output/eval", stage, name))
        for entry in require_manifest(folder / MANIFEST)["inputs"].values()
        if entry["digest"] == content
    ]
    if not evaluations:
        raise InputError(f"{recipe}: {trainings[0]} was not evaluated")
    newest = max(evaluations, key=lambda folder: folder.stat().st_mtime)
    return {"training": trainings[0], "evaluation": newest}


def read_version_file(folder: str | Path, name: str) -> str:
    """Return the text of a file of a result in the store; raise InputError if it is damaged."""
    path = Path(folder, name)
    recorded = require_manifest(Path(folder, MANIFEST))["files"].get(name, {})
    if not path.is_file() or file_digest(path) != recorded.get("sha256"):
        raise InputError(
            f"{path} is damaged or was removed from the store: compare another version"
        )
    return path.read_text()


# --- roots ------------------------------------------------------------------------------------


def register_root(store: Path, output: Path) -> None:
    """Note in a store that the links of an output folder lead to its results."""
    folder, place = os.path.realpath(output), os.path.realpath(store)
    # Relative if the store is in it: both may be moved.
    is_inside = Path(place).is_relative_to(folder)
    name = os.path.relpath(folder, place) if is_inside else folder
    path = store / ROOTS / digest([name, "" if is_inside else platform.node()])[:16]
    # Another machine may have another folder at this path.
    if not (output / IDENTITY).exists():
        write_atomically(output / IDENTITY, secrets.token_hex(16))
    # Anything may be in them after a power cut.
    text = f"{name}\n{(output / IDENTITY).read_text(errors='replace')}"
    if not path.exists() or path.read_text(errors="replace") != text:
        make_folders(path.parent)
        write_atomically(path, text)


def paths_by_key(store: Path, output: Path) -> dict[str, list[Path]]:
    """Return the paths that need results, in all output folders that use a store, by keys.

    They are links to results or into them, and copies. By keys and not by folders, because a store
    may have been moved since. Raises InputError if what a root needs is unknown.

    output: The one of this working directory, which is a root too.
    """
    roots = [output]
    for path in sorted((store / ROOTS).glob("[0-9a-f]*")):
        # Empty after a power cut, for example.
        name, _, identity = path.read_text(errors="replace").partition("\n")
        root = store / (name or "a folder without a name")
        file = root / IDENTITY
        # An empty folder without this file is where a disk is to be mounted.
        if not file.exists() or file.read_text(errors="replace") != identity:
            raise InputError(
                f"{root}, which uses this store, does not exist on this machine or cannot be read:"
                f" trim the store where it does; or, if it was deleted, delete {path} too"
            )
        if not output.is_dir() or not root.samefile(output):
            roots.append(root)
    found: dict[str, list[Path]] = {}
    for path in (path for root in roots for path in _links_and_copies(root)):
        is_link, parts = path.is_symlink(), list[str]()
        if is_link:
            parts += (*Path(os.readlink(path)).parts, *Path(os.path.realpath(path)).parts)
        elif path.resolve().is_relative_to(store.resolve()):
            continue
        if manifest := read_manifest(path if is_manifest(path) else path / MANIFEST):
            parts += result_id(manifest).split("/")
        keys = set(filter(KEY.fullmatch, parts))
        if not keys and not (is_link and (path.exists() or is_manifest(path))):
            raise InputError(
                f"{path.parent.resolve() / path.name} leads nowhere or is damaged: which result it"
                " needs is unknown: mount its disk, delete it, or move it to another place"
            )
        for key in keys:
            found.setdefault(key, []).append(path)
    return found
