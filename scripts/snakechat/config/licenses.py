"""Checks of licences while planning: those of all datasets and models behind a training."""

from functools import cache
from pathlib import Path
from typing import Any

from snakechat.config.errors import ConfigError
from snakechat.config.job_files import dataset_folder, model_folder
from snakechat.config.job_settings import Jobs
from snakechat.config.recipes import Config
from snakechat.data.cards import card_facts
from snakechat.data.licenses import (
    SOURCE_RULES,
    is_source,
    license_remarks,
    normalized_license,
    source_name,
)
from snakechat.workflow.errors import warn
from snakechat.workflow.manifest import manifest_path, read_manifest
from snakechat.workflow.specs import Specs


def declared_license(config: Config, section: str, name: str) -> str | None:
    """Return the `license` of a dataset or a model (section), or None."""
    return normalized_license(config.values[section][name].get("license"))


def declared_licenses(config: Config) -> dict[str, str]:
    """Return the licences that the config declares, by the path of the import or the fetch.

    They are no settings of these jobs: a licence changes no bytes of data.
    """
    declared = {
        f"output/{folder}/{name}": declared_license(config, section, name)
        for section, folder in (("datasets", "data"), ("models", "models"))
        for name in config.values[section]
    }
    return {path: license for path, license in declared.items() if license}


class LicenseCheck:
    """Warns of licences that conflict; with `licenses: strict`, they are errors.

    The licence of a dataset or a model is the one that the config declares, or the one that its
    import recorded, or the one that the card in its local folder names. That of a repository of the
    Hub or of an object store is known once it was fetched: before that, only `strict` reports it.
    """

    def __init__(self, config: Config, specs: Specs) -> None:
        self.config, self.specs = config, specs
        self.strict = config.values["licenses"] == "strict"
        self.declared = declared_licenses(config)
        self.reported: set[str] = set()
        self._sources = cache(self._sources_of)
        self._license = cache(self._license_of)

    def check(self, rule: str, name: str) -> None:
        """Check the sources of a training.

        Raises:
            ConfigError: A conflict, with `licenses: strict`.
        """
        found = {source: self._license(*source) for source in sorted(self._sources(rule, name))}
        if not found:
            return
        licenses = {
            source_name(path): license
            for (_, _, path), (license, is_final) in found.items()
            if license or is_final or self.strict
        }
        target = self.specs.result(rule, name)
        for remark in license_remarks(licenses, name):
            text = remark.text()
            if remark.is_conflict and self.strict:
                raise ConfigError(f"config: licenses: strict, and {target}: {text}")
            # Once, however many recipes have the same sources.
            if remark.is_conflict and text not in self.reported:
                self.reported.add(text)
                warn(f"licences of {target}: {text}")

    def declared_for(self, jobs: Jobs) -> dict[str, str]:
        """Return the declared licences of what jobs were made from, by path."""
        paths = {path for job in jobs.values() for _, _, path in self._sources(*job)}
        return {path: self.declared[path] for path in sorted(paths & self.declared.keys())}

    def _sources_of(self, rule: str, name: str) -> frozenset[tuple[str, str, str]]:
        """Return (rule, name, path) of the imports and fetches upstream of a job."""
        spec, _ = self.specs.spec(rule, name)
        if rule in SOURCE_RULES:
            is_external = is_source(rule, spec["settings"])
            return frozenset({(rule, name, spec["path"])} if is_external else ())
        inputs = spec["inputs"].values()
        return frozenset().union(*(self._sources(of["rule"], of["name"]) for of in inputs))

    def _license_of(self, rule: str, name: str, path: str) -> tuple[str | None, bool]:
        """Return the licence of a source, and whether fetching it would not change the answer."""
        if path in self.declared:
            return self.declared[path], True
        folder = (dataset_folder if rule == "import_dataset" else model_folder)(self.config, name)
        if isinstance(folder, Path):
            return card_facts(folder)["licence"], True
        settings: dict[str, Any] = self.specs.spec(rule, name)[0]["settings"]
        recorded = read_manifest(manifest_path(Path(path)))
        if recorded is None or recorded["spec"].get("settings") != settings:
            return None, False
        return normalized_license(recorded["facts"].get("licence")), True
