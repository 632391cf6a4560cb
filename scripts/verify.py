"""Check an output tree: each result against its manifest, each manifest against those before it.

    python scripts/verify.py output
    python scripts/verify.py reproduced/output --same-as output

With --same-as, also each result, file by file, against that of the same name in another tree.

Prints a line for each trouble, then one that sums up. Exits with 0 if all is as recorded, with 1 if
it is not, with 2 if there are no results to check. Changes nothing.
"""

import argparse
import fnmatch
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from snakechat.workflow.digests import digest, file_digest
from snakechat.workflow.manifest import UNLISTED_FILES, manifest_path, read_manifest

BESIDE = ".manifest.json"
# Files that tell times and memory, by rule: no two builds have the same ones.
TELL_TIMES = {"write_record": "*", "draw_zero": "*", "draw_report": "costs.*"}


def main():
    """Find the results, digest their files side by side, tell what is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tree", nargs="?", default="output", type=Path, help="default: output")
    parser.add_argument("--same-as", type=Path, metavar="TREE", help="another build to compare")
    arguments = parser.parse_args()
    tree, twin_tree = arguments.tree, arguments.same_as
    results = {folder: files_of(folder) for folder in results_in(tree)}
    if not results:
        parser.error(f"no results in {tree}" if tree.is_dir() else f"there is no folder {tree}")
    twins = {folder: twin_tree / folder.relative_to(tree) for folder in results if twin_tree}
    files = results | {twin: files_of(twin) for twin in twins.values()}
    facts = digested(files)
    troubles = 0
    for folder in results:
        found = troubles_of(folder, facts[folder])
        if twin_tree:
            found = [*found, *differences(folder, twins[folder], facts)]
        for trouble in found:
            print(trouble)
            troubles += 1
    number = sum(len(names) for names in results.values())
    size = sum(file["size"] for folder in results for file in facts[folder].values())
    fine = f"the same as in {twin_tree}" if twin_tree else "all as recorded"
    outcome = f"{troubles:,} troubles" if troubles else fine
    print(f"{len(results):,} results, {number:,} files, {size:,} bytes: {outcome}")
    sys.exit(1 if troubles else 0)


def digested(folders):
    """Facts of all files of folders (paths by name), by folder and name. Several at a time."""
    paths = [path for files in folders.values() for path in files.values()]
    # hashlib lets other threads run. disable=None: no bar where nobody would see it.
    with ThreadPoolExecutor() as pool:
        bar = tqdm(pool.map(facts_of, paths), total=len(paths), unit="file", disable=None)
        facts = dict(zip(paths, bar, strict=True))
    return {
        folder: {name: facts[path] for name, path in files.items()}
        for folder, files in folders.items()
    }


def results_in(tree):
    """Result folders, there or not: with a manifest beside or inside, or among such folders."""
    for parent, folders, files in os.walk(tree, followlinks=True):
        # Hidden ones belong to jobs that run or were killed.
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        results = {name.removesuffix(BESIDE) for name in files if name.endswith(BESIDE)}
        results |= {f for f in folders if results or Path(parent, f, "manifest.json").exists()}
        folders[:] = [name for name in folders if name not in results]
        yield from (Path(parent, name) for name in sorted(results))


def files_of(folder):
    """Paths of the files of a result, by their names in its manifest."""
    return {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in UNLISTED_FILES
    }


def facts_of(path):
    """Size and sha256 of a file, as a manifest has them; or size 0, and why it cannot be read."""
    try:
        return {"size": path.stat().st_size, "sha256": file_digest(path)}
    except OSError as error:
        return {"size": 0, "error": error.strerror}


def troubles_of(folder, found):
    """Yield what is wrong with a result, a line each. found: the facts of its files, by name."""
    beside = manifest_path(folder)
    if not beside.exists():
        yield f"{folder}: no manifest beside it"
        return
    manifest = read_manifest(beside)
    if manifest is None:
        yield f"{beside}: cannot be read"
        return
    if folder.is_dir():
        yield from changed_files(folder, manifest["files"], found)
        inside = folder / "manifest.json"
        if not inside.is_file():
            yield f"{inside}: missing"
        elif inside.read_bytes() != beside.read_bytes():
            yield f"{inside}: differs from {beside}"
    else:
        yield f"{folder}: missing"
    yield from changed_inputs(folder, manifest)


def changed_files(folder, recorded, found):
    """Yield the files of a result that are not those of its manifest."""
    for name in sorted(recorded.keys() | found):
        if name not in found:
            yield f"{folder}/{name}: missing"
        elif name not in recorded:
            yield f"{folder}/{name}: added"
        elif "error" in found[name]:
            yield f"{folder}/{name}: {found[name]['error']}"
        elif found[name]["size"] != recorded[name]["size"]:
            sizes = f"{recorded[name]['size']:,} -> {found[name]['size']:,}"
            yield f"{folder}/{name}: changed ({sizes} bytes)"
        elif found[name] != recorded[name]:
            yield f"{folder}/{name}: changed"


def differences(folder, twin, facts):
    """Yield how a result differs from that of another build, a line each."""
    manifests = [read_manifest(manifest_path(path)) for path in (folder, twin)]
    if manifests[1] is None:
        yield f"{twin}: no manifest beside it"
    elif manifests[0] is not None and manifests[0]["spec"] != manifests[1]["spec"]:
        yield f"{twin}: made from another spec"
    else:
        times = TELL_TIMES.get(manifests[1]["spec"]["rule"], "")
        for name in sorted(facts[folder].keys() | facts[twin]):
            same = facts[folder].get(name) == facts[twin].get(name)
            if not same and not fnmatch.fnmatch(name, times):
                yield f"{folder}/{name}: differs from {twin}/{name}"
        if not times and manifests[0] != manifests[1]:
            yield f"{manifest_path(folder)}: differs from {manifest_path(twin)}"


def changed_inputs(folder, manifest):
    """Yield the inputs of a result whose manifests are not those that it was made from."""
    spec, beside = manifest["spec"], manifest_path(folder)
    # The tree may have been moved, or this be a part of it: what counts stands behind "output".
    where, absolute = Path(spec["path"]).parts[1:], Path(os.path.abspath(folder))
    if absolute.parts[-len(where) :] != where:
        yield f"{beside}: is that of {spec['path']}"
        return
    tree = absolute.parents[len(where) - 1]
    for key, entry in spec["inputs"].items():
        path = manifest_path(tree.joinpath(*Path(entry["path"]).parts[1:]))
        before = read_manifest(path)
        if not path.exists():
            trouble = "is missing"
        elif before is None:
            trouble = "cannot be read"
        elif digest(before["spec"]) != entry["spec"]:
            trouble = "was made from another spec"
        elif file_digest(path) != manifest["inputs"].get(key):
            trouble = "has changed since"
        else:
            continue
        yield f"{beside}: input {key}: {manifest_path(entry['path'])} {trouble}"


if __name__ == "__main__":
    main()
