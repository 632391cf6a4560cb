"""One measurement of train.py: TRL's trainer of a stage, in an environment of TRL's own.

Tried with TRL 1.16.0 on this job (bf16, sdpa; tokens/s of CPU time, one thread, same rows):
- Passes of a step of 8, whose rows are sorted by length: 1, 2, 4, 8 gave 143, 239, 317, 325 (SFT)
  and 152, 252, 304, 319 (DPO); 1, 2, 4 gave 4,135, 4,271, 3,860 (reward). The best are taken.
- train_sampling_strategy group_by_length: 139 for 143 in one pass, and other rows in each step.
- Eager attention: 129 for 143 (SFT), 4,069 for 4,135 (reward).
- Weights in bf16 too, without fp32 ones: 347 for 317. Not taken: the others have fp32 weights.
- padding_free and packing (bfd) need FlashAttention: on a CPU, OPT would see the row before.
- The fused head is SFTTrainer's and DPOTrainer's only one; use_liger_kernel needs a GPU.
"""

import json
import os
import sys
import time
from pathlib import Path

# TRL and what it imports would say much that is of no use here.
os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}

import datasets
from data import peak_mb
from train import BATCH, BETAS, LIMIT, RATE, SEED, rss_mb
from transformers import (
    AutoTokenizer,
    OPTForCausalLM,  # noqa: F401 imported late otherwise, when idle memory has been read
    OPTForSequenceClassification,  # noqa: F401
    TrainerCallback,
)
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer


class TokenizedDPOTrainer(DPOTrainer):
    """Takes rows that are tokenized already, as the other two trainers do by themselves."""

    def _prepare_dataset(self, dataset, *_):
        return dataset


# A config, a trainer, passes of a step, and settings of each stage.
STAGES = {
    "sft": (SFTConfig, SFTTrainer, 8, {"max_length": LIMIT}),
    "reward": (RewardConfig, RewardTrainer, 2, {"max_length": LIMIT}),
    "dpo": (DPOConfig, TokenizedDPOTrainer, 8, {"precompute_ref_log_probs": True, "beta": 0.1}),
}


class Clock(TrainerCallback):
    """Takes the time at the end of each optimizer step."""

    def __init__(self):
        self.stamps = []

    def on_step_end(self, *_, **__):
        self.stamps.append(time.perf_counter())


def main():
    """Train on the rows of FOLDER/STAGE.json; times, the first loss and memory go out as JSON."""
    stage, folder = sys.argv[1], Path(sys.argv[2])
    datasets.disable_progress_bars()
    idle = rss_mb()
    config, trainer, passes, settings = STAGES[stage]
    arguments = config(
        output_dir=str(folder / "trl"),
        seed=SEED,
        per_device_train_batch_size=BATCH // passes,
        gradient_accumulation_steps=passes,
        num_train_epochs=1,
        train_sampling_strategy="sequential",
        learning_rate=RATE,
        lr_scheduler_type="cosine",
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        use_cpu=True,
        # Weights stay fp32; passes run in bf16.
        bf16=True,
        gradient_checkpointing=False,
        logging_first_step=True,
        logging_steps=1_000_000,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **settings,
    )
    steps = json.loads((folder / f"{stage}.json").read_text())
    rows = [row for step in steps for row in sorted(step, key=longest)]
    clock = Clock()
    trained = trainer(
        model=str(folder / "model"),
        args=arguments,
        train_dataset=datasets.Dataset.from_list([example(stage, **row) for row in rows]),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        callbacks=[clock],
    )
    trained.train()
    loss = trained.state.log_history[0]["loss"]
    print(json.dumps({"ends": clock.stamps, "loss": loss, "idle_mb": idle, "peak_mb": peak_mb()}))


def longest(row):
    """Tokens of a row's longest sequence."""
    return len(row["prompt"]) + max(len(row["chosen"]), len(row.get("rejected", ())))


def example(stage, prompt, chosen, rejected=()):
    """A row as its trainer wants it when it is tokenized."""
    if stage == "sft":
        return {"input_ids": prompt + chosen, "labels": prompt + chosen}
    if stage == "reward":
        return {"chosen_ids": prompt + chosen, "rejected_ids": prompt + rejected}
    return {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}


if __name__ == "__main__":
    main()
