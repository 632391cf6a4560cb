"""Train a chat model on preferences without a reward model (DPO, Rafailov et al. 2023).

The implicit reward of a response is beta * (logprob under the policy - logprob under the reference
model); the loss is that of a reward model on implicit rewards, or one of its variants
(snakechat/algorithms/preference.py). compute_reference computes the log-probabilities of the
reference model, which SimPO and ORPO do not need. KTO needs no pairs: it compares each response
with the mean reward of responses to other prompts.
"""

import numpy as np

from snakechat.algorithms.pair_metrics import StepScores
from snakechat.algorithms.preference_data import PreferenceData
from snakechat.config.dpo import DpoSettings
from snakechat.modeling.batching import num_steps, training_batches
from snakechat.modeling.forward import sequence_sums
from snakechat.training.evaluations import Evaluations
from snakechat.training.loop import TrainingLoop
from snakechat.training.start import load_policy, on_rungs, start_training
from snakechat.workflow.job import Job, run


@on_rungs
def main(job: Job[DpoSettings]) -> None:
    """Load data and model, train, save."""
    settings = job.settings
    device, trial = start_training(job)
    max_tokens = job.placement.micro_batch_tokens

    # Data.
    data = PreferenceData(settings, job.inputs, "train")
    eval_data = PreferenceData(settings, job.inputs, "eval")
    num_tokens = data.rows.num_tokens(with_prompts=True)
    batches = training_batches(len(data.rows), settings.global_batch_size, settings)
    steps_per_epoch = num_steps(len(data.rows), settings.global_batch_size, epochs=1)

    # Model.
    trained = load_policy(job, data.rows, len(batches))
    policy, engine = trained.module, trained.engine

    def train(rows: np.ndarray) -> StepScores:
        """Update the model on pairs; return their losses and rewards."""
        scores = StepScores(rows, device)
        # Of the whole step: it does not depend on how micro-batches divide the rows.
        reference_point = data.reference_point(policy, rows, max_tokens)
        for micro_batch in data.rows.micro_batches(
            rows, max_tokens, policy.supports_packing, device
        ):
            batch, counted = micro_batch.batch, micro_batch.counted
            logprobs = sequence_sums(engine(batch), batch.target_lengths)
            rewards, losses = data.losses(logprobs.view(2, -1), micro_batch.rows, reference_point)
            engine.backward(counted / len(rows) * losses.sum(), micro_batch.is_last)
            scores.add(micro_batch, losses, rewards)
        engine.step()
        return scores

    def evaluate() -> dict[str, float]:
        rewards, losses = eval_data.evaluate(policy, max_tokens)
        return eval_data.metrics(losses, rewards)

    # Training.
    evaluations = Evaluations(job, len(batches), evaluate, trained.save)
    with TrainingLoop(job, batches, evaluations, device, policy=engine) as loop:
        largest = data.rows.largest_rows(max_tokens, policy.supports_packing)
        trial.run(loop, [engine], lambda: train(largest))
        if loop.is_new:
            data.check_initial_policy(policy, batches[0], max_tokens)
        if evaluations.is_due(0):
            loop.evaluate_initial_model()
        for step, rows in loop.steps():
            learning_rate = engine.learning_rate
            data.epoch = (step - 1) // steps_per_epoch
            with loop.timer("train"):
                scores = train(rows)
            metrics = {
                **data.metrics(*scores.gathered(), rows),
                "learning_rate": learning_rate,
                **engine.metrics,
            }
            tokens = int(num_tokens[rows].sum())
            shown = ["loss", "auc" if settings.loss == "kto" else "accuracy"]
            loop.end_step(step, rows, shown, metrics, tokens, {"pairs": len(rows)})

        # Result.
        evaluations.save_result()
        trained.record_changed_weights()


if __name__ == "__main__":
    run(main, DpoSettings)
