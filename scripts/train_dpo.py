"""Train a chat model on pairs without a reward model, by DPO (Rafailov et al. 2023).

A response's implicit reward is beta * (log-probability under the policy - that under the reference);
the loss is that of a reward model on these. The reference's log-probabilities are an input.
"""

import numpy as np
import torch

from snakechat.algorithms.preference import PAIR_FIGURES, dpo_loss, implicit_rewards, pair_sums
from snakechat.data.tokens import trained_tokenizer
from snakechat.modeling.batches import Examples, global_batches, num_steps
from snakechat.modeling.forward import Policy
from snakechat.modeling.lora import add_lora
from snakechat.modeling.models import check_length, load_causal, save_model, size_of
from snakechat.reporting.model_card import write_card
from snakechat.training.checkpointing import Resumable
from snakechat.training.engine import make_engine, start
from snakechat.training.metrics import Clock, StepLog
from snakechat.workflow import distributed as ranks
from snakechat.workflow.job import run


def main(job):
    """Data, model, loop, save."""
    settings, placement = job.settings, job.placement
    max_tokens = placement["micro_batch_tokens"]
    device = start(placement)
    torch.manual_seed(settings.seed)

    pairs = Examples.read(job.inputs["tokens"], "train", "chosen", "rejected")
    ref_logprobs = torch.from_numpy(np.load(job.inputs["reference"] / "train.npy")).to(device)

    tokenizer = trained_tokenizer(job.inputs["model"], settings.template)
    model = load_causal(job.inputs["model"], settings.dtype, tokenizer)
    check_length(model, settings.max_length)
    if settings.lora_rank:
        model = add_lora(model, settings.lora_rank, settings.lora_alpha, settings.train_base)
    job.record["models"] = {"model": size_of(model)}
    policy = Policy(model).to(device)
    steps = num_steps(len(pairs), settings.global_batch_size, settings.epochs)
    engine = make_engine(policy, settings, settings.learning_rate, steps, placement)

    batches = global_batches(len(pairs), settings.global_batch_size, settings.epochs, settings.seed)
    tokens = pairs.num_tokens(with_prompts=True)
    clock = Clock(device)
    training = Resumable(job, policy=engine)
    with StepLog(job, steps) as log:
        for step, rows in training.steps(batches):
            learning_rate = engine.learning_rate
            sums = torch.zeros(len(PAIR_FIGURES), device=device)
            with clock("train"):
                for part in pairs.passes(rows, max_tokens, policy.packs, device):
                    logprobs = torch.segment_reduce(
                        engine(part.grid), "sum", lengths=part.grid.lengths
                    )
                    rewards = implicit_rewards(
                        logprobs.view(2, -1), ref_logprobs[:, part.rows], settings.beta
                    )
                    losses = dpo_loss(*rewards, settings.label_smoothing)
                    engine.backward(part.counts / len(rows) * losses.sum(), part.last)
                    sums += part.counts * pair_sums(losses.detach(), *rewards.detach())
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

    with engine.whole_weights():
        save_model(model, tokenizer, job.result)
    write_card(job)


if __name__ == "__main__":
    run(main)
