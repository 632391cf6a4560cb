"""Train a reward model: the chosen response of a pair is to score higher than the rejected one.

The score of a response is the output of the score head at its last token, eos. With
loss: last_token, the loss of a pair is -log sigmoid(chosen - rejected) (Ouyang et al. 2022, eq. 1).
With loss: per_token, it is the mean of this loss over the positions from the first one where the
responses differ to the end of the longer one, as in DeepSpeed-Chat.
"""

from pathlib import Path

import torch

from snakechat.algorithms.pair_metrics import StepScores, pair_metrics
from snakechat.algorithms.preference import divergent_positions, pairwise_loss, per_token_loss
from snakechat.config.training_settings import RewardSettings
from snakechat.data.tokenizers import load_training_tokenizer
from snakechat.modeling.batching import Examples, training_batches
from snakechat.modeling.forward import Scorer, pad_with_last, response_scores
from snakechat.modeling.loading import load_scorer
from snakechat.modeling.lora import add_lora
from snakechat.modeling.model_check import check_model
from snakechat.modeling.models import check_sequence_length, model_size
from snakechat.modeling.packing import TokenBatch
from snakechat.modeling.saving import save_model
from snakechat.planning.stage_choice import choose_stage
from snakechat.training.changed_weights import record_changed_weights, saved_values
from snakechat.training.checkpointing import Checkpointer
from snakechat.training.engine import Engine, make_engine
from snakechat.training.evaluations import Evaluations
from snakechat.training.metric_logs import MetricsLogger, StepTimer
from snakechat.training.process_group import init_process_group
from snakechat.training.zero_stages import is_partitioned
from snakechat.workflow.job import Job, run


def main(job: Job[RewardSettings]) -> None:
    """Load data and model, train, save."""
    settings = job.settings
    device = init_process_group(job.placement)
    choose_stage(job)
    max_tokens = job.placement.micro_batch_tokens
    torch.manual_seed(settings.seed)

    # Data.
    pairs = Examples.read(job.inputs["tokens"], "train", "chosen", "rejected")
    eval_pairs = Examples.read(job.inputs["tokens"], "eval", "chosen", "rejected")
    num_tokens = pairs.num_tokens(with_prompts=True)
    batches = training_batches(len(pairs), settings.global_batch_size, settings)

    # Model.
    tokenizer = load_training_tokenizer(job.inputs["model"], settings.template)
    deferred = is_partitioned(job.placement, settings.dtype)
    model = load_scorer(job.inputs["model"], settings.dtype, tokenizer, True, deferred)
    check_sequence_length(model, settings.max_length)
    if settings.lora_rank:
        model = add_lora(model, settings.lora_rank, settings.lora_alpha, settings.train_base)
    job.record["models"] = {"model": model_size(model)}
    scorer = Scorer(model)
    engine = make_engine(scorer, settings, settings.learning_rate, len(batches), job.placement)
    check_model(scorer, pairs, engine.sampling)

    def evaluate() -> dict[str, float]:
        scores = torch.from_numpy(response_scores(scorer, eval_pairs, max_tokens))
        return pair_metrics(pairwise_loss(*scores), scores)

    def save(folder: Path) -> None:
        save_model(model, tokenizer, folder, engine.gathered, saved_values(engine, settings))

    # Training.
    evaluations = Evaluations(job, len(batches), evaluate, save)
    timer = StepTimer(device)
    checkpointer = Checkpointer(job, scorer=engine, evaluations=evaluations)
    with MetricsLogger(job, len(batches)) as logger:
        if checkpointer.last_step == 0:
            logger.log(0, [], (), **evaluations.run(0))
        for step, rows in checkpointer.steps(batches):
            learning_rate = engine.learning_rate
            step_scores = StepScores(rows, device)
            with timer("train"):
                for micro_batch in pairs.micro_batches(
                    rows, max_tokens, scorer.supports_packing, device
                ):
                    counted = micro_batch.counted
                    losses, scores = losses_and_scores(engine, micro_batch.batch, settings.loss)
                    engine.backward(counted / len(rows) * losses.sum(), micro_batch.is_last)
                    step_scores.add(micro_batch, losses, scores)
                engine.step()
            metrics = pair_metrics(*step_scores.gathered())
            eval_metrics = evaluations.after_step(step)
            logger.log(
                step,
                ["loss", "accuracy"],
                rows,
                **metrics,
                **eval_metrics,
                learning_rate=learning_rate,
                **engine.metrics,
            )
            logger.log_times(step, timer.seconds, int(num_tokens[rows].sum()), pairs=len(rows))
            if evaluations.should_stop:
                break

    # Result.
    evaluations.save_result()
    record_changed_weights(job, model, job.inputs["model"])


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
