"""Train a reward model: the chosen response of a pair is to score higher than the rejected one.

The score of a response is the output of the score head at its last token, eos. With
loss: last_token, the loss of a pair is -log sigmoid(chosen - rejected) (Ouyang et al. 2022, eq. 1).
With loss: per_token, it is the mean of this loss over the positions from the first one where the
responses differ to the end of the longer one, as in DeepSpeed-Chat.
"""

import numpy as np
import torch

from snakechat.algorithms.preference import (
    divergent_positions,
    pair_gradients,
    pair_metrics,
    pairwise_loss,
    per_token_loss,
)
from snakechat.config.settings import RewardSettings
from snakechat.modeling.batching import Examples, MicroBatch
from snakechat.modeling.forward import Scorer, pad_with_last, response_scores
from snakechat.training.engine import Engine
from snakechat.training.trainer import Metrics, Training, trainer
from snakechat.workflow.job import run


@trainer
def main(training: Training[RewardSettings]) -> None:
    """Load data and model, train, save."""
    loss, tokens = training.settings.loss, training.job.inputs["tokens"]
    pairs = Examples.read(tokens, "train", "chosen", "rejected")
    eval_pairs = Examples.read(tokens, "eval", "chosen", "rejected")
    engine = training.load(Scorer, pairs)

    def update(step: int, rows: np.ndarray) -> Metrics:
        losses, scores = pair_gradients(
            engine,
            pairs,
            rows,
            training.device,
            lambda micro_batch: losses_and_scores(engine, loss, micro_batch),
        )
        engine.step()
        return pair_metrics(losses, scores)

    def evaluate() -> dict[str, float]:
        scores = torch.from_numpy(response_scores(engine.module, eval_pairs))
        return pair_metrics(pairwise_loss(*scores), scores)

    num_tokens = pairs.num_tokens(with_prompts=True)
    training.train(update, evaluate, num_tokens, ["loss", "accuracy"], evaluates_first=True)


def losses_and_scores(
    engine: Engine[Scorer], loss: str, micro_batch: MicroBatch
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the losses [n] of the pairs of a batch, and the scores [2, n] of their responses."""
    batch = micro_batch.batch
    if loss == "last_token":
        scores = engine(batch, batch.last_index).view(2, -1)
        return pairwise_loss(*scores), scores
    tokens = batch.input_ids.flatten()[batch.target_index]
    lengths = batch.target_lengths
    scores = pad_with_last(engine(batch, batch.target_index), lengths)
    compared = divergent_positions(pad_with_last(tokens, lengths), lengths)
    chosen, rejected = scores.chunk(2)
    return per_token_loss(chosen, rejected, compared), scores[:, -1].view(2, -1)


if __name__ == "__main__":
    run(main, RewardSettings)
