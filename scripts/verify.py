"""Check the results in an output tree or a store against their manifests.

    python scripts/verify.py output
    python scripts/verify.py /team/store
    python scripts/verify.py reproduced/output --same-as output

Reads all files of all results, earlier versions included. With --same-as, also compares each result
with the result at the same path in another tree, file by file.

Prints one line per problem, one line per accepted change (scripts/accept.py), and a summary, which
counts the results that were made without limits of the kernel (docs/en/security.md). The exit
code is 0 without problems, 1 with problems and 2 without results. Changes nothing: a build makes
damaged results again when it reads them.
"""

import fnmatch
import sys
from collections.abc import Iterator
from pathlib import Path

from snakechat.workflow.errors import one_line_errors, tool_parser
from snakechat.workflow.links import find_results, linked_folder
from snakechat.workflow.manifest import MANIFEST, Manifest, digest, read_manifest, read_run_record
from snakechat.workflow.printable import printable_line
from snakechat.workflow.store import result_damage

# Files that contain times or memory, by rule: they differ between any two builds.
VARYING_FILES = {"draw_report": "*", "draw_page": "*.html"}


@one_line_errors()
def main() -> None:
    parser = tool_parser(__doc__)
    parser.add_argument("tree", nargs="?", default="output", type=Path, help="default: output")
    parser.add_argument("--same-as", type=Path, metavar="TREE", help="another build to compare")
    arguments = parser.parse_args()
    tree, twin_tree = arguments.tree, arguments.same_as
    results = find_results(tree)
    if not results:
        parser.error(f"no results in {tree}" if tree.is_dir() else f"there is no folder {tree}")
    num_problems, sizes, num_unlimited = 0, list[int](), 0
    for path, folder in sorted(results.items()):
        manifest = read_manifest(folder / MANIFEST)
        problems = list(find_problems(path, folder, manifest))
        if manifest is not None:
            num_unlimited += not (read_run_record(folder) or {}).get("hermetic")
            sizes += [file["size"] for file in manifest["files"].values()]
            if twin_tree and path.is_symlink():
                problems += find_differences(path, manifest, twin_tree / path.relative_to(tree))
            # What people accepted (scripts/accept.py).
            for entry in manifest.get("accepted", ()):
                line = f"{path}: accepted on {entry['date']} because {entry['because']}"
                print(printable_line(f"{line}: {'; '.join(entry['changes'])}"))
        for line in problems:
            print(printable_line(line))
        num_problems += len(problems)
    same = f"the same as in {twin_tree}" if twin_tree else "all as recorded"
    outcome = f"{num_problems:,} problems" if num_problems else same
    unlimited = f", {num_unlimited:,} not hermetic" if num_unlimited else ""
    print(
        f"{len(results):,} results{unlimited}, {len(sizes):,} files, {sum(sizes):,} bytes:"
        f" {outcome}"
    )
    sys.exit(num_problems > 0)


# --- one tree ---------------------------------------------------------------------------------


def find_problems(path: Path, folder: Path, manifest: Manifest | None) -> Iterator[str]:
    """Yield what is wrong with a result in a folder, one line each, given a path that leads to it.

    Of several damaged files, the first one counts.
    """
    if not folder.is_dir():
        yield f"{path}: missing"
        return
    if damage := result_damage(folder, manifest=manifest):
        yield f"{path}: {damage}"
    for name in manifest["files"] if manifest else ():
        # A link may have been replaced by an edited file.
        if (path / name).resolve() != folder / name:
            yield f"{path / name}: is not the file of {folder}"


# --- two trees --------------------------------------------------------------------------------


def find_differences(folder: Path, manifest: Manifest, twin: Path) -> Iterator[str]:
    """Yield the differences between a result and another build's, one line each."""
    twin_manifest = read_manifest(twin / MANIFEST)
    if twin_manifest is None:
        yield f"{twin}: has no manifest"
        return
    if digest(manifest["spec"]) != digest(twin_manifest["spec"]):
        yield f"{twin}: was made from another spec"
        return
    # The files have to agree with the manifest before the manifests are compared.
    yield from find_problems(twin, linked_folder(twin), twin_manifest)
    varying = VARYING_FILES.get(twin_manifest["spec"]["rule"], "")
    files, twin_files = manifest["files"], twin_manifest["files"]
    for name in sorted(files.keys() | twin_files.keys()):
        if files.get(name) != twin_files.get(name) and not fnmatch.fnmatch(name, varying):
            yield f"{folder}/{name}: differs from {twin}/{name}"
    if not varying and {**manifest, "files": {}} != {**twin_manifest, "files": {}}:
        yield f"{folder / MANIFEST}: differs from {twin / MANIFEST}"


if __name__ == "__main__":
    main()
