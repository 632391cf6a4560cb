"""Small results in a store, for tests of the store."""

import json

from snakechat.workflow.manifest import result_files
from snakechat.workflow.store import store_key, stored_folder
from support.specs import EMPTY_SPEC

FILES = {"model": "weights", "adapter/config": "{}"}


def make_result(store, name="tiny", files=FILES, rule="train_sft", inputs=None, **settings):
    """Write a result into a store; return its folder.

    Args:
        store: The store.
        name: Name of the job.
        files: Texts by path in the folder.
        rule: Rule of the job.
        inputs: Digests of the inputs by name.
        settings: The settings that the result was made from.
    """
    folder = "sft" if rule == "train_sft" else "eval/sft"
    inputs = inputs or {}
    sft = {"rule": "train_sft", "name": name, "path": f"output/sft/{name}"}
    spec = EMPTY_SPEC | {"rule": rule, "name": name, "path": f"output/{folder}/{name}"}
    spec |= {"settings": settings, "inputs": dict.fromkeys(inputs, sft)}
    result = stored_folder(store, rule, name, store_key(spec, inputs))
    for path, text in files.items():
        (result / path).parent.mkdir(parents=True, exist_ok=True)
        (result / path).write_text(text)
    manifest = {"spec": spec, "inputs": inputs, "lineage": {}, "facts": {}}
    manifest["files"] = result_files(result)
    (result / "manifest.json").write_text(json.dumps(manifest))
    return result
