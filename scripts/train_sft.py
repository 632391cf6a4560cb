"""Fine-tune a language model on the chosen responses (supervised fine-tuning).

The loss is the mean of -log p(token) over the target tokens of a step. train_on selects these
tokens: the last response, all turns of the assistant, or prompts and responses. The loss does not
depend on how micro-batches and processes divide the rows.
"""

import numpy as np
import torch

from snakechat.config.training_settings import SftSettings
from snakechat.modeling.batching import Examples, training_batches
from snakechat.modeling.forward import response_logprobs
from snakechat.training.evaluations import Evaluations
from snakechat.training.loop import TrainingLoop
from snakechat.training.start import load_policy, on_rungs, start_training
from snakechat.workflow import distributed as ranks
from snakechat.workflow.job import Job, run


@on_rungs
def main(job: Job[SftSettings]) -> None:
    """Load data and model, train, save."""
    settings = job.settings
    with_prompts = settings.train_on == "all_tokens"
    device, trial = start_training(job)
    max_tokens = job.placement.micro_batch_tokens

    # Data.
    train_split = Examples.read(job.inputs["tokens"], "train", "chosen")
    eval_split = Examples.read(job.inputs["tokens"], "eval", "chosen")
    num_targets = train_split.num_tokens(with_prompts)
    batches = training_batches(len(train_split), settings.global_batch_size, settings)

    # Model.
    trained = load_policy(job, train_split, len(batches))
    policy, engine = trained.module, trained.engine

    def train(rows: np.ndarray) -> torch.Tensor:
        """Update the model on rows; return the share of this process in the loss."""
        num_tokens, loss_sum = int(num_targets[rows].sum()), torch.zeros((), device=device)
        for micro_batch in train_split.micro_batches(
            rows, max_tokens, policy.supports_packing, device, with_prompts
        ):
            losses = -engine(micro_batch.batch, return_sum=True)
            loss = micro_batch.counted / num_tokens * losses
            engine.backward(loss, micro_batch.is_last)
            loss_sum += loss.detach()
        engine.step()
        return loss_sum

    def evaluate() -> dict[str, float]:
        logprobs = response_logprobs(policy, eval_split, max_tokens, with_prompts=with_prompts)
        return {"loss": -logprobs.sum() / eval_split.num_tokens(with_prompts).sum()}

    # Training.
    evaluations = Evaluations(job, len(batches), evaluate, trained.save)
    with TrainingLoop(job, batches, evaluations, device, policy=engine) as loop:
        largest = train_split.largest_rows(max_tokens, policy.supports_packing)
        trial.run(loop, [engine], lambda: train(largest))
        if evaluations.is_due(0):
            loop.evaluate_initial_model()
        for step, rows in loop.steps():
            learning_rate, num_tokens = engine.learning_rate, int(num_targets[rows].sum())
            with loop.timer("train"):
                loss_sum = train(rows)
            metrics = {
                "loss": ranks.all_reduce_sum(loss_sum).item(),
                "tokens": num_tokens,
                "learning_rate": learning_rate,
                **engine.metrics,
            }
            loop.end_step(step, rows, ["loss"], metrics, num_tokens, {"rows": len(rows)})

        # Result.
        evaluations.save_result()
        trained.record_changed_weights()


if __name__ == "__main__":
    run(main, SftSettings)
