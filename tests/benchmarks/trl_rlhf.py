"""One measurement of rlhf.py: TRL's RLOOTrainer or GRPOTrainer, in an environment of TRL's own.

Tried with TRL 1.16.0 on this job (sequences/s of CPU time, one thread; they vary by a tenth):
- Passes of a step of 32: 1, 2, 4 gave 3.6, 3.5, 3.5 (RLOO) and 4.6, 4.2, 4.2 (GRPO) at 8,192 words;
  1, 4 gave .95, .98 at 50,272, in 5.1 and 3.0 GB. The best are taken.
- Passes in fp32: 3.1 for 3.6 (RLOO), 3.6 for 4.6 (GRPO).
- A static cache: seconds of generation 1.8 for 2.1 (GRPO), 1.8 for 2.0 (RLOO). Taken.
- transformers' continuous batching: 15.6 seconds of generation for 2.1, in 11 GB.
- Eager attention: 3.6 for 3.9 (GRPO).
- Weights in bf16 too, without fp32 ones: 4.4 for 3.9 (GRPO). Not taken: the others have fp32 ones.
- The fused head is the trainers' only one: on a CPU it scores all positions, those of prompts too.
- GRPOTrainer leaves out the pass for old log-probabilities, as one update follows; RLOOTrainer
  has no such way.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

# TRL and what it imports would say much that is of no use here.
os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}

import datasets
import torch
from data import peak_mb
from train import BETAS, RATE, Clock, rss_mb
from transformers import (
    AutoTokenizer,
    OPTForCausalLM,  # noqa: F401 imported late otherwise, when idle memory has been read
    OPTForSequenceClassification,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

TRAINERS = {"rloo": (RLOOConfig, RLOOTrainer), "grpo": (GRPOConfig, GRPOTrainer)}
# Passes of an optimizer step, by words.
PASSES = {"8,192": 1, "50,272": 4}


def timed(trainer, clock):
    """A kind of trainer that takes prompts as ids, and tells a clock what it has done."""

    class Timed(trainer):
        def _tokenize_prompts(self, prompts):
            return prompts, None, {}

        def _generate(self, prompts):
            found = super()._generate(prompts)
            responses = found[1]
            clock.take("generate", responses=len(responses), tokens=sum(map(len, responses)))
            return found

        def _generate_and_score_completions(self, inputs):
            found = super()._generate_and_score_completions(inputs)
            clock.take("score")
            return found

    return Timed


class StepEnd(TrainerCallback):
    """Tells a clock that a step is trained."""

    def __init__(self, clock):
        self.clock = clock

    def on_step_end(self, *_, **__):
        self.clock.take("train")
        self.clock.end()


def main():
    """Train on the prompts of FOLDER/SEED.json; what its steps took goes out as JSON."""
    folder, seed = Path(sys.argv[1]), int(sys.argv[2])
    datasets.disable_progress_bars()
    idle, clock = rss_mb(), Clock()
    case = SimpleNamespace(**json.loads((folder / f"{seed}.json").read_text()))
    config, trainer = TRAINERS[case.algorithm]
    arguments = config(
        output_dir=str(folder / "trl"),
        seed=seed,
        per_device_train_batch_size=case.prompts * case.num_generations // PASSES[case.words],
        gradient_accumulation_steps=PASSES[case.words],
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
        # Weights stay fp32; passes run in bf16.
        bf16=True,
        gradient_checkpointing=False,
        logging_steps=1_000_000,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    prompts = [{"prompt": ids} for step in case.steps for ids in step]
    trained = timed(trainer, clock)(
        model=str(folder / "actor"),
        reward_funcs=reward_function(folder / "reward"),
        args=arguments,
        train_dataset=datasets.Dataset.from_list(prompts),
        processing_class=AutoTokenizer.from_pretrained(folder / "actor"),
        callbacks=[StepEnd(clock)],
    )
    trained.train()
    print(json.dumps({"steps": clock.steps, "idle_mb": idle, "peak_mb": peak_mb()}))


def reward_function(folder):
    """The reward model as a function of ids. TRL's own way with a model decodes responses and
    tokenizes them anew: those of random weights would come back longer, and without eos.
    """
    model = OPTForSequenceClassification.from_pretrained(folder, dtype=torch.bfloat16).eval()
    pad_id = model.config.pad_token_id

    def reward(prompts, completion_ids, **_):
        rows = [torch.tensor(a + b) for a, b in zip(prompts, completion_ids, strict=True)]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad_id)
        with torch.inference_mode():
            return model(input_ids=ids, attention_mask=(ids != pad_id).long()).logits[:, 0].tolist()

    return reward


if __name__ == "__main__":
    main()
