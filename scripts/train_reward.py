"""Train a reward model: the chosen response shall score above the rejected one.

A response's score is the head's output at its last token, eos. With loss: last_token, that of a
pair is -log sigmoid(chosen - rejected) of these scores (Ouyang et al. 2022, eq. 1); with loss:
per_token it is the mean over the places from where the responses part to the end of the longer one,
as in DeepSpeed-Chat.
"""

import numpy as np
import torch

from snakechat.algorithms.preference import (
    PAIR_FIGURES,
    pair_sums,
    pairwise_loss,
    per_token_loss,
    since_parting,
)
from snakechat.data.tokenizers import load_training_tokenizer
from snakechat.modeling.batching import Examples, global_batches, num_steps
from snakechat.modeling.forward import Scorer, pad_with_last, response_scores
from snakechat.modeling.lora import add_lora
from snakechat.modeling.models import check_sequence_length, load_scorer, model_size, save_model
from snakechat.reporting.model_card import write_card
from snakechat.training.checkpointing import Checkpointer
from snakechat.training.engine import make_engine
from snakechat.training.metrics import MetricsLogger, StepTimer
from snakechat.training.process_group import init_process_group
from snakechat.workflow import distributed as ranks
from snakechat.workflow.errors import InputError
from snakechat.workflow.job import run

# Pairs that a saved model has to score as the one in memory does.
PROBES = 32


def main(job):
    """Data, model, loop, save."""
    settings, placement = job.settings, job.placement
    max_tokens = placement["micro_batch_tokens"]
    device = init_process_group(placement)
    torch.manual_seed(settings.seed)

    pairs = Examples.read(job.inputs["tokens"], "train", "chosen", "rejected")
    tokenizer = load_training_tokenizer(job.inputs["model"], settings.template)
    model = load_scorer(job.inputs["model"], settings.dtype, tokenizer, new_head=True)
    check_sequence_length(model, settings.max_length)
    if settings.lora_rank:
        model = add_lora(model, settings.lora_rank, settings.lora_alpha, settings.train_base)
    job.record["models"] = {"model": model_size(model)}
    scorer = Scorer(model).to(device)
    steps = num_steps(len(pairs), settings.global_batch_size, settings.epochs)
    engine = make_engine(scorer, settings, settings.learning_rate, steps, placement)

    def judge(batch):
        """Losses [n] of the pairs of a batch, and scores [2, n] of their responses."""
        if settings.loss == "last_token":
            scores = engine(batch, batch.last_index).view(2, -1)
            return pairwise_loss(*scores), scores
        tokens = batch.inputs.input_ids.flatten()[batch.target_index]
        scores = pad_with_last(engine(batch, batch.target_index), batch.target_lengths)
        compared = since_parting(pad_with_last(tokens, batch.target_lengths), batch.target_lengths)
        return per_token_loss(*scores.chunk(2), compared), scores[:, -1].view(2, -1)

    batches = global_batches(len(pairs), settings.global_batch_size, settings.epochs, settings.seed)
    tokens = pairs.num_tokens(with_prompts=True)
    timer = StepTimer(device)
    training = Checkpointer(job, scorer=engine)
    with MetricsLogger(job, steps) as logger:
        for step, rows in training.steps(batches):
            learning_rate = engine.learning_rate
            sums = torch.zeros(len(PAIR_FIGURES), device=device)
            with timer("train"):
                for micro_batch in pairs.micro_batches(
                    rows, max_tokens, scorer.supports_packing, device
                ):
                    losses, scores = judge(micro_batch.batch)
                    engine.backward(
                        micro_batch.counted / len(rows) * losses.sum(), micro_batch.is_last
                    )
                    sums += micro_batch.counted * pair_sums(losses.detach(), *scores.detach())
                engine.step()
            means = (ranks.all_reduce_sum(sums) / len(rows)).tolist()
            logger.log(
                step,
                ["loss", "accuracy"],
                rows,
                **dict(zip(PAIR_FIGURES, means, strict=True)),
                learning_rate=learning_rate,
                **engine.metrics,
            )
            logger.log_times(step, timer.seconds, int(tokens[rows].sum()), pairs=len(rows))

    probes = Examples.read(job.inputs["tokens"], "eval", "chosen", "rejected").head(PROBES)
    expected = response_scores(scorer, probes, max_tokens)
    job.facts["probe_scores"] = expected.tolist()
    with engine.gathered_weights():
        save_model(model, tokenizer, job.result)
    ranks.barrier()
    saved = Scorer(load_scorer(job.result, settings.dtype, tokenizer)).to(device)
    if not np.array_equal(response_scores(saved, probes, max_tokens), expected):
        raise InputError(
            f"{job.result}: the saved model does not score held-out pairs as the trained one did"
        )
    write_card(job)


if __name__ == "__main__":
    run(main)
