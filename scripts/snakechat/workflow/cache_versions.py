"""Earlier versions of recipes, NAME@KEY: a training in the cache of results and its evaluation.

KEY is the start of the training's key, which is the name of its folder in the cache: see
`scripts/cache.py list output/STAGE/NAME`.

Standard library only: the workflow imports this module while it plans.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from snakechat.workflow.digests import file_digest
from snakechat.workflow.errors import InputError
from snakechat.workflow.manifest import Manifest, content_digest, read_manifest
from snakechat.workflow.result_cache import ResultCache

# The files that a comparison reads, by what they are results of.
FILES = {
    "training": ("manifest.json", "metrics.jsonl"),
    "evaluation": ("manifest.json", "metrics.json"),
}


class Version(NamedTuple):
    """Folders in the cache with the training of a recipe and with its evaluation."""

    training: Path
    evaluation: Path

    def files(self) -> dict[str, Path]:
        """Return the files that a comparison reads, by name."""
        folders = self._asdict()
        return {f"{kind}/{name}": folders[kind] / name for kind in FILES for name in FILES[kind]}


def is_version(recipe: str) -> bool:
    """Return whether the name of a recipe is one of a version, NAME@KEY."""
    return "@" in recipe


def find_version(cache: Path, stage: str, recipe: str) -> Version:
    """Return a version of a recipe. Of several evaluations, the newest one counts.

    Args:
        cache: Folder of the cache.
        stage: sft, reward, dpo or rlhf.
        recipe: NAME@KEY.

    Raises:
        InputError: The cache has no training with this key, several, or no evaluation of it.
    """
    name, _, start = recipe.partition("@")
    entries = ResultCache(cache, None).entries()
    path = f"output/{stage}/{name}"
    trainings = [entry for entry in entries if entry.path == path and entry.key.startswith(start)]
    if len(trainings) != 1 or not start:
        found = "several versions" if trainings else "no version"
        raise InputError(
            f"{recipe}: {cache} has {found} of {path} with this key:"
            f" python scripts/cache.py list {path} --cache {cache}"
        )
    content = content_digest(_manifest(trainings[0].folder))
    evaluations = [
        entry
        for entry in sorted(entries, key=lambda entry: entry.created)
        if entry.path == f"output/eval/{stage}/{name}"
        and content in _manifest(entry.folder)["inputs"].values()
    ]
    if not evaluations:
        raise InputError(f"{recipe}: {cache} has no evaluation of {trainings[0].folder}")
    return Version(trainings[0].folder, evaluations[-1].folder)


def read_version_file(folder: str | Path, name: str) -> str:
    """Return the text of a file of a result in the cache.

    Raises:
        InputError: The file is missing, or differs from its manifest.
    """
    path = Path(folder, name)
    recorded: Mapping[str, str] = _manifest(Path(folder))["files"].get(name, {})
    if not path.is_file() or file_digest(path) != recorded.get("sha256"):
        raise InputError(
            f"{path} is damaged or was removed from the cache: compare another version"
        )
    return path.read_text()


def _manifest(folder: Path) -> Manifest:
    manifest = read_manifest(folder / "manifest.json")
    if manifest is None:
        raise InputError(f"{folder}/manifest.json is damaged: python scripts/cache.py verify")
    return manifest
