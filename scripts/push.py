"""Upload a trained model to the Hugging Face Hub, with its card, its evaluation and its lineage.

    python scripts/push.py output/rlhf/mine OWNER/NAME
    python scripts/push.py output/rlhf/mine OWNER/NAME --yes
    python scripts/push.py output/rlhf/mine OWNER/NAME --public --yes

Prints what it would upload, and where to; --yes uploads it, in one commit. A new repository is
private unless --public is given; an existing one stays what it is. The token is that of `hf auth
login`, or HF_TOKEN.

The model has to be up to date and undamaged, and its evaluation has to meet what the recipe expects
of it. Options of the build, such as --configfile, default to those that the model was built with.
"""

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from snakechat.config.recipes import STAGES
from snakechat.data.hub_upload import MANIFEST, Destination, find_destination, upload
from snakechat.data.licenses import license_remarks, source_licenses, source_name
from snakechat.data.model_files import CARD
from snakechat.planning.causes import causes_of
from snakechat.planning.dry_run import (
    PlannedJob,
    dry_run_with_specs,
    find_spec,
    parse_arguments,
)
from snakechat.reporting.gates import with_verdicts
from snakechat.reporting.model_card import common_license
from snakechat.reporting.published_card import (
    Result,
    evaluated_datasets,
    evaluation_results,
    private_folders,
    published_card,
)
from snakechat.reporting.verdicts import Verdict, describe, judge, read_metrics
from snakechat.workflow.digests import digest
from snakechat.workflow.errors import InputError
from snakechat.workflow.external_files import unchanged_files
from snakechat.workflow.input_checks import check_inputs
from snakechat.workflow.lineage import merge_lineages
from snakechat.workflow.manifest import Manifest, input_digest, manifest_path
from snakechat.workflow.printable import printable_line
from snakechat.workflow.run_record import read_run_record
from snakechat.workflow.valid_manifests import read_valid_manifest

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
# Prompts of the datasets, whose licences may be others than those of the model.
KEPT = {"responses.jsonl"}
WEIGHTS = (".safetensors", ".bin")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [-h] output/STAGE/RECIPE OWNER/NAME [--yes] [--public] [--allow-stale]"
        " [--allow-missed] [options of snakemake]",
    )
    parser.add_argument("target", help="output/STAGE/RECIPE")
    parser.add_argument("repository", help="OWNER/NAME on the Hub")
    parser.add_argument("--yes", action="store_true", help="upload, after printing what")
    parser.add_argument("--public", action="store_true", help="create a public repository")
    parser.add_argument("--allow-stale", action="store_true", help="upload a model that is stale")
    parser.add_argument(
        "--allow-missed", action="store_true", help="upload a model that misses expectations"
    )
    arguments, options = parse_arguments(parser, sys.argv[1:])
    try:
        push(arguments, options)
    except InputError as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        sys.exit(f"error: {error.filename or arguments.target}: {error.strerror or error}")


def push(arguments: argparse.Namespace, options: list[str]) -> None:
    """Print what is uploaded, and upload it if --yes is given."""
    match = re.fullmatch(rf"output/({'|'.join(STAGES)})/([^/]+?)/?", arguments.target)
    if match is None:
        raise InputError(
            f"{arguments.target} is not a model of a recipe: expected output/STAGE/RECIPE"
        )
    if not REPOSITORY.fullmatch(arguments.repository):
        raise InputError(
            f"{arguments.repository} is not a repository of the Hub: expected OWNER/NAME"
        )
    with tempfile.TemporaryDirectory() as folder:
        options = options or recorded_options(arguments.target)
        model = plan_model(match[1], match[2], options, Path(folder))
        if not arguments.allow_stale and model.stale:
            raise InputError(f"{model.stale}: build {model.path}, or add --allow-stale")
        missed = model.missed()
        if not arguments.allow_missed and missed:
            raise InputError(f"{model.path}: {'; '.join(missed)}: add --allow-missed to upload it")
        license = print_licenses(model, arguments.repository)
        files = model.files()
        card = write_card(model, arguments.repository, license, Path(folder))
        check_paths({**files, CARD: card})
        print_files(model, {**files, CARD: card}, missed)
        destination = find_destination(arguments.repository, arguments.public)
        print_destination(destination, {**files, CARD: card})
        if not arguments.yes:
            print("nothing was uploaded: add --yes")
            return
        digests = {name: of["sha256"] for name, of in model.manifest["files"].items()}
        message = f"Upload {model.path} (spec {digest(model.manifest['spec'])[:16]})"
        with unchanged_files(files.values()):
            address = upload(destination, {**files, CARD: card}, digests, message)
    print(f"uploaded: {address}")


class Model(NamedTuple):
    """A model that was built, and its evaluation.

    Attributes:
        path: output/STAGE/NAME.
        manifest: Its manifest.
        evaluation: The manifest of its evaluation; None if there is none of this very model.
        verdicts: What the recipe expects, and whether it is so; None if it cannot be judged.
        licenses: The licences that the config declares, by path.
        stale: Why the model or its evaluation is stale, or an empty string.
    """

    path: str
    manifest: Manifest
    evaluation: Manifest | None
    verdicts: list[Verdict] | None
    licenses: dict[str, str]
    stale: str

    @property
    def stage(self) -> str:
        """The stage of its recipe."""
        return self.path.split("/")[1]

    def missed(self) -> list[str]:
        """Describe what its evaluation misses."""
        if self.verdicts is None:
            return ["it has no evaluation, but the recipe has expectations"]
        return [describe(verdict) for verdict in self.verdicts if not verdict.met]

    def files(self) -> dict[str, Path]:
        """Return its files, except for the card, by their paths in the repository."""
        names = self.manifest["files"].keys() - KEPT
        files = {name: Path(self.path, name) for name in sorted(names)}
        return {**files, MANIFEST: manifest_path(self.path)}


def recorded_options(target: str) -> list[str]:
    """Return --configfile and --config of the build of a result."""
    record = read_run_record(target.rstrip("/"))
    options = record["placement"].get("options", []) if record else []
    return list(map(str, options)) if isinstance(options, list) else []


def plan_model(stage: str, name: str, options: list[str], specs: Path) -> Model:
    """Return the model of a recipe, and what the workflow of today says about it.

    Raises:
        InputError: It is missing or damaged, or so is its evaluation.
    """
    path, evaluation = f"output/{stage}/{name}", f"output/eval/{stage}/{name}"
    folder, plan = dry_run_with_specs([path, *options], specs)
    os.chdir(folder)
    manifest = read_valid_manifest(manifest_path(path))
    if manifest is None or manifest["spec"]["path"] != path:
        raise InputError(f"{manifest_path(path)} cannot be read: build {path} first")
    check_inputs({"model": Path(path)}, {"model": manifest})
    report = find_spec(specs, "draw_report", f"{stage}/{name}")
    expected = report["settings"].get("expectations", {}).get(stage, {})
    baseline = report["inputs"].get(f"baseline.{stage}", {}).get("path")
    evaluated = read_evaluation(Path(evaluation), path, manifest)
    verdicts: list[Verdict] | None = []
    if expected:
        is_complete = evaluated is not None and (baseline is None or Path(baseline).is_dir())
        than = baseline and Path(baseline)
        verdicts = judge(stage, expected, Path(evaluation), than) if is_complete else None
    stale = stale_result([path, evaluation, *([baseline] if baseline else [])], plan)
    return Model(path, manifest, evaluated, verdicts, report["settings"]["licenses"], stale)


def read_evaluation(evaluation: Path, path: str, model: Manifest) -> Manifest | None:
    """Return the manifest of an evaluation; None if there is none of this very model.

    Raises:
        InputError: It is damaged.
    """
    manifest = read_valid_manifest(manifest_path(evaluation))
    if manifest is None:
        return None
    for key, entry in manifest["spec"]["inputs"].items():
        if entry["path"] == path:
            if manifest["inputs"].get(key) != input_digest(manifest["spec"], model):
                return None
            check_inputs({"evaluation": evaluation}, {"evaluation": manifest})
            return manifest
    return None


def stale_result(paths: list[str], plan: Mapping[str, PlannedJob]) -> str:
    """Describe the first result that a build would compute again; "" if there is none."""
    for path in filter(plan.__contains__, paths):
        causes = "; ".join(causes_of(plan[path].spec))
        return f"{path} is stale: {causes}" if Path(path).exists() else f"{path} is missing"
    return ""


def write_card(model: Model, repository: str, license: str | None, folder: Path) -> Path:
    """Write the card that is uploaded into a folder; return its path."""
    source = Path(model.path, CARD)
    if not source.exists():
        raise InputError(f"{source} is missing: delete {model.path} and build it again")
    results: list[Result] = []
    settings = [model.manifest["spec"]["settings"]]
    if model.evaluation is not None:
        evaluation = Path(model.evaluation["spec"]["path"])
        results = evaluation_results(model.stage, read_metrics(evaluation))
        settings.insert(0, model.evaluation["spec"]["settings"])
    datasets = evaluated_datasets(model.manifest["lineage"], settings)
    text = with_verdicts(source.read_text(encoding="utf-8"), model.verdicts or [])
    path = folder / CARD
    path.write_text(
        published_card(text, repository, model.path, results, datasets, license), encoding="utf-8"
    )
    return path


def check_paths(files: Mapping[str, Path]) -> None:
    """Raise InputError if a file of text names a folder of this machine."""
    for name, path in files.items():
        if name.endswith(WEIGHTS):
            continue
        content = path.read_bytes()
        for folder in private_folders():
            if folder.encode() in content or json.dumps(folder)[1:-1].encode() in content:
                raise InputError(f"{name} contains the path of a folder of this machine, {folder}")


# --- what is printed --------------------------------------------------------------------------


def print_licenses(model: Model, repository: str) -> str | None:
    """Print the licences of the sources of a model, and their conflicts; return the common one."""
    lineage = merge_lineages([model.manifest])
    licenses = source_licenses(lineage, model.licenses)
    by_name = {source_name(path): license for path, license in licenses.items()}
    listed = ", ".join(f"{name} {license or 'unknown'}" for name, license in by_name.items())
    print(printable_line(f"licences: {listed or 'no external sources'}"))
    for remark in license_remarks(by_name, repository.rpartition("/")[2]):
        print(printable_line(f"  {'conflict' if remark.is_conflict else 'duty'}: {remark.text()}"))
    return common_license(lineage, licenses)


def print_files(model: Model, files: Mapping[str, Path], missed: list[str]) -> None:
    """Print the files of an upload with their sizes, and what its card says."""
    sizes = {name: path.stat().st_size for name, path in files.items()}
    for name, size in sorted(sizes.items()):
        print(f"{size:>15,}  {printable_line(name)}")
    print(f"{sum(sizes.values()):>15,}  bytes in {len(sizes)} files")
    for name in sorted(KEPT & model.manifest["files"].keys()):
        print(f"not uploaded: {name}, which has prompts of the datasets")
    state = "none of this model" if model.evaluation is None else model.evaluation["spec"]["path"]
    print(f"evaluation: {state}")
    for line in missed:
        print(printable_line(f"  missed: {line}"))


def print_destination(destination: Destination, files: Mapping[str, Path]) -> None:
    """Print the repository of an upload, and which of its files the upload removes."""
    state = "new" if destination.commit is None else f"at {destination.commit[:12]}"
    visible = "private" if destination.is_private else "public"
    print(f"repository: {destination.repository} ({state}, {visible})")
    for name in destination.obsolete(files):
        print(f"removes: {printable_line(name)}")


if __name__ == "__main__":
    main()
