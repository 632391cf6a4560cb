"""Train a chat model by TRL's SFTTrainer or DPOTrainer, in place of our trainer: a command.

Options are fields of SFTConfig or DPOConfig. The environment has the packages of
programs/requirements-trl.txt.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# Silences TRL and its dependencies.
os.environ |= {"TRANSFORMERS_VERBOSITY": "error"}

import datasets
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser
from transformers.trainer_utils import get_last_checkpoint
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

TRAINERS = {"sft": (SFTConfig, SFTTrainer), "dpo": (DPOConfig, DPOTrainer)}
# Metrics of TRL by the names that pages have for them.
NAMES = {
    "loss": "loss",
    "rewards/accuracies": "accuracy",
    "rewards/chosen": "chosen_score",
    "rewards/rejected": "rejected_score",
    "learning_rate": "learning_rate",
    "grad_norm": "grad_norm",
}
# Fields whose defaults in TRL do not fit: it logs every 10 steps, and to all tools that it finds.
DEFAULTS = {"logging_steps": 1, "save_steps": 50, "save_total_limit": 2, "report_to": "none"}


@dataclass
class Paths:
    """The stage, and what the command of a recipe gives to this program."""

    stage: Literal["sft", "dpo"]
    model: Path
    data: Path
    out: Path
    state: Path
    gpus: int = 0


def main() -> None:
    """Train; resume from the state of an earlier attempt."""
    [paths, _] = HfArgumentParser(Paths).parse_args_into_dataclasses(return_remaining_strings=True)
    config, trainer_class = TRAINERS[paths.stage]
    parser = HfArgumentParser((Paths, config))
    parser.set_defaults(output_dir=str(paths.state), use_cpu=not paths.gpus, **DEFAULTS)
    _, arguments = parser.parse_args_into_dataclasses()
    datasets.disable_progress_bars()
    # As texts, which the template of the recipe has rendered.
    rows = datasets.load_dataset("json", data_files=str(paths.data / "train.text.jsonl"))
    tokenizer = AutoTokenizer.from_pretrained(paths.model)
    trainer = trainer_class(
        model=AutoModelForCausalLM.from_pretrained(paths.model, dtype="float32"),
        args=arguments,
        train_dataset=rows["train"],
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(paths.state))
    trainer.model.save_pretrained(paths.out)
    AutoTokenizer.from_pretrained(paths.model).save_pretrained(paths.out)
    with (paths.out / "metrics.jsonl").open("w") as file:
        for line in trainer.state.log_history:
            shown = {name: line[key] for key, name in NAMES.items() if key in line}
            # The last line sums up.
            if "loss" in line:
                file.write(json.dumps({"step": line["step"], **shown}) + "\n")


if __name__ == "__main__":
    main()
