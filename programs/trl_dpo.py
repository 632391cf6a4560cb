"""Train a chat model by TRL's DPOTrainer, in place of our trainer: a recipe of dpo with a command.

The environment has the packages of programs/requirements-trl.txt.
"""

import argparse
import json
import os
from pathlib import Path

# Silences TRL and its dependencies.
os.environ |= {"TRANSFORMERS_VERBOSITY": "error"}

import datasets
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.trainer_utils import get_last_checkpoint
from trl import DPOConfig, DPOTrainer

# Metrics of TRL by the names that pages have for them.
NAMES = {
    "loss": "loss",
    "rewards/accuracies": "accuracy",
    "rewards/chosen": "chosen_score",
    "rewards/rejected": "rejected_score",
    "learning_rate": "learning_rate",
    "grad_norm": "grad_norm",
}


def main() -> None:
    """Train; resume from the state of an earlier attempt."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "data", "out", "state"):
        parser.add_argument(f"--{name}", required=True, type=Path)
    parser.add_argument("--seed", default=42, type=int)
    parser.add_argument("--beta", default=0.1, type=float)
    parser.add_argument("--learning-rate", default=1e-3, type=float)
    parser.add_argument("--epochs", default=1, type=int)
    parser.add_argument("--batch-size", default=32, type=int)
    parser.add_argument("--max-length", default=96, type=int)
    parser.add_argument("--gpus", default=0, type=int)
    options = parser.parse_args()
    datasets.disable_progress_bars()
    arguments = DPOConfig(
        output_dir=str(options.state),
        seed=options.seed,
        beta=options.beta,
        learning_rate=options.learning_rate,
        num_train_epochs=options.epochs,
        per_device_train_batch_size=options.batch_size,
        max_length=options.max_length,
        lr_scheduler_type="cosine",
        logging_steps=1,
        save_steps=50,
        save_total_limit=2,
        use_cpu=not options.gpus,
        bf16=options.gpus > 0,
        report_to="none",
        disable_tqdm=True,
    )
    # As texts, which the template of the recipe has rendered.
    rows = datasets.load_dataset("json", data_files=str(options.data / "train.text.jsonl"))
    trainer = DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(options.model, dtype="float32"),
        args=arguments,
        train_dataset=rows["train"],
        processing_class=AutoTokenizer.from_pretrained(options.model),
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(options.state))
    trainer.model.save_pretrained(options.out)
    AutoTokenizer.from_pretrained(options.model).save_pretrained(options.out)
    with (options.out / "metrics.jsonl").open("w") as file:
        for line in trainer.state.log_history:
            shown = {name: line[key] for key, name in NAMES.items() if key in line}
            # The last line sums up.
            if "loss" in line:
                file.write(json.dumps({"step": line["step"], **shown}) + "\n")


if __name__ == "__main__":
    main()
