"""Check an output tree or a store: each result against its manifest, each path against its inputs.

    python scripts/verify.py output
    python scripts/verify.py /team/store
    python scripts/verify.py reproduced/output --same-as output

Reads all files of all results, earlier versions included. With --same-as, also compares each result
with the result at the same path in another tree, file by file.

Prints one line per problem, below those of a result the command that mends it, one line per
accepted change (scripts/accept.py), and a summary. Exits with 0 if there is no problem, with 1 if
there are problems, with 2 if there are no results. Changes nothing.
"""

import argparse
import fnmatch
import os
import shlex
import sys
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tqdm import tqdm

from snakechat.workflow.digests import file_digest
from snakechat.workflow.manifest import (
    MANIFEST,
    UNLISTED_FILES,
    Manifest,
    input_digest,
    read_manifest,
)
from snakechat.workflow.printable import printable_line
from snakechat.workflow.run_record import read_run_record
from snakechat.workflow.store import KEY, linked_folder
from snakechat.workflow.tool_errors import one_line_errors

# Files that contain times or memory, by rule: they differ between any two builds.
VARYING_FILES = {
    "compare_zero": "zero.md",
    "draw_report": "*",
    "compare_runs": "*.html",
}

# Size and sha256 of files, by their names in the manifest.
Properties = Mapping[str, Mapping[str, Any]]


@one_line_errors()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tree", nargs="?", default="output", type=Path, help="default: output")
    parser.add_argument("--same-as", type=Path, metavar="TREE", help="another build to compare")
    arguments = parser.parse_args()
    tree, twin_tree = arguments.tree, arguments.same_as
    results = {folder: listed_files(folder) for folder in find_results(tree)}
    if not results:
        parser.error(f"no results in {tree}" if tree.is_dir() else f"there is no folder {tree}")
    twins = {
        folder: twin_tree / folder.relative_to(tree)
        for folder in results
        if twin_tree and folder.is_symlink()
    }
    properties = read_properties(results | {twin: listed_files(twin) for twin in twins.values()})
    num_problems = 0
    for folder in results:
        problems = list(find_problems(folder, properties[folder]))
        command = mending_command(folder, problems) if problems else ""
        if folder in twins:
            problems += find_differences(folder, twins[folder], properties)
        for line in [*acceptances(folder), *problems]:
            print(printable_line(line))
        if command:
            print(f"  to mend it: {printable_line(command)}")
        num_problems += len(problems)
    num_files = sum(len(names) for names in results.values())
    size = sum(file["size"] for folder in results for file in properties[folder].values())
    if num_problems:
        outcome = f"{num_problems:,} problems"
    else:
        outcome = f"the same as in {twin_tree}" if twin_tree else "all as recorded"
    print(f"{len(results):,} results, {num_files:,} files, {size:,} bytes: {outcome}")
    sys.exit(1 if num_problems else 0)


def find_results(tree: Path) -> list[Path]:
    """Return the results of a tree: the links to folders of its store, and the other folders.

    A folder is a result if it has a manifest; in a store, also without one.
    """
    links, found = [], []
    for parent, folders, files in os.walk(tree):
        # Hidden folders belong to jobs that run or were killed.
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths = [Path(parent, name) for name in folders]
        links += [path for path in paths if path.is_symlink()]
        # Links to results that do not exist any more, and no links to pages.
        files = [name for name in files if not os.path.exists(os.path.join(parent, name))]
        links += [path for name in files if (path := Path(parent, name)).is_symlink()]
        results = [path for path in paths if KEY.fullmatch(path.name) or (path / MANIFEST).exists()]
        found += [path for path in results if not path.is_symlink()]
        folders[:] = [path.name for path in paths if path not in results]
    links = [path for path in links if not path.name.endswith(f".{MANIFEST}")]
    linked = {path.resolve() for path in links}
    return sorted([*links, *(path for path in found if path.resolve() not in linked)])


def listed_files(folder: Path) -> dict[str, Path]:
    """Return the paths of the files of a result, by their names in its manifest."""
    return {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in UNLISTED_FILES
    }


def read_properties(folders: Mapping[Path, Mapping[str, Path]]) -> dict[Path, Properties]:
    """Return the properties of all files of folders, by folder and name, with a progress bar."""
    paths = [path for files in folders.values() for path in files.values()]
    # hashlib releases the GIL. disable=None hides the bar if standard error is not a terminal.
    with ThreadPoolExecutor() as pool:
        bar = tqdm(pool.map(file_properties, paths), total=len(paths), unit="file", disable=None)
        properties = dict(zip(paths, bar, strict=True))
    return {
        folder: {name: properties[path] for name, path in files.items()}
        for folder, files in folders.items()
    }


def file_properties(path: Path) -> dict[str, Any]:
    """Return the size and sha256 of a file as manifests have them, or the error of reading it."""
    try:
        return {"size": path.stat().st_size, "sha256": file_digest(path)}
    except OSError as error:
        return {"size": 0, "error": error.strerror}


# --- one tree ---------------------------------------------------------------------------------


def find_problems(folder: Path, files: Properties) -> Iterator[str]:
    """Yield what is wrong with a result, one line each."""
    if not folder.is_dir():
        yield f"{folder}: missing"
        return
    manifest = read_manifest(folder / MANIFEST)
    if manifest is None:
        problem = "cannot be read" if (folder / MANIFEST).exists() else "missing"
        yield f"{folder / MANIFEST}: {problem}"
        return
    yield from changed_files(folder, manifest["files"], files)
    if folder.is_symlink():
        yield from changed_inputs(folder, manifest)


def acceptances(folder: Path) -> list[str]:
    """Describe the changes that a person accepted for a result (scripts/accept.py)."""
    manifest = read_manifest(folder / MANIFEST) or {}
    return [
        f"{folder}: accepted on {entry['date']} because {entry['because']}:"
        f" {'; '.join(entry['changes'])}"
        for entry in manifest.get("accepted", ())
    ]


def changed_files(folder: Path, recorded: Properties, files: Properties) -> Iterator[str]:
    """Yield the files of a result that do not match its manifest."""
    for name in sorted(recorded.keys() | files):
        if name not in files:
            yield f"{folder}/{name}: missing"
        elif name not in recorded:
            yield f"{folder}/{name}: added"
        elif "error" in files[name]:
            yield f"{folder}/{name}: {files[name]['error']}"
        elif files[name]["size"] != recorded[name]["size"]:
            sizes = f"{recorded[name]['size']:,} -> {files[name]['size']:,}"
            yield f"{folder}/{name}: changed ({sizes} bytes)"
        elif files[name] != recorded[name]:
            yield f"{folder}/{name}: changed"


def changed_inputs(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Yield the inputs of a result that its path leads to and whose content changed since."""
    spec = manifest["spec"]
    # The tree may have another name than "output", or be a subfolder of it.
    expected, absolute = Path(spec["path"]).parts[1:], Path(os.path.abspath(folder))
    if absolute.parts[-len(expected) :] != expected:
        yield f"{folder}: leads to a result of {spec['path']}"
        return
    tree = absolute.parents[len(expected) - 1]
    for key, entry in spec["inputs"].items():
        path = tree.joinpath(*Path(entry["path"]).parts[1:], MANIFEST)
        upstream = read_manifest(path)
        if not path.exists():
            problem = "is missing"
        elif upstream is None:
            problem = "cannot be read"
        elif input_digest(spec, upstream) != manifest["inputs"].get(key):
            problem = "changed after this result was made"
        else:
            continue
        yield f"{folder}: input {key}: {entry['path']} {problem}"


def mending_command(folder: Path, problems: Collection[str]) -> str:
    """Return the command after which a result has none of these problems.

    Empty in a tree that has another name than "output", in which nothing can be built, and for a
    result that is missing with the record of its options.
    """
    absolute = Path(os.path.abspath(folder))
    if "output" not in absolute.parts:
        return ""
    depth = len(absolute.parts) - 1 - absolute.parts[::-1].index("output")
    root, path = Path(*absolute.parts[:depth]), "/".join(absolute.parts[depth:])
    manifest = read_manifest(folder / MANIFEST)
    if not folder.is_symlink() or (manifest and manifest["spec"]["path"] != path):
        # An earlier version, or a copy that somebody put here.
        return shlex.join(["rm", "-rf", str(folder)])
    if not folder.exists():
        return ""
    build = ["snakemake", f"{path}.{MANIFEST}", "--cores", "1", *config_options(folder)]
    build += ["--directory", str(root)] if root != Path.cwd() else []
    prefix = f"{folder}/"
    if all(line.startswith(prefix) and line.endswith(": added") for line in problems):
        return shlex.join(["rm", *(line.removesuffix(": added") for line in problems)])
    # A build compares sizes; it does not read the files again.
    is_damaged = any(line.startswith(prefix) for line in problems)
    delete = f"{shlex.join(['rm', '-rf', str(linked_folder(folder))])} && " if is_damaged else ""
    return f"{delete}{shlex.join(build)}"


def config_options(folder: Path) -> list[str]:
    """Return the options of Snakemake that change the config, as a result was built with them."""
    record = read_run_record(folder)
    options = record["options"].get("snakemake", []) if record else []
    return [str(word) for word in options] if isinstance(options, list) else []


# --- two trees --------------------------------------------------------------------------------


def find_differences(
    folder: Path, twin: Path, properties: Mapping[Path, Properties]
) -> Iterator[str]:
    """Yield the differences between a result and that of another build, one line each."""
    manifest, twin_manifest = (read_manifest(path / MANIFEST) for path in (folder, twin))
    if twin_manifest is None:
        yield f"{twin}: has no manifest"
    elif manifest is not None and manifest["spec"] != twin_manifest["spec"]:
        yield f"{twin}: was made from another spec"
    else:
        varying = VARYING_FILES.get(twin_manifest["spec"]["rule"], "")
        for name in sorted(properties[folder].keys() | properties[twin]):
            same = properties[folder].get(name) == properties[twin].get(name)
            if not same and not fnmatch.fnmatch(name, varying):
                yield f"{folder}/{name}: differs from {twin}/{name}"
        if not varying and manifest != twin_manifest:
            yield f"{folder / MANIFEST}: differs from {twin / MANIFEST}"


if __name__ == "__main__":
    main()
