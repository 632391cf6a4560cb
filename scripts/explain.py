"""Say why results are stale: what changed since each was made, and what that makes stale in turn.

    python scripts/why.py output/rlhf/1.3b
    python scripts/why.py output/rlhf/mine -- --configfile mine.yaml --config seed=2

What a result was made from is in its manifest; what it would be made from now comes from a dry run
of Snakemake, which gets the options behind --. Nothing is built, and only spec files are written.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from snakechat.planning.changes import changed_settings, changes_of, exchanged_inputs, few, name_of
from snakechat.planning.dry_run import arguments_of, before, dry_run, planned_jobs
from snakechat.workflow.digests import digest, file_digest
from snakechat.workflow.manifest import manifest_path, read_manifest


def main():
    """Plan, compare, tell."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [-h] [targets ...] [-- options of snakemake]",
    )
    parser.add_argument("targets", nargs="*", help="as for snakemake; without any, what was built")
    arguments, options = arguments_of(parser, sys.argv[1:])
    targets = arguments.targets
    folder, plan = dry_run(targets + options)
    os.chdir(folder)
    jobs = {
        path: StaleJob(spec, placement.get("source"), reason)
        for path, (spec, placement, reason) in planned_jobs(plan).items()
    }
    if not jobs:
        what = ", ".join(targets) or "all that was built"
        print(f"{what} {'are' if len(targets) > 1 else 'is'} up to date")
    groups = {}
    for job in jobs.values():
        find_causes(job, jobs)
        groups.setdefault(tuple(job.causes), []).append(job)
    # Jobs without a cause of their own are told of behind those before them.
    groups.pop((), None)
    for causes, roots in groups.items():
        tell(causes, roots, jobs)


def tell(causes, roots, jobs):
    """Print why some jobs are stale, and what that makes stale."""
    first, *others = map(str, roots)
    print(f"{first}: {causes[0]}" if len(causes) == 1 else "\n  ".join([f"{first}:", *causes]))
    if others:
        print(f"  the same for: {', '.join(others)}")
    reached = list(roots)
    for job in jobs.values():
        if job not in reached and any(before in reached for before in job.before(jobs)):
            reached.append(job)
    after = reached[len(roots) :]
    # Their results are taken up again if the manifests that they read turn out the same.
    in_doubt = [job for job in after if job.as_recorded and not job.causes]
    if stale := [str(job) for job in after if job not in in_doubt]:
        print(f"  makes stale: {', '.join(stale)}")
    if in_doubt:
        print(f"  puts in doubt: {', '.join(map(str, in_doubt))} (kept if it comes out as before)")


# --- what would run ---------------------------------------------------------------------------


class StaleJob:
    """A job that would run.

    spec: its spec of today. source: the folder of its files from outside. reason: why Snakemake
    runs it. causes: why it is stale by itself. known: all that is known to have changed in jobs
    before it, told or not. as_recorded: whether its result was made from the same spec.
    """

    def __init__(self, spec, source, reason):
        self.spec = spec
        self.source = source
        self.reason = reason
        self.causes = []
        self.known = set()
        self.as_recorded = False

    def __str__(self):
        return name_of(self.spec)

    def before(self, jobs):
        """The jobs, of those that would run, whose results this one reads."""
        return [jobs[path] for path in before(self.spec, jobs)]


# --- what changed -----------------------------------------------------------------------------


def find_causes(job, jobs):
    """Find what made a job stale, beside the jobs before it: these have had their turn."""
    spec, before = job.spec, job.before(jobs)
    manifest, job.causes = record_of(spec["path"])
    job.known = set().union(*(other.known for other in before))
    if manifest:
        recorded = manifest["spec"]
        job.as_recorded = digest(recorded) == digest(spec)
        changes = changes_of(recorded, spec, manifest.get("facts", {}), job.source)
        exchanged = exchanged_inputs(recorded, spec)
        rebuilt = rebuilt_inputs(manifest, spec, jobs)
        # A setting that changed says by itself why other inputs are read.
        told = rebuilt if changed_settings(recorded, spec) else rebuilt + exchanged
        job.causes += changes + lost_files(spec["path"], manifest["files"])
        job.causes += [cause for cause in told if cause not in job.known]
        job.known |= {*rebuilt, *exchanged}
    if not job.causes and not before:
        # That it was told to run it, for instance.
        job.causes = [f"Snakemake's reason: {job.reason}"]


def record_of(path):
    """The manifest of a result and what is wrong with it: ({...}, []), or (None, ["never built"]).

    Where a failed rerun took the manifest away, the copy in the folder serves.
    """
    beside = manifest_path(path)
    if manifest := read_manifest(beside):
        return manifest, []
    if beside.exists():
        trouble = f"{beside} cannot be read"
    elif Path(path).exists():
        trouble = f"{beside} is gone"
    else:
        trouble = f"{path} is gone" if Path(f"{path}.run.json").exists() else "never built yet"
    return read_manifest(Path(path, "manifest.json")), [trouble]


def lost_files(path, files):
    """Files of a result that are missing or of another size than its manifest says."""
    if not Path(path).is_dir():
        return [f"{path} is gone"]
    sizes = {name: size_of(Path(path, name)) for name in files}

    def describe(name):
        if sizes[name] is None:
            return f"{path}/{name} is missing"
        return f"{path}/{name} has another size ({files[name]['size']:,} -> {sizes[name]:,} bytes)"

    names = [name for name in files if sizes[name] != files[name]["size"]]
    return few(names, describe, f"{path}: {{}} more files are missing or have another size")


def size_of(path):
    """Bytes of a file; None where there is none."""
    return path.stat().st_size if path.is_file() else None


def rebuilt_inputs(manifest, spec, jobs):
    """Inputs that were built anew since a result was made from them, and are up to date."""
    changes = {}
    for key, entry in spec["inputs"].items():
        recorded = manifest["spec"]["inputs"].get(key)
        beside = manifest_path(entry["path"])
        if entry["path"] in jobs or not recorded or name_of(recorded) != name_of(entry):
            continue
        if recorded["spec"] != entry["spec"]:
            changes |= dict.fromkeys(rebuilt_from(recorded, entry))
        elif beside.exists() and file_digest(beside) != manifest["inputs"].get(key):
            changes[f"{name_of(entry)} was built again, to other content"] = None
    return list(changes)


def spec_file(entry):
    """Where the spec of a job among the inputs of another was written when it was planned."""
    return Path(f"output/specs/{entry['rule']}/{entry['name']}-{entry['spec'][:16]}.json")


def rebuilt_from(recorded, entry):
    """What changed before a job was built anew, as far as the spec files of both builds are there.

    recorded, entry: the job among the inputs of a spec, then and now.
    """
    unknown = [f"{name_of(entry)} was built anew since"]
    try:
        old, new = (json.loads(spec_file(job).read_text()) for job in (recorded, entry))
    except FileNotFoundError:
        return unknown
    if changes := changes_of(old, new, {}):
        return [f"{unknown[0]}: {'; '.join(changes)}"]
    # Then a job before it changed.
    deeper = {}
    for key, inner in new["inputs"].items():
        before = old["inputs"].get(key)
        if before and before["spec"] != inner["spec"]:
            deeper |= dict.fromkeys(rebuilt_from(before, inner))
    return list(deeper) or unknown


if __name__ == "__main__":
    main()
