"""Fine-tune a language model on the chosen responses (supervised fine-tuning).

The loss is the mean of -log p(token) over the target tokens of a step. train_on selects these
tokens: the last response, all turns of the assistant, or prompts and responses. The loss does not
depend on how micro-batches and processes divide the rows.
"""

import numpy as np
import torch

from snakechat.config.settings import SftSettings
from snakechat.modeling.batching import Examples
from snakechat.modeling.forward import Policy, response_logprobs
from snakechat.training.trainer import Metrics, Training, trainer
from snakechat.workflow.job import run
from snakechat.workflow.processes import all_reduce_sum


@trainer
def main(training: Training[SftSettings]) -> None:
    """Load data and model, train, save."""
    settings, tokens = training.settings, training.job.inputs["tokens"]
    device, with_prompts = training.device, settings.train_on == "all_tokens"

    # Data.
    train_split = Examples.read(tokens, "train", "chosen")
    eval_split = Examples.read(tokens, "eval", "chosen")
    num_targets = train_split.num_tokens(with_prompts)

    # Model.
    engine = training.load(Policy, train_split)
    policy, packing = engine.module, engine.module.supports_packing

    def update(step: int, rows: np.ndarray) -> Metrics:
        num_tokens, loss_sum = int(num_targets[rows].sum()), torch.zeros((), device=device)
        for micro_batch in train_split.micro_batches(rows, packing, device, with_prompts):
            losses = -engine(micro_batch.batch, return_sum=True)
            loss = micro_batch.counted / num_tokens * losses
            engine.backward(loss, micro_batch.is_last)
            loss_sum += loss.detach()
        engine.step()
        return {"loss": all_reduce_sum(loss_sum).item(), "tokens": num_tokens}

    def evaluate() -> dict[str, float]:
        logprobs = response_logprobs(policy, eval_split, with_prompts)
        return {"loss": -logprobs.sum() / eval_split.num_tokens(with_prompts).sum()}

    # Steps and result.
    training.train(update, evaluate, num_targets, ["loss"])


if __name__ == "__main__":
    run(main, SftSettings)
