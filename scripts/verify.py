"""Check an output tree or a store: each result against its manifest, each path against its inputs.

    python scripts/verify.py output
    python scripts/verify.py /team/store
    python scripts/verify.py reproduced/output --same-as output

Reads all files of all results, earlier versions included. With --same-as, also compares each result
with the result at the same path in another tree, file by file.

Prints one line per problem, one line per accepted change (scripts/accept.py), and a summary. The
exit code is 0 without problems, 1 with problems and 2 without results. Changes nothing: delete the
folder of a damaged result, and build it again.
"""

import argparse
import fnmatch
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from snakechat.workflow.manifest import MANIFEST, Manifest, input_digest, read_manifest
from snakechat.workflow.printable import printable_line
from snakechat.workflow.store import KEY, Damaged, check_result, store_key
from snakechat.workflow.tool_errors import one_line_errors

# Files that contain times or memory, by rule: they differ between any two builds.
VARYING_FILES = {
    "draw_report": "*",
    "draw_page": "*.html",
}


@one_line_errors()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tree", nargs="?", default="output", type=Path, help="default: output")
    parser.add_argument("--same-as", type=Path, metavar="TREE", help="another build to compare")
    arguments = parser.parse_args()
    tree, twin_tree = arguments.tree, arguments.same_as
    results = find_results(tree)
    if not results:
        parser.error(f"no results in {tree}" if tree.is_dir() else f"there is no folder {tree}")
    num_problems, sizes = 0, list[int]()
    for folder in results:
        problems = list(find_problems(folder))
        manifest = read_manifest(folder / MANIFEST)
        if manifest is not None:
            sizes += [file["size"] for file in manifest["files"].values()]
            if twin_tree and folder.is_symlink():
                problems += find_differences(folder, manifest, twin_tree / folder.relative_to(tree))
        for line in [*(acceptances(folder, manifest) if manifest else ()), *problems]:
            print(printable_line(line))
        num_problems += len(problems)
    if num_problems:
        outcome = f"{num_problems:,} problems"
    else:
        outcome = f"the same as in {twin_tree}" if twin_tree else "all as recorded"
    print(f"{len(results):,} results, {len(sizes):,} files, {sum(sizes):,} bytes: {outcome}")
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


# --- one tree ---------------------------------------------------------------------------------


def find_problems(folder: Path) -> Iterator[str]:
    """Yield what is wrong with a result, one line each. Of several files, the first one counts."""
    if not folder.is_dir():
        yield f"{folder}: missing"
        return
    manifest = read_manifest(folder / MANIFEST)
    if manifest is None:
        yield f"{folder / MANIFEST}: cannot be read"
        return
    # Copies of results may have any name.
    name = folder.resolve().name
    key = name if KEY.fullmatch(name) else store_key(manifest["spec"], manifest["inputs"])
    try:
        check_result(folder, key)
    except Damaged as damage:
        yield f"{folder}: {damage}"
    except OSError as error:
        yield f"{error.filename}: {error.strerror}"
    if folder.is_symlink():
        yield from changed_inputs(folder, manifest)


def acceptances(folder: Path, manifest: Manifest) -> list[str]:
    """Describe the changes that a person accepted for a result (scripts/accept.py)."""
    return [
        f"{folder}: accepted on {entry['date']} because {entry['because']}:"
        f" {'; '.join(entry['changes'])}"
        for entry in manifest.get("accepted", ())
    ]


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


# --- two trees --------------------------------------------------------------------------------


def find_differences(folder: Path, manifest: Manifest, twin: Path) -> Iterator[str]:
    """Yield the differences between a result and that of another build, one line each."""
    twin_manifest = read_manifest(twin / MANIFEST)
    if twin_manifest is None:
        yield f"{twin}: has no manifest"
        return
    if manifest["spec"] != twin_manifest["spec"]:
        yield f"{twin}: was made from another spec"
        return
    # The files have to agree with the manifest before the manifests are compared.
    yield from find_problems(twin)
    varying = VARYING_FILES.get(twin_manifest["spec"]["rule"], "")
    files, twin_files = manifest["files"], twin_manifest["files"]
    for name in sorted(files.keys() | twin_files.keys()):
        if files.get(name) != twin_files.get(name) and not fnmatch.fnmatch(name, varying):
            yield f"{folder}/{name}: differs from {twin}/{name}"
    if not varying and {**manifest, "files": {}} != {**twin_manifest, "files": {}}:
        yield f"{folder / MANIFEST}: differs from {twin / MANIFEST}"


if __name__ == "__main__":
    main()
