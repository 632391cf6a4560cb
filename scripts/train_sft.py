"""Fine-tune a language model on the chosen responses (supervised fine-tuning).

The loss is the mean of -log p(token) over the target tokens of a step. train_on selects these
tokens: the last response, all turns of the assistant, or prompts and responses. The loss does not
depend on how micro-batches and processes divide the rows.
"""

import numpy as np

from snakechat.config.settings import SftSettings
from snakechat.modeling.batching import Examples
from snakechat.modeling.forward import Policy, response_logprobs
from snakechat.training.trainer import Metrics, Training, text_gradients, trainer
from snakechat.workflow.job import run


@trainer
def main(training: Training[SftSettings]) -> None:
    """Load data and model, train, save."""
    settings, tokens = training.settings, training.job.inputs["tokens"]
    with_prompts = settings.train_on == "all_tokens"
    train_split = Examples.read(tokens, "train", "chosen")
    eval_split = Examples.read(tokens, "eval", "chosen")
    num_targets = train_split.num_tokens(with_prompts)
    engine = training.load(Policy, train_split)
    policy = engine.module

    def update(step: int, rows: np.ndarray) -> Metrics:
        num_tokens = int(num_targets[rows].sum())
        micro_batches = train_split.micro_batches(
            rows, policy.supports_packing, training.device, with_prompts
        )
        loss = text_gradients(engine, micro_batches, num_tokens)
        engine.step()
        return {"loss": loss, "tokens": num_tokens}

    def evaluate() -> dict[str, float]:
        logprobs = response_logprobs(policy, eval_split, with_prompts)
        return {"loss": -logprobs.sum() / eval_split.num_tokens(with_prompts).sum()}

    training.train(update, evaluate, num_targets, ["loss"])


if __name__ == "__main__":
    run(main, SftSettings)
