"""One measurement of train.py: the trainer of TRL for a stage, in a separate environment.

Settings of TRL 1.16.0 that were compared (bf16, sdpa; tokens per second of CPU time, one thread,
the same rows):
- Micro-batches of a step of 8 rows, sorted by length: 1, 2, 4, 8 reach 143, 239, 317, 325 (SFT) and
  152, 252, 304, 319 (DPO); 1, 2, 4 reach 4,135, 4,271, 3,860 (reward). The fastest are used.
- train_sampling_strategy group_by_length: 139 instead of 143 with one micro-batch, and other rows
  in each step.
- Eager attention: 129 instead of 143 (SFT), 4,069 instead of 4,135 (reward).
- bf16 weights without fp32 masters: 347 instead of 317. Not used: the other methods have masters.
- padding_free and packing (bfd) need FlashAttention: on a CPU, OPT would attend to the previous
  row.
- SFTTrainer and DPOTrainer always use their fused head; use_liger_kernel needs a GPU.
"""

import json
import os
import sys
import time
from pathlib import Path

# Silences the logs of TRL and its dependencies.
os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}

import datasets
from train import BATCH, BETAS, LIMIT, RATE, SEED, longest, peak_mb, rss_mb
from transformers import (
    AutoTokenizer,
    OPTForCausalLM,  # noqa: F401 imported late otherwise, when idle memory has been read
    OPTForSequenceClassification,  # noqa: F401
    TrainerCallback,
)
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer


class TokenizedDPOTrainer(DPOTrainer):
    """Accepts tokenized rows, as the other two trainers do."""

    def _prepare_dataset(self, dataset, *_):
        return dataset


# Config, trainer, micro-batches per step and settings of each stage.
STAGES = {
    "sft": (SFTConfig, SFTTrainer, 8, {"max_length": LIMIT}),
    "reward": (RewardConfig, RewardTrainer, 2, {"max_length": LIMIT}),
    "dpo": (DPOConfig, TokenizedDPOTrainer, 8, {"precompute_ref_log_probs": True, "beta": 0.1}),
}


class Clock(TrainerCallback):
    """Records the time at the end of each optimizer step."""

    def __init__(self):
        self.stamps = []

    def on_step_end(self, *_, **__):
        self.stamps.append(time.perf_counter())


def main():
    """Train on the rows of FOLDER/STAGE.json and print times, first loss and memory as JSON."""
    stage, folder = sys.argv[1], Path(sys.argv[2])
    datasets.disable_progress_bars()
    idle = rss_mb()
    config, trainer, micro_batches, settings = STAGES[stage]
    arguments = config(
        output_dir=str(folder / "trl"),
        seed=SEED,
        per_device_train_batch_size=BATCH // micro_batches,
        gradient_accumulation_steps=micro_batches,
        num_train_epochs=1,
        train_sampling_strategy="sequential",
        learning_rate=RATE,
        lr_scheduler_type="cosine",
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        use_cpu=True,
        # fp32 weights, forward and backward passes in bf16.
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


def example(stage, prompt, chosen, rejected=()):
    """Return a tokenized row in the format of its trainer."""
    if stage == "sft":
        return {"input_ids": prompt + chosen, "labels": prompt + chosen}
    if stage == "reward":
        return {"chosen_ids": prompt + chosen, "rejected_ids": prompt + rejected}
    return {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}


if __name__ == "__main__":
    main()
