"""Export a model with its lineage as an RO-Crate.

    python scripts/export_crate.py output/rlhf/mine crate

The folder gets the files of the model, the sources of the workflow as they are now, and
ro-crate-metadata.json: each job that the model was made from is an action with its program, its
inputs and its result (Provenance Run Crate 0.5). Datasets and models upstream are described by
their digests, licences and origins; their files are not copied. Files are hard links where that is
possible: do not edit them.
"""

import argparse
import datetime
import json
import mimetypes
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from rocrate.model.contextentity import ContextEntity
from rocrate.model.data_entity import DataEntity
from rocrate.model.entity import Entity
from rocrate.rocrate import ROCrate

from snakechat.data.licenses import is_source, source_licenses
from snakechat.reporting.data_sources import data_sources
from snakechat.reporting.model_card import common_license
from snakechat.workflow.digests import file_digest
from snakechat.workflow.errors import InputError
from snakechat.workflow.lineage import lineage_columns, merge_lineages
from snakechat.workflow.manifest import Manifest, check_files, content_digest, manifest_path
from snakechat.workflow.pins import installed_versions
from snakechat.workflow.result_copies import MANIFEST, MODEL_CARD, place_manifest, place_result
from snakechat.workflow.run_record import read_run_record
from snakechat.workflow.valid_manifests import read_valid_manifest

ROOT = Path(__file__).resolve().parent.parent
HUB = "https://huggingface.co"
# The profiles of Workflow Run RO-Crate, each of which extends the one before it.
PROFILES = {
    "https://w3id.org/ro/wfrun/process/0.5": ("Process Run Crate", "0.5"),
    "https://w3id.org/ro/wfrun/workflow/0.5": ("Workflow Run Crate", "0.5"),
    "https://w3id.org/ro/wfrun/provenance/0.5": ("Provenance Run Crate", "0.5"),
    "https://w3id.org/workflowhub/workflow-ro-crate/1.0": ("Workflow RO-Crate", "1.0"),
}
# Terms that RO-Crate 1.1 does not have.
TERMS = {"sha256": "https://w3id.org/ro/terms/workflow-run#sha256"}
# Where the files of the model are in the crate.
MODEL = "model"
COMPLETED = "http://schema.org/CompletedActionStatus"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=Path, help="a model, such as output/rlhf/mine")
    parser.add_argument("folder", type=Path, help="folder of the crate, which must not exist")
    arguments = parser.parse_args()
    try:
        export(arguments.result, arguments.folder)
    except InputError as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        sys.exit(f"error: {error.filename or arguments.folder}: {error.strerror or error}")
    print(f"{arguments.folder}: {arguments.result} as an RO-Crate")


def export(result: Path, folder: Path) -> None:
    """Write the crate of a result, whole or not at all.

    Raises:
        InputError: The folder exists, or the result is no undamaged model.
    """
    if folder.exists():
        raise InputError(f"{folder} exists: name another folder")
    manifest = read_valid_manifest(manifest_path(result))
    if manifest is None:
        raise InputError(f"{manifest_path(result)} cannot be read: build {result} first")
    if not manifest["spec"]["rule"].startswith("train_"):
        raise InputError(f"{result} is no model: name one, such as output/rlhf/mine")
    check_files(result, manifest)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        crate = describe(result, manifest)
        crate.write(temporary)
        (temporary / MODEL).mkdir()
        place_result(result, temporary / MODEL, manifest)
        place_manifest(result, temporary / MODEL)
        os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def describe(result: Path, manifest: Manifest) -> ROCrate:
    """Return the crate of a model: its files, its workflow, and an action for each job."""
    lineage = merge_lineages([manifest])
    path = manifest["spec"]["path"]
    crate = ROCrate(version="1.1")
    crate.metadata.extra_terms.update(TERMS)
    provenance = Provenance(crate, lineage, path)
    model = provenance.add_model(result, manifest)
    actions = [provenance.add_action(path) for path in provenance.order]
    run = provenance.add_run(model, actions)
    crate.name = path.removeprefix("output/")
    crate.description = f"{path}, a model built by Snakechat, and the provenance of its build"
    crate.license = provenance.add_license()
    profiles = [
        crate.add(ContextEntity(crate, url, {"@type": "CreativeWork", "name": name, "version": v}))
        for url, (name, v) in PROFILES.items()
    ]
    crate.root_dataset["conformsTo"] = profiles
    crate.root_dataset["mentions"] = [run, *actions]
    # Of the training: two exports of a model are the same.
    if (record := read_run_record(result)) is not None:
        crate.datePublished = datetime.datetime.fromisoformat(record["started"])
    return crate


def project_version() -> str:
    """Return the version of Snakechat."""
    return str(yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"])


class Provenance:
    """Adds what a model was made from to a crate.

    Args:
        crate: The crate.
        lineage: All jobs, the training of the model included.
        path: The path of the model.
    """

    def __init__(self, crate: ROCrate, lineage: dict[str, dict[str, Any]], path: str) -> None:
        self.crate, self.lineage, self.path = crate, lineage, path
        self.order = [job for column in lineage_columns(lineage) for job in column]
        self.sources = {source.path: source for source in data_sources(lineage, {})}
        self.results: dict[str, Entity] = {}
        self.programs: dict[str, Entity] = {}

    def context(self, id: str, kind: str | list[str], **properties: Any) -> Entity:
        """Add a contextual entity. Properties that are None or empty are omitted."""
        known = {name: single(of) for name, of in properties.items() if of not in (None, [])}
        return self.crate.add(ContextEntity(self.crate, id, {"@type": kind, **known}))

    def data(self, id: str, kind: str, **properties: Any) -> Entity:
        """Add an entity of data that this program places itself, or that the crate lacks."""
        return self.crate.add(DataEntity(self.crate, id, {"@type": kind, **properties}))

    def add_license(self) -> Entity:
        """Add the licence that all base models have, or a note that there is none."""
        license = common_license(self.lineage, source_licenses(self.lineage, {}))
        note = "The licences of the sources apply: no common one was declared"
        return self.context("#license", "CreativeWork", name=license or note)

    def add_model(self, result: Path, manifest: Manifest) -> Entity:
        """Add the folder of the model and its files."""
        files = dict(manifest["files"])
        for name in (MANIFEST, MODEL_CARD):
            path = result / name
            files[name] = {"size": path.stat().st_size, "sha256": file_digest(path)}
        parts = [
            self.data(
                f"{MODEL}/{name}",
                "File",
                name=name,
                encodingFormat=mimetypes.guess_type(name)[0] or "application/octet-stream",
                contentSize=str(of["size"]),
                sha256=of["sha256"],
            )
            for name, of in sorted(files.items())
        ]
        model = self.data(
            f"{MODEL}/",
            "Dataset",
            name=self.path.removeprefix("output/"),
            description="A model in the format of transformers",
            identifier=content_digest(manifest),
            hasPart=parts,
        )
        self.results[self.path] = model
        return model

    def add_run(self, model: Entity, actions: Sequence[Entity]) -> Entity:
        """Add the workflow and its run, and who ran the action of each job; return the run."""
        workflow = self.add_workflow()
        sources = [
            self.results[f"source of {path}"]
            for path in self.order
            if f"source of {path}" in self.results
        ]
        run = self.context(
            "#run",
            "CreateAction",
            name=f"Build of {self.path}",
            description="All jobs that the model was made from",
            instrument=workflow,
            object=sources,
            result=[model],
            actionStatus=COMPLETED,
        )
        steps, controls = {}, []
        for number, (rule, program) in enumerate(self.programs.items(), start=1):
            steps[rule] = self.context(
                f"#step-{rule}",
                "HowToStep",
                name=rule,
                position=str(number),
                workExample=program,
            )
        for path, action in zip(self.order, actions, strict=True):
            controls.append(
                self.context(
                    f"#control-{path}",
                    "ControlAction",
                    name=f"Snakemake runs the job of {path}",
                    instrument=steps[self.lineage[path]["rule"]],
                    object=[action],
                )
            )
        workflow["hasPart"] = list(self.programs.values())
        workflow["step"] = list(steps.values())
        version = installed_versions(["snakemake"]).get("snakemake")
        engine = self.context(
            "#snakemake",
            "SoftwareApplication",
            name="Snakemake",
            url="https://snakemake.github.io",
            softwareVersion=version,
        )
        self.context(
            "#organization",
            "OrganizeAction",
            name="Snakemake builds the model",
            instrument=engine,
            object=controls,
            result=[run],
        )
        return run

    def add_workflow(self) -> Entity:
        """Add the Snakefile, as the main entity, and the rules that it includes."""
        for path in sorted((ROOT / "rules").glob("*.smk")):
            properties = {"@type": ["File", "SoftwareSourceCode"], "name": path.name}
            self.crate.add_file(path, f"rules/{path.name}", properties=properties)
        properties = {
            "@type": ["File", "SoftwareSourceCode", "ComputationalWorkflow", "HowTo"],
            "name": "Snakechat",
            "description": "Supervised fine-tuning, DPO and RLHF",
            "version": project_version(),
        }
        return self.crate.add_workflow(
            ROOT / "Snakefile", "Snakefile", main=True, lang="snakemake", properties=properties
        )

    def program(self, rule: str) -> Entity:
        """Return the program that a rule runs, as it is now."""
        if rule not in self.programs:
            name = "tokenize_phase" if rule.startswith("tokenize_") else rule
            path = ROOT / "scripts" / f"{name}.py"
            shown = {"@type": ["File", "SoftwareSourceCode"], "name": name}
            known = [of for of in self.programs.values() if of.id == f"scripts/{path.name}"]
            self.programs[rule] = (
                known[0]
                if known
                else self.crate.add_file(path, f"scripts/{path.name}", properties=shown)
            )
        return self.programs[rule]

    def add_action(self, path: str) -> Entity:
        """Add the action of a job, with its settings, its source, its inputs and its result."""
        entry = self.lineage[path]
        inputs = [self.results[upstream] for upstream in entry["inputs"]]
        settings = self.context(
            f"#settings-{path}",
            "PropertyValue",
            name="settings",
            value=json.dumps(entry["settings"], sort_keys=True),
        )
        if source := self.add_source(path, entry):
            inputs.append(source)
        if path not in self.results:
            self.results[path] = self.add_result(path, entry)
        record = read_run_record(path, entry["spec"])
        times = run_times(record) if record else {}
        return self.context(
            f"#job-{path}",
            "CreateAction",
            name=f"{entry['rule']} {entry['name']}",
            description="A job of the build; the identifier is the digest of its spec",
            identifier=entry["spec"],
            instrument=self.program(entry["rule"]),
            object=[*inputs, settings],
            result=[self.results[path]],
            actionStatus=COMPLETED,
            **times,
        )

    def add_result(self, path: str, entry: Mapping[str, Any]) -> Entity:
        """Add the result of an upstream job, whose files are not in the crate."""
        dataset = self.sources.get(path)
        return self.context(
            f"#{path}",
            "Dataset",
            name=path.removeprefix("output/"),
            description=f"Result of {entry['rule']}; its files are not in the crate",
            identifier=entry["content"],
            **(described(dataset.rows) if dataset else {}),
        )

    def add_source(self, path: str, entry: Mapping[str, Any]) -> Entity | None:
        """Add the external source of a job; None if all its inputs are jobs."""
        settings, facts, files = entry["settings"], entry["facts"], entry["files"]
        if not is_source(entry["rule"], settings):
            return None
        shown: dict[str, Any] = {"license": facts.get("licence") or "unknown"}
        if languages := facts.get("languages"):
            shown["inLanguage"] = languages
        if "hub" in settings:
            kind = "datasets/" if entry["rule"] == "import_dataset" else ""
            commit = facts.get("commit", settings["revision"])
            url = f"{HUB}/{kind}{settings['hub']}/tree/{commit}"
            shown |= {"name": settings["hub"], "version": commit}
            source = self.data(url, "Dataset", **shown)
        else:
            shown |= {
                "name": f"{files['number']} local files",
                "description": "Their digests have this digest; the files are not in the crate",
                "identifier": files["digest"],
            }
            source = self.context(f"#source-of-{path}", "Dataset", **shown)
        self.results[f"source of {path}"] = source
        return source


def single(value: Any) -> Any:
    """Return the item of a list of one item, and any other value as it is."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def described(rows: Mapping[str, int]) -> dict[str, str]:
    """Return the size of a dataset as the property of an entity; {} if it is not known."""
    sizes = ", ".join(f"{split} {count:,} rows" for split, count in rows.items())
    return {"size": sizes} if sizes else {}


def run_times(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the start and the end of a run."""
    started = datetime.datetime.fromisoformat(record["started"])
    ended = started + datetime.timedelta(seconds=record["seconds"])
    return {"startTime": started.isoformat(), "endTime": ended.isoformat()}


if __name__ == "__main__":
    main()
