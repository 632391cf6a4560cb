"""Small results with manifests, for tests of the cache of results."""

import json

from snakechat.workflow.manifest import Manifest, manifest_path, result_files, result_key


def make_result(folder, files=None, **settings):
    """Write a result with its manifest inside and next to it; return its key.

    Args:
        folder: The folder.
        files: Texts by path in the folder.
        settings: The settings that the result was made from.
    """
    name = folder.name
    for path, text in (files or {"model": "weights", "adapter/config": "{}"}).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    manifest: Manifest = {
        "spec": {
            "rule": "train_sft",
            "name": name,
            "path": f"output/sft/{name}",
            "settings": settings,
            "inputs": {},
            "code": {},
            "requirements": {},
            "files": {},
        },
        "inputs": {},
        "lineage": {},
        "facts": {},
        "files": result_files(folder),
    }
    write_manifest(folder, manifest)
    return result_key(manifest["spec"], manifest["inputs"])


def write_manifest(folder, manifest):
    """Replace the manifests of a result."""
    text = json.dumps(manifest)
    for path in (folder / "manifest.json", manifest_path(folder)):
        path.unlink(missing_ok=True)
        path.write_text(text)
