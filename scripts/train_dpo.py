"""Train a chat model on pairs without a reward model, by DPO (Rafailov et al. 2023).

A response's implicit reward is beta * (log-probability under the policy - that under the reference);
the loss is that of a reward model on these. The reference's log-probabilities are an input.
"""

import numpy as np
import torch

from snakechat.algorithms.preference import PAIR_FIGURES, dpo_loss, implicit_rewards, pair_sums
from snakechat.data.tokenizers import load_training_tokenizer
from snakechat.modeling.batching import Examples, global_batches, num_steps
from snakechat.modeling.forward import Policy
from snakechat.modeling.lora import add_lora
from snakechat.modeling.models import check_sequence_length, load_causal, model_size, save_model
from snakechat.reporting.model_card import write_card
from snakechat.training.checkpointing import Checkpointer
from snakechat.training.engine import make_engine
from snakechat.training.metrics import MetricsLogger, StepTimer
from snakechat.training.process_group import init_process_group
from snakechat.workflow import distributed as ranks
from snakechat.workflow.job import run


def main(job):
    """Data, model, loop, save."""
    settings, placement = job.settings, job.placement
    max_tokens = placement["micro_batch_tokens"]
    device = init_process_group(placement)
    torch.manual_seed(settings.seed)

    pairs = Examples.read(job.inputs["tokens"], "train", "chosen", "rejected")
    ref_logprobs = torch.from_numpy(np.load(job.inputs["reference"] / "train.npy")).to(device)

    tokenizer = load_training_tokenizer(job.inputs["model"], settings.template)
    model = load_causal(job.inputs["model"], settings.dtype, tokenizer)
    check_sequence_length(model, settings.max_length)
    if settings.lora_rank:
        model = add_lora(model, settings.lora_rank, settings.lora_alpha, settings.train_base)
    job.record["models"] = {"model": model_size(model)}
    policy = Policy(model).to(device)
    steps = num_steps(len(pairs), settings.global_batch_size, settings.epochs)
    engine = make_engine(policy, settings, settings.learning_rate, steps, placement)

    batches = global_batches(len(pairs), settings.global_batch_size, settings.epochs, settings.seed)
    tokens = pairs.num_tokens(with_prompts=True)
    timer = StepTimer(device)
    training = Checkpointer(job, policy=engine)
    with MetricsLogger(job, steps) as logger:
        for step, rows in training.steps(batches):
            learning_rate = engine.learning_rate
            sums = torch.zeros(len(PAIR_FIGURES), device=device)
            with timer("train"):
                for micro_batch in pairs.micro_batches(
                    rows, max_tokens, policy.supports_packing, device
                ):
                    logprobs = torch.segment_reduce(
                        engine(micro_batch.batch), "sum", lengths=micro_batch.batch.target_lengths
                    )
                    rewards = implicit_rewards(
                        logprobs.view(2, -1), ref_logprobs[:, micro_batch.rows], settings.beta
                    )
                    losses = dpo_loss(*rewards, settings.label_smoothing)
                    engine.backward(
                        micro_batch.counted / len(rows) * losses.sum(), micro_batch.is_last
                    )
                    sums += micro_batch.counted * pair_sums(losses.detach(), *rewards.detach())
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

    with engine.gathered_weights():
        save_model(model, tokenizer, job.result)
    write_card(job)


if __name__ == "__main__":
    run(main)
