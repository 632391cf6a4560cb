"""A ModelSpec whose sizes can be computed by hand, a placement, and the least of other records."""

import json

from snakechat.planning.activation_memory import SFT, ModelSpec
from snakechat.workflow.placement import placement_of
from snakechat.workflow.run_record import KEYS

# An empty value of each key that every run record has.
EMPTY_RUN = {key: (kind[0] if isinstance(kind, tuple) else kind)() for key, kind in KEYS.items()}

# What every spec has beside its rule, name and path.
EMPTY_SPEC = {"settings": {}, "inputs": {}, "files": {}, "code": {}, "requirements": {}}

# The matrices of its layers have 12 * 8^2 * 2 weights.
SMALL = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_embd": 8,
    "n_head": 2,
    "n_positions": 16,
    "vocab_size": 32,
}

ONE_GPU = placement_of({"gpus_per_node": 1, "mem_mb": 64000})


def small_spec(loss=SFT, dtype="bf16", **named):
    """A ModelSpec of SMALL."""
    return ModelSpec(json.dumps(SMALL), loss, dtype, **named)
