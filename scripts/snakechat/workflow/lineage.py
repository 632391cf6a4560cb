"""What a result was made from: every job before it, back to the sources.

Each manifest has it whole, so that a checkpoint which was copied elsewhere still tells it. A
lineage is a dict of jobs by path: rule, name, settings, facts (a commit, rows dropped), number and
digest of the external files, digest of the spec, and the paths of the inputs.

Standard library only, as snakechat.workflow.digests.
"""

from snakechat.workflow.digests import digest


def lineage_behind(manifests):
    """The lineage of a job from the manifests of its inputs."""
    jobs = {}
    for manifest in manifests:
        spec = manifest["spec"]
        jobs |= manifest["lineage"]
        jobs[spec["path"]] = {
            "rule": spec["rule"],
            "name": spec["name"],
            "settings": spec["settings"],
            "facts": manifest["facts"],
            "files": {"number": len(spec["files"]), "digest": digest(spec["files"])},
            "spec": digest(spec),
            "inputs": paths_of(spec["inputs"]),
        }
    return jobs


def paths_of(inputs):
    """Paths of a spec's inputs, each once."""
    return sorted({entry["path"] for entry in inputs.values()})


def direct_inputs(jobs, path):
    """Inputs of a job in a lineage, without those that another of its inputs was made from too."""
    inputs = jobs[path]["inputs"]
    return [one for one in inputs if not any(one in behind(jobs, other) for other in inputs)]


def behind(jobs, path):
    """All jobs that a job was made from, near or far."""
    near = set(jobs[path]["inputs"])
    return near.union(*(behind(jobs, one) for one in near))


def in_columns(jobs):
    """Paths of a lineage in columns: each job stands right of all its inputs."""
    column = {}

    def place(path):
        if path not in column:
            column[path] = 1 + max((place(path) for path in jobs[path]["inputs"]), default=-1)
        return column[path]

    for path in sorted(jobs):
        place(path)
    return [
        [path for path in column if column[path] == number]
        for number in range(1 + max(column.values(), default=-1))
    ]
