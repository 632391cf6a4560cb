"""Accept results although code or pinned libraries changed since: they are not built again.

    python scripts/accept.py output/rlhf/1.3b --because "new packing: the losses are the same"
    python scripts/accept.py output/rlhf/mine --because "..." --configfile mine.yaml

Accepts every result that the target depends on and whose code or libraries differ from today's. A
result whose settings, files or inputs differ cannot be accepted: then nothing is changed.
Results that do not exist are left to the next build.

The reason, the date and the digests of both specs are recorded in the manifest, in the lineage of
results that are made later, in the model card and in the report. scripts/verify.py lists them.
"""

import datetime
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from snakechat.jobs.planner import plan_build, plan_parser
from snakechat.jobs.stale_causes import causes_of, job_name, spec_changes
from snakechat.jobs.staleness import PlannedJob
from snakechat.workflow.errors import InputError, one_line_errors
from snakechat.workflow.links import link_result, linked_folder, lock_output
from snakechat.workflow.manifest import (
    MANIFEST,
    RUN_RECORD,
    UNLISTED_FILES,
    Manifest,
    digest,
    fsync,
    manifest_path,
    read_manifest,
    result_id,
    sealed_json,
    without_names,
    write_atomically,
)
from snakechat.workflow.store import (
    delete_work,
    locked,
    make_folders,
    publish,
    result_damage,
    work_path,
)


@one_line_errors()
def main() -> None:
    parser = plan_parser(__doc__, "--because REASON target ")
    parser.add_argument("--because", required=True, metavar="REASON")
    arguments, words = parser.parse_known_args()
    reason = " ".join(arguments.because.split())
    if not reason:
        parser.error("--because is empty: say why the results are equivalent")
    plan = plan_build(words)
    if not plan.targets:
        parser.error("name the targets whose results are equivalent")
    lock_output()
    accepted = [
        (job, manifest, changes)
        for job in plan.stale.values()
        if (manifest := read_manifest(manifest_path(job.spec["path"])))
        and (changes := acceptable_changes(job.spec, plan.configfiles, manifest))
    ]
    for job, manifest, changes in accepted:
        accept(job, manifest, changes, reason)
        print(f"{job_name(job.spec)} is accepted: {'; '.join(changes)}")
    if not accepted:
        print(f"{', '.join(plan.targets)}: nothing to accept")


def acceptable_changes(
    spec: dict[str, Any], files: Iterable[Path], manifest: Manifest
) -> list[str]:
    """Return what changed of the code and the libraries of a stale result since it was made.

    Raises InputError if the result is damaged, or differs in anything else.

    files: As for causes_of.
    """
    recorded = manifest["spec"]
    # A person can judge that other code and other libraries are equivalent.
    kept = {**spec, "code": recorded["code"], "requirements": recorded["requirements"]}
    causes = causes_of(kept, files)
    if causes or digest(without_names(kept)) != digest(recorded):
        raise InputError(
            f"{job_name(spec)}: only changes of code and libraries can be accepted:"
            f" {'; '.join(causes)}: build it again"
        )
    if damage := result_damage(linked_folder(spec["path"])):
        raise InputError(f"{spec['path']}: {damage}: delete it and build it again")
    return spec_changes(recorded, spec)


def accept(job: PlannedJob, manifest: Manifest, changes: list[str], reason: str) -> None:
    """Add a copy of a result to the store that counts for a job's spec, and record that."""
    spec = without_names(job.spec)
    entry = {
        "because": reason,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "changes": changes,
        "from": digest(manifest["spec"]),
        "to": digest(spec),
    }
    accepted = {**manifest, "spec": spec, "accepted": [*manifest.get("accepted", ()), entry]}
    folder = Path(job.options.stores[0], result_id(accepted))
    with locked(folder):
        delete_work(folder)
        unfinished = work_path(folder, "result")
        make_folders(unfinished)
        ignored = shutil.ignore_patterns(*UNLISTED_FILES - {RUN_RECORD})
        shutil.copytree(
            linked_folder(job.spec["path"]),
            unfinished,
            ignore=ignored,
            copy_function=link_or_copy,
            dirs_exist_ok=True,
        )
        write_atomically(unfinished / MANIFEST, sealed_json(accepted))
        publish(folder)
        link_result(job.spec["path"], folder)


def link_or_copy(source: str, target: str) -> None:
    """Make a hard link to a file of a result, or a copy where links are impossible.

    Results are replaced by rename and never written in place, so that both stay as they are.
    """
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        # Another file system, one without links, or a file of another user.
        shutil.copyfile(source, target)
        fsync(target)


if __name__ == "__main__":
    main()
