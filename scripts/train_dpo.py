"""Train a chat model on preference pairs without a reward model (DPO, Rafailov et al. 2023).

The implicit reward of a response is beta * (logprob under the policy - logprob under the reference
model); the loss is that of a reward model on implicit rewards, or one of its variants
(snakechat/algorithms/preference.py). compute_reference computes the log-probabilities of the
reference model, which SimPO and ORPO do not need.
"""

import numpy as np
import torch

from snakechat.algorithms.pair_metrics import PAIR_METRICS, pair_metric_sums
from snakechat.algorithms.preference import preference_losses
from snakechat.config.dpo import DpoSettings, has_reference
from snakechat.data.tokenizers import load_training_tokenizer
from snakechat.modeling.batching import Examples, global_batches, num_steps
from snakechat.modeling.forward import Policy
from snakechat.modeling.loading import load_causal
from snakechat.modeling.lora import add_lora
from snakechat.modeling.models import check_sequence_length, model_size
from snakechat.modeling.saving import save_model
from snakechat.reporting.model_card import write_card
from snakechat.training.checkpointing import Checkpointer
from snakechat.training.engine import make_engine
from snakechat.training.metrics import MetricsLogger, StepTimer
from snakechat.training.process_group import init_process_group
from snakechat.workflow import distributed as ranks
from snakechat.workflow.job import Job, run


def main(job: Job[DpoSettings]) -> None:
    """Load data and model, train, save."""
    settings, max_tokens = job.settings, job.placement["micro_batch_tokens"]
    device = init_process_group(job.placement)
    torch.manual_seed(settings.seed)

    # Data.
    pairs = Examples.read(job.inputs["tokens"], "train", "chosen", "rejected")
    reference = None
    if has_reference(settings.loss):
        reference = torch.from_numpy(np.load(job.inputs["reference"] / "train.npy")).to(device)
    num_tokens = pairs.num_tokens(with_prompts=True)
    batches = global_batches(len(pairs), settings.global_batch_size, settings.epochs, settings.seed)
    total_steps = num_steps(len(pairs), settings.global_batch_size, settings.epochs)

    # Model.
    tokenizer = load_training_tokenizer(job.inputs["model"], settings.template)
    model = load_causal(job.inputs["model"], settings.dtype, tokenizer)
    check_sequence_length(model, settings.max_length)
    if settings.lora_rank:
        model = add_lora(model, settings.lora_rank, settings.lora_alpha, settings.train_base)
    job.record["models"] = {"model": model_size(model)}
    policy = Policy(model).to(device)
    engine = make_engine(policy, settings, settings.learning_rate, total_steps, job.placement)

    # Training.
    timer = StepTimer(device)
    checkpointer = Checkpointer(job, policy=engine)
    with MetricsLogger(job, total_steps) as logger:
        for step, rows in checkpointer.steps(batches):
            learning_rate = engine.learning_rate
            metric_sums = torch.zeros(len(PAIR_METRICS), device=device)
            with timer("train"):
                for micro_batch in pairs.micro_batches(
                    rows, max_tokens, policy.supports_packing, device
                ):
                    batch, counted = micro_batch.batch, micro_batch.counted
                    token_logprobs = engine(batch)
                    logprobs = torch.segment_reduce(
                        token_logprobs, "sum", lengths=batch.target_lengths
                    )
                    rewards, losses = preference_losses(
                        settings,
                        logprobs.view(2, -1),
                        None if reference is None else reference[:, micro_batch.rows],
                        batch.target_lengths.view(2, -1),
                    )
                    engine.backward(counted / len(rows) * losses.sum(), micro_batch.is_last)
                    metric_sums += counted * pair_metric_sums(losses.detach(), *rewards.detach())
                engine.step()
            means = (ranks.all_reduce_sum(metric_sums) / len(rows)).tolist()
            logger.log(
                step,
                ["loss", "accuracy"],
                rows,
                **dict(zip(PAIR_METRICS, means, strict=True)),
                learning_rate=learning_rate,
                **engine.metrics,
            )
            logger.log_times(step, timer.seconds, int(num_tokens[rows].sum()), pairs=len(rows))

    # Result.
    with engine.gathered_weights():
        save_model(model, tokenizer, job.result)
    write_card(job)


if __name__ == "__main__":
    run(main, DpoSettings)
