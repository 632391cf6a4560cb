"""Train a chat model on preferences without a reward model (DPO, Rafailov et al. 2023).

The implicit reward of a response is beta * (logprob under the policy - logprob under the reference
model); the loss is the loss of a reward model on implicit rewards, or one of its variants
(snakechat/algorithms/preference.py). compute_reference computes the log-probabilities of the
reference model, which SimPO and ORPO do not need. KTO needs no pairs: it compares each response
with the mean reward of responses to other prompts.
"""

import numpy as np
from torch import Tensor

from snakechat.algorithms.preference import PreferenceData, pair_gradients
from snakechat.config.settings import DpoSettings
from snakechat.modeling.batching import MicroBatch, num_steps
from snakechat.modeling.forward import Policy, sequence_sums
from snakechat.training.trainer import Metrics, Training, trainer
from snakechat.workflow.job import run


@trainer
def main(training: Training[DpoSettings]) -> None:
    """Load data and model, train, save."""
    settings, inputs = training.settings, training.job.inputs
    data = PreferenceData(settings, inputs, "train")
    eval_data = PreferenceData(settings, inputs, "eval")
    steps_per_epoch = num_steps(len(data.rows), settings.global_batch_size, epochs=1)
    engine = training.load(Policy, data.rows)
    policy = engine.module

    def update(step: int, rows: np.ndarray) -> Metrics:
        data.epoch = (step - 1) // steps_per_epoch
        # Of the whole step: it does not depend on how micro-batches divide the rows.
        reference_point = data.reference_point(policy, rows)

        def losses_and_rewards(micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
            logprobs = sequence_sums(engine(micro_batch.batch), micro_batch.batch.target_lengths)
            return data.losses(logprobs.view(2, -1), micro_batch.rows, reference_point)

        losses, rewards = pair_gradients(
            engine, data.rows, rows, training.device, losses_and_rewards
        )
        engine.step()
        return data.metrics(losses, rewards, rows)

    def evaluate() -> dict[str, float]:
        return eval_data.metrics(*eval_data.evaluate(policy))

    shown = ["loss", "auc" if settings.loss == "kto" else "accuracy"]
    training.train(update, evaluate, data.rows.num_tokens(with_prompts=True), shown)


if __name__ == "__main__":
    run(main, DpoSettings)
