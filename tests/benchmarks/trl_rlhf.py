"""One measurement of rlhf.py: RLOOTrainer or GRPOTrainer of TRL, in a separate environment.

Settings tried with TRL 1.16.0 on this job (sequences/s of CPU time, one thread, +-10 %):
- Micro-batches of a step of 32: 1, 2, 4 gave 3.6, 3.5, 3.5 (RLOO) and 4.6, 4.2, 4.2 (GRPO) with a
  vocabulary of 8,192; 1, 4 gave .95, .98 with 50,272, in 5.1 and 3.0 GB. The fastest are used.
- Forward passes in fp32: 3.1 instead of 3.6 (RLOO), 3.6 instead of 4.6 (GRPO).
- A static cache: 1.8 s of generation instead of 2.1 (GRPO), 1.8 instead of 2.0 (RLOO). Used.
- Continuous batching of transformers: 15.6 s of generation instead of 2.1, in 11 GB.
- Eager attention: 3.6 instead of 3.9 (GRPO).
- Weights in bf16 without fp32 master weights: 4.4 instead of 3.9 (GRPO). Not used: the other
  implementations have fp32 master weights.
- The fused head is the only one of these trainers: on a CPU it evaluates all positions, prompts
  included.
- GRPOTrainer skips the forward pass for old log-probabilities, because one update follows;
  RLOOTrainer has no such option.
"""

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

# Silences TRL and its dependencies.
os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}

import datasets
import torch
from measuring import BETAS, RATE, SEED, measured, rss_mb
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    OPTForCausalLM,  # noqa: F401 imported lazily otherwise, after idle memory was measured
    OPTForSequenceClassification,  # noqa: F401
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

TRAINERS = {"rloo": (RLOOConfig, RLOOTrainer), "grpo": (GRPOConfig, GRPOTrainer)}
# Micro-batches of an optimizer step, by size of the vocabulary.
MICRO_BATCHES = {"8,192": 1, "50,272": 4}


def of_ids(trainer):
    """Return a subclass of a trainer that takes token ids as prompts."""

    class OfIds(trainer):
        def _tokenize_prompts(self, prompts):
            return prompts, None, {}

    return OfIds


class StepEnd(TrainerCallback):
    """Records the end of each step."""

    def __init__(self):
        self.ends = []

    def on_step_end(self, *_, **__):
        self.ends.append(time.perf_counter())


def main():
    """Train on the prompts of FOLDER/CASE/ROUND.json; print the measurement."""
    folder, turn = Path(sys.argv[1], sys.argv[2]), int(sys.argv[3])
    datasets.disable_progress_bars()
    idle, steps, tokens = rss_mb(), StepEnd(), []
    case = SimpleNamespace(**json.loads((folder / f"{turn}.json").read_text()))
    config, trainer = TRAINERS[case.algorithm]
    num_responses = case.prompts * case.num_generations
    micro_batches = MICRO_BATCHES[case.vocabulary]
    arguments = config(
        output_dir=str(folder / "trl"),
        seed=SEED + turn,
        per_device_train_batch_size=num_responses // micro_batches,
        gradient_accumulation_steps=micro_batches,
        num_train_epochs=1,
        shuffle_dataset=False,
        num_generations=case.num_generations,
        max_completion_length=case.limit,
        cache_implementation="static",
        beta=case.kl_coef,
        learning_rate=RATE,
        lr_scheduler_type="cosine",
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        use_cpu=True,
        # Master weights stay in fp32; forward passes run in bf16.
        bf16=True,
        gradient_checkpointing=False,
        logging_steps=1_000_000,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    prompts = [{"prompt": ids} for step in case.steps for ids in step]
    trained = of_ids(trainer)(
        model=str(folder / "actor"),
        reward_funcs=reward_function(folder / "reward", tokens),
        args=arguments,
        train_dataset=datasets.Dataset.from_list(prompts),
        processing_class=AutoTokenizer.from_pretrained(folder / "actor"),
        callbacks=[steps],
    )
    trained.train()
    mean = sum(tokens) / len(tokens) / num_responses
    # The first step warms up.
    number = num_responses * (len(steps.ends) - 1)
    print(json.dumps(measured(steps.ends, 1, number, idle, mean_response_tokens=mean)))


def reward_function(folder, tokens):
    """Return the reward model as a function of token ids, which also appends the tokens of a step.

    TRL passes decoded text to reward models, and tokenizes it again: responses of random weights
    would become longer and lose their eos.
    """
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.bfloat16).eval()
    pad_id = model.config.pad_token_id

    def reward(prompts, completion_ids, **_):
        tokens.append(sum(map(len, completion_ids)))
        rows = [torch.tensor(a + b) for a, b in zip(prompts, completion_ids, strict=True)]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad_id)
        with torch.inference_mode():
            return model(input_ids=ids, attention_mask=(ids != pad_id).long()).logits[:, 0].tolist()

    return reward


if __name__ == "__main__":
    main()
