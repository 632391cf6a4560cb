"""Train a reward model: the chosen response of a pair is to score higher than the rejected one.

The score of a response is the output of the score head at its last token, eos. With
loss: last_token, the loss of a pair is -log sigmoid(chosen - rejected) (Ouyang et al. 2022, eq. 1).
With loss: per_token, it is the mean of this loss over the positions from the first one where the
responses differ to the end of the longer one, as in DeepSpeed-Chat.
"""

import numpy as np
import torch

from snakechat.algorithms.pair_metrics import StepScores, pair_metrics
from snakechat.algorithms.preference import divergent_positions, pairwise_loss, per_token_loss
from snakechat.config.training_settings import RewardSettings
from snakechat.modeling.batching import Examples, training_batches
from snakechat.modeling.forward import pad_with_last, response_scores
from snakechat.modeling.packing import TokenBatch
from snakechat.training.engine import Engine
from snakechat.training.evaluations import Evaluations
from snakechat.training.loop import TrainingLoop
from snakechat.training.start import load_reward_model, on_rungs, start_training
from snakechat.workflow.job import Job, run


@on_rungs
def main(job: Job[RewardSettings]) -> None:
    """Load data and model, train, save."""
    settings = job.settings
    device, trial = start_training(job)
    max_tokens = job.placement.micro_batch_tokens

    # Data.
    pairs = Examples.read(job.inputs["tokens"], "train", "chosen", "rejected")
    eval_pairs = Examples.read(job.inputs["tokens"], "eval", "chosen", "rejected")
    num_tokens = pairs.num_tokens(with_prompts=True)
    batches = training_batches(len(pairs), settings.global_batch_size, settings)

    # Model.
    trained = load_reward_model(job, pairs, len(batches))
    scorer, engine = trained.module, trained.engine

    def train(rows: np.ndarray) -> StepScores:
        """Update the model on pairs; return their losses and scores."""
        step_scores = StepScores(rows, device)
        for micro_batch in pairs.micro_batches(rows, max_tokens, scorer.supports_packing, device):
            counted = micro_batch.counted
            losses, scores = losses_and_scores(engine, micro_batch.batch, settings.loss)
            engine.backward(counted / len(rows) * losses.sum(), micro_batch.is_last)
            step_scores.add(micro_batch, losses, scores)
        engine.step()
        return step_scores

    def evaluate() -> dict[str, float]:
        scores = torch.from_numpy(response_scores(scorer, eval_pairs, max_tokens))
        return pair_metrics(pairwise_loss(*scores), scores)

    # Training.
    evaluations = Evaluations(job, len(batches), evaluate, trained.save)
    with TrainingLoop(job, batches, evaluations, device, scorer=engine) as loop:
        largest = pairs.largest_rows(max_tokens, scorer.supports_packing)
        trial.run(loop, [engine], lambda: train(largest))
        loop.evaluate_initial_model()
        for step, rows in loop.steps():
            learning_rate = engine.learning_rate
            with loop.timer("train"):
                scores = train(rows)
            metrics = {
                **pair_metrics(*scores.gathered()),
                "learning_rate": learning_rate,
                **engine.metrics,
            }
            tokens = int(num_tokens[rows].sum())
            loop.end_step(step, rows, ["loss", "accuracy"], metrics, tokens, {"pairs": len(rows)})

        # Result.
        evaluations.save_result()
        trained.record_changed_weights()


def losses_and_scores(
    engine: Engine, batch: TokenBatch, loss: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the losses [n] of the pairs of a batch, and the scores [2, n] of their responses."""
    if loss == "last_token":
        scores = engine(batch, batch.last_index).view(2, -1)
        return pairwise_loss(*scores), scores
    tokens = batch.inputs.input_ids.flatten()[batch.target_index]
    lengths = batch.target_lengths
    scores = pad_with_last(engine(batch, batch.target_index), lengths)
    compared = divergent_positions(pad_with_last(tokens, lengths), lengths)
    chosen, rejected = scores.chunk(2)
    return per_token_loss(chosen, rejected, compared), scores[:, -1].view(2, -1)


if __name__ == "__main__":
    run(main, RewardSettings)
