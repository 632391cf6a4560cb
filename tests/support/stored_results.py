"""Small results in a store, for tests of the store."""

from pathlib import Path

from snakechat.workflow.manifest import recorded_inputs, result_files, result_id, sealed_json
from support.specs import EMPTY_SPEC

FILES = {"model": "weights", "adapter/config": "{}"}


def make_result(store, files=FILES, rule="train_sft", inputs=None, **settings):
    """Write a result into a store; return its folder.

    Args:
        store: The store.
        files: Texts by path in the folder.
        rule: Rule of the job.
        inputs: Manifests of the inputs by name.
        settings: The settings that the result was made from.
    """
    inputs = inputs or {}
    rules = {name: {"rule": upstream["spec"]["rule"]} for name, upstream in inputs.items()}
    spec = EMPTY_SPEC | {"rule": rule, "settings": settings, "inputs": rules}
    manifest = {"spec": spec, "inputs": recorded_inputs(spec, inputs), "lineage": {}, "facts": {}}
    result = Path(store, result_id(manifest))
    for path, text in files.items():
        (result / path).parent.mkdir(parents=True, exist_ok=True)
        (result / path).write_text(text)
    manifest["files"] = result_files(result)
    (result / "manifest.json").write_text(sealed_json(manifest))
    return result
