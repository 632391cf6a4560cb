"""Peak memory of a process while PPO loads its models, takes two steps and saves the actor.

Arguments: FOLDER, ZeRO stage, hidden size and layers of the models. Writes the bytes above the idle
process as FOLDER/STAGE-RANK.json.
"""

import json
import sys
from pathlib import Path

from memory_worker import Memory
from peaks import INIT, prepare, run_two_steps, training

from snakechat.training.process_group import init_process_group
from snakechat.workflow import distributed


def main(folder, stage, hidden, layers):
    case = ("rlhf", {"dtype": "bf16"}, {"zero_stage": stage})
    _, placement = training(case, distributed.world_size(), folder)
    init_process_group(placement)
    size = {"hidden_size": hidden, "word_embed_proj_dim": hidden, "ffn_dim": 4 * hidden}
    size |= {"num_hidden_layers": layers, "num_attention_heads": hidden // 64}
    inits = {folder / f"tiny-{stage}": INIT, folder / f"large-{stage}": INIT | size}
    for inputs, init in inits.items():
        if distributed.rank() == 0:
            inputs.mkdir()
            prepare(inputs, init)
        distributed.barrier()
    tiny, large = inits
    # The modules that are imported later belong to the idle process.
    run(case, tiny)
    memory = Memory()
    run(case, large)
    memory.end_phase("all")
    path = folder / f"{stage}-{distributed.rank()}.json"
    path.write_text(json.dumps({"peaks": memory.peaks}))


def run(case, inputs):
    """Train on the inputs of a folder and save the actor there."""
    run_two_steps(case, inputs / "rlhf", inputs)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
