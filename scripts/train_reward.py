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
from snakechat.data.tokens import trained_tokenizer
from snakechat.modeling.batches import Examples, global_batches, num_steps
from snakechat.modeling.forward import Scorer, padded, response_scores
from snakechat.modeling.lora import add_lora
from snakechat.modeling.models import check_length, load_scorer, save_model, size_of
from snakechat.reporting.model_card import write_card
from snakechat.training.checkpointing import Resumable
from snakechat.training.engine import make_engine, start
from snakechat.training.metrics import Clock, StepLog
from snakechat.workflow import distributed as ranks
from snakechat.workflow.job import InputError, run

# Pairs that a saved model has to score as the one in memory does.
PROBES = 32


def main(job):
    """Data, model, loop, save."""
    settings, placement = job.settings, job.placement
    max_tokens = placement["micro_batch_tokens"]
    device = start(placement)
    torch.manual_seed(settings.seed)

    pairs = Examples.read(job.inputs["tokens"], "train", "chosen", "rejected")
    tokenizer = trained_tokenizer(job.inputs["model"], settings.template)
    model = load_scorer(job.inputs["model"], settings.dtype, tokenizer, new_head=True)
    check_length(model, settings.max_length)
    if settings.lora_rank:
        model = add_lora(model, settings.lora_rank, settings.lora_alpha, settings.train_base)
    job.record["models"] = {"model": size_of(model)}
    scorer = Scorer(model).to(device)
    steps = num_steps(len(pairs), settings.global_batch_size, settings.epochs)
    engine = make_engine(scorer, settings, settings.learning_rate, steps, placement)

    def judge(grid):
        """Losses [n] of the pairs of a grid, and scores [2, n] of their responses."""
        if settings.loss == "last_token":
            scores = engine(grid, grid.ends).view(2, -1)
            return pairwise_loss(*scores), scores
        tokens = grid.inputs.input_ids.flatten()[grid.tokens]
        scores = padded(engine(grid, grid.tokens), grid.lengths)
        compared = since_parting(padded(tokens, grid.lengths), grid.lengths)
        return per_token_loss(*scores.chunk(2), compared), scores[:, -1].view(2, -1)

    batches = global_batches(len(pairs), settings.global_batch_size, settings.epochs, settings.seed)
    tokens = pairs.num_tokens(with_prompts=True)
    clock = Clock(device)
    training = Resumable(job, scorer=engine)
    with StepLog(job, steps) as log:
        for step, rows in training.steps(batches):
            learning_rate = engine.learning_rate
            sums = torch.zeros(len(PAIR_FIGURES), device=device)
            with clock("train"):
                for part in pairs.passes(rows, max_tokens, scorer.packs, device):
                    losses, scores = judge(part.grid)
                    engine.backward(part.counts / len(rows) * losses.sum(), part.last)
                    sums += part.counts * pair_sums(losses.detach(), *scores.detach())
                engine.step()
            means = (ranks.total(sums) / len(rows)).tolist()
            log.write(
                step,
                ["loss", "accuracy"],
                rows,
                **dict(zip(PAIR_FIGURES, means, strict=True)),
                learning_rate=learning_rate,
                **engine.figures,
            )
            log.write_times(step, clock.seconds, int(tokens[rows].sum()), pairs=len(rows))

    probes = Examples.read(job.inputs["tokens"], "eval", "chosen", "rejected").first(PROBES)
    expected = response_scores(scorer, probes, max_tokens)
    job.facts["probe_scores"] = expected.tolist()
    with engine.whole_weights():
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
