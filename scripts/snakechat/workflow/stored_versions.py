"""Earlier versions of recipes, NAME@KEY: a training in the store and its evaluation.

KEY is the start of the training's key, which is the name of its folder in the store: see
`scripts/store.py list output/STAGE/NAME`.

Standard library only: the workflow imports this module while it plans.
"""

from pathlib import Path
from typing import NamedTuple

from snakechat.workflow.digests import file_digest
from snakechat.workflow.errors import InputError
from snakechat.workflow.links import versions_of
from snakechat.workflow.manifest import MANIFEST, Manifest, content_digest, read_manifest

# The files that a comparison reads, by what they are results of.
FILES = {"training": (MANIFEST, "metrics.jsonl"), "evaluation": (MANIFEST, "metrics.json")}


class Version(NamedTuple):
    """Folders in the store with the training of a recipe and with its evaluation."""

    training: Path
    evaluation: Path

    def files(self) -> dict[str, Path]:
        """Return the files that a comparison reads, by name."""
        folders = self._asdict()
        return {f"{kind}/{name}": folders[kind] / name for kind in FILES for name in FILES[kind]}


def is_version(recipe: str) -> bool:
    """Return whether the name of a recipe is one of a version, NAME@KEY."""
    return "@" in recipe


def find_version(stage: str, recipe: str) -> Version:
    """Return a version of a recipe. Of several evaluations, the newest one counts.

    Args:
        stage: sft, reward, dpo or rlhf.
        recipe: NAME@KEY.

    Raises:
        InputError: The name has led to no training with this key, or to several, or to no
            evaluation of it.
    """
    name, _, start = recipe.partition("@")
    path = f"output/{stage}/{name}"
    trainings = [folder for folder in _existing(path) if folder.name.startswith(start)]
    if len(trainings) != 1 or not start:
        found = "several versions" if trainings else "no version"
        raise InputError(
            f"{recipe}: {path} has {found} with this key: python scripts/store.py list {path}"
        )
    content = content_digest(_manifest(trainings[0]))
    evaluations = [
        folder
        for folder in _existing(f"output/eval/{stage}/{name}")
        if content in [entry["digest"] for entry in _manifest(folder)["inputs"].values()]
    ]
    if not evaluations:
        raise InputError(f"{recipe}: there is no evaluation of {trainings[0]}")
    newest = max(evaluations, key=lambda folder: folder.stat().st_mtime)
    return Version(trainings[0], newest)


def _existing(path: str) -> list[Path]:
    """Return the folders that the path of a result leads to, or led to once, as far as they are."""
    return [folder for folder in versions_of(path) if folder.is_dir()]


def read_version_file(folder: str | Path, name: str) -> str:
    """Return the text of a file of a result in the store.

    Raises:
        InputError: The file is missing, or differs from its manifest.
    """
    path = Path(folder, name)
    recorded = _manifest(Path(folder))["files"].get(name, {})
    if not path.is_file() or file_digest(path) != recorded.get("sha256"):
        raise InputError(
            f"{path} is damaged or was removed from the store: compare another version"
        )
    return path.read_text()


def _manifest(folder: Path) -> Manifest:
    manifest = read_manifest(folder / MANIFEST)
    if manifest is None:
        raise InputError(f"{folder}/{MANIFEST} is damaged: python scripts/verify.py")
    return manifest
