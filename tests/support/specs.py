"""Models whose sizes can be computed by hand, a placement, and the least of other records."""

import json

from snakechat.config.recipes import Config
from snakechat.estimates.memory import POLICY, SFT, ModelSpec
from snakechat.jobs.staleness import Jobs
from snakechat.workflow.processes import Placement

# What every record of a run has.
EMPTY_RUN = dict.fromkeys(("spec", "started", "host", "platform", "python"), "")
EMPTY_RUN |= {"seconds": 0, "peak_memory_mb": 0, "placement": {}, "options": {}, "versions": {}}

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


def opt_config(layers, hidden_size, heads, **others):
    """Return the keys of the config of an OPT model."""
    sizes = {"hidden_size": hidden_size, "word_embed_proj_dim": hidden_size}
    sizes |= {"ffn_dim": 4 * hidden_size, "num_hidden_layers": layers, "vocab_size": 50272}
    sizes |= {"num_attention_heads": heads, "max_position_embeddings": 2048}
    return {"model_type": "opt", **sizes, **others}


# Zhang et al. 2022, table 1. 350m has narrower embeddings, and norms after each block.
OPT_CONFIGS = {
    "opt-125m": opt_config(12, 768, 12),
    "opt-350m": opt_config(24, 1024, 16, word_embed_proj_dim=512, do_layer_norm_before=False),
    "opt-1.3b": opt_config(24, 2048, 32),
    "opt-6.7b": opt_config(32, 4096, 32),
    "opt-13b": opt_config(40, 5120, 40),
    "opt-30b": opt_config(48, 7168, 56),
    "opt-66b": opt_config(64, 9216, 72),
}

ONE_GPU = Placement(gpus_per_node=1, mem_mb=64000)


def opt_spec(name, loss=POLICY, dtype="bf16", **named):
    """A ModelSpec of OPT_CONFIGS."""
    return ModelSpec(json.dumps(OPT_CONFIGS[name]), loss, dtype, **named)


def small_spec(loss=SFT, dtype="bf16", **named):
    """A ModelSpec of SMALL."""
    return ModelSpec(json.dumps(SMALL), loss, dtype, **named)


def jobs_of_rules(folder, programs, rules):
    """Return the Jobs of rules, whose programs are empty. The folder is the working directory."""
    (folder / "scripts").mkdir()
    for name in programs:
        (folder / f"scripts/{name}.py").touch()
    for lock in ("requirements.txt", "requirements-torch.txt"):
        (folder / lock).touch()
    values = {"deterministic": False, "store": "output/store", "sweeps": {}}
    jobs = Jobs(Config(values, folder, folder), folder)
    jobs.rules = rules
    return jobs
