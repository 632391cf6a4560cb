# The spec of a job, and whether its result is one of today's.
#
# A spec is the canonical JSON of all that determines a job's result, the digests of its upstream
# jobs' specs among it. Staleness is decided here, by comparing the spec with the manifest of the
# result on disk, and told to Snakemake by the one thing that it always looks at: file times. The
# default profile leaves it no other trigger.

import errno
import json

from snakechat.workflow.code_digests import requirements_digest
from snakechat.workflow.digests import DigestCache, digest, file_digest, write_atomically
from snakechat.workflow.manifest import parse_manifest

DESCRIPTIONS = {}

# The time of what is stale. Not 0, which Snakemake takes for no time at all.
STALE = 10**9

# The times of results that are not there: as new as what they would be made from.
ABSENT = {}

# Whether Snakemake only reports what is there, as it would do of stale results too.
OPTIONS = {word.partition("=")[0] for word in sys.argv}
REPORTING = bool(OPTIONS & {"--report", "--reporter"}) and "--report-after-run" not in OPTIONS

# What a result's page is called, which users ask for and a rule puts beside the result.
PAGES = {
    "write_record": ".md",
    "draw_zero": ".html",
    "compare_runs": ".html",
    "prompt_eval": ".html",
    "rw_eval": ".html",
}


def job(rule, folder):
    """Register a function of a name that describes the rule's job: settings, inputs, files."""

    def register(describe):
        DESCRIPTIONS[rule] = (folder, describe)
        return describe

    return register


def folder_of(rule, name):
    return f"output/{DESCRIPTIONS[rule][0]}/{name}"


def manifest_of(rule, name):
    return f"{folder_of(rule, name)}.manifest.json"


@cache
def code_of(rule, reward_functions):
    name = "tokenize_phase" if rule.startswith("tokenize_") else rule
    return code_digests(ROOT / f"scripts/{name}.py", reward_functions)


@cache
def requirements():
    return requirements_digest(ROOT / "requirements.txt")


@cache
def digest_cache():
    return DigestCache("output/specs/digests.json")


@cache
def spec_of(rule, name):
    """The spec of a job and its digest."""
    described = DESCRIPTIONS[rule][1](name)
    settings = described["settings"]
    inputs = {
        key: {
            "rule": upstream,
            "name": upstream_name,
            "path": folder_of(upstream, upstream_name),
            "spec": spec_of(upstream, upstream_name)[1],
        }
        for key, (upstream, upstream_name) in described.get("inputs", {}).items()
    }
    spec = {
        "rule": rule,
        "name": name,
        "path": folder_of(rule, name),
        "settings": settings,
        "inputs": inputs,
        "files": described.get("files", {}),
        "code": code_of(rule, tuple(settings.get("reward_functions", ()))),
        "requirements": requirements(),
    }
    return spec, digest(spec)


@cache
def input_digest(path):
    """Digest of an upstream manifest; None where there is none."""
    return file_digest(path) if Path(path).exists() else None


def is_fresh(spec, manifest):
    """Whether the result of a manifest was made from this spec and these inputs, and is there."""
    if manifest is None or digest(manifest["spec"]) != digest(spec):
        return False
    for key, job in spec["inputs"].items():
        there = input_digest(f"{job['path']}.manifest.json")
        if there is not None and there != manifest["inputs"].get(key):
            return False
    for name, facts in manifest["files"].items():
        file = Path(spec["path"], name)
        if not file.is_file() or file.stat().st_size != facts["size"]:
            return False
    return True


@cache
def spec_file(rule, name):
    """Path of the job's spec, written if it is new, once the result's time tells its state."""
    spec, spec_digest = spec_of(rule, name)
    path = Path(f"output/specs/{rule}/{name}-{spec_digest[:16]}.json")
    for job in spec["inputs"].values():
        spec_file(job["rule"], job["name"])
    try:
        if not path.exists():
            write_atomically(path, json.dumps(spec, indent=1, sort_keys=True) + "\n")
        tell_state(spec, path)
    except OSError as error:
        fail(f"{spec['path']} cannot be written: {error.strerror}")
    return str(path)


def tell_state(spec, spec_path):
    """Give a result the time that its state asks for.

    A stale result is made older than anything. A fresh one is made as new as its spec and its
    inputs at least, whatever has been touched, copied or replaced since.
    """
    manifest = Path(f"{spec['path']}.manifest.json")
    upstream = [time_of(job["path"]) for job in spec["inputs"].values()]
    made_from = max(spec_path.stat().st_mtime_ns, *upstream, 0)
    if not manifest.exists():
        ABSENT[spec["path"]] = made_from
        if manifest.parent.exists() and not os.access(manifest.parent, os.W_OK):
            raise PermissionError(errno.EACCES, "its folder is read-only")
        tell_page(spec, STALE)
        return
    with open(manifest, errors="replace") as file:
        now = os.stat(file.fileno()).st_mtime_ns
        told = STALE
        if is_fresh(spec, parse_manifest(file.read())):
            told = max(now, made_from)
        elif REPORTING:
            refuse_to_report(spec["path"], "stale")
        if told != now:
            # By the open file: a build may be putting a new manifest in its place.
            os.utime(file.fileno(), ns=(told, told))
    tell_page(spec, told)


def refuse_to_report(path, state):
    """Stop, and say how there can be a report."""
    fail(
        f"{path} is {state}, and a report tells of what is up to date: give the same command with"
        " --cores 1 in the place of --report first (python scripts/explain.py says what changed)"
    )


def time_of(path):
    """The time of a result, or that of what it would be made from.

    Snakemake looks through a result that is not there, at what is before it.
    """
    manifest = Path(f"{path}.manifest.json")
    return manifest.stat().st_mtime_ns if manifest.exists() else ABSENT[path]


def tell_page(spec, told):
    """Give the page of a result, where it has one, the time of the result."""
    page = Path(f"{spec['path']}{PAGES.get(spec['rule'], '')}")
    if page.is_file() and page.stat().st_mtime_ns != told:
        os.utime(page, ns=(told, told))


def inputs(rule):
    """Input function of a rule: its spec, and the manifests of the jobs before it.

    A job is called by the wildcards of its rule: NAME, or STAGE/NAME.
    """

    def lookup(wildcards):
        name = "/".join(wildcards)
        spec, _ = spec_of(rule, name)
        manifests = {
            key: manifest_of(job["rule"], job["name"]) for key, job in spec["inputs"].items()
        }
        return {"spec": spec_file(rule, name), **manifests}

    return lookup


def asked(stage, *makers):
    """Input function of a folder that users ask for, with the manifests of these jobs of its recipe.

    Snakemake does not miss a manifest as long as the folder is there. Therefore the folder's time is
    put back then, and the spec is an input that is newer.
    """

    def lookup(wildcards):
        manifests = [manifest_of(maker, wildcards.name) for maker in makers]
        found = {"manifests": [ancient(path) for path in manifests]}
        if REPORTING and not all(Path(path).exists() for path in manifests):
            refuse_to_report(f"output/{stage}/{wildcards.name}", "not whole")
        folder = Path(f"output/{stage}/{wildcards.name}")
        if folder.exists() and not all(Path(path).exists() for path in manifests):
            found["spec"] = spec_file(makers[0], wildcards.name)
            # Where it is, Snakemake takes its time for the folder's.
            stamp = folder / ".snakemake_timestamp"
            os.utime(stamp if stamp.exists() else folder, (1, 1))
        return found

    return lookup
