"""Train a chat model on preferences without a reward model (DPO, Rafailov et al. 2023).

The implicit reward of a response is beta * (logprob under the policy - logprob under the reference
model); the loss is that of a reward model on implicit rewards, or one of its variants
(snakechat/algorithms/preference.py). compute_reference computes the log-probabilities of the
reference model, which SimPO and ORPO do not need. KTO needs no pairs: it compares each response
with the mean reward of responses to other prompts.
"""

from pathlib import Path

import torch

from snakechat.algorithms.pair_metrics import StepScores
from snakechat.algorithms.preference_data import PreferenceData
from snakechat.config.dpo import DpoSettings
from snakechat.data.tokenizers import load_training_tokenizer
from snakechat.modeling.batching import num_steps, training_batches
from snakechat.modeling.forward import Policy, sequence_sums
from snakechat.modeling.loading import load_causal
from snakechat.modeling.lora import add_lora
from snakechat.modeling.model_check import check_model
from snakechat.modeling.models import check_sequence_length, model_size
from snakechat.modeling.saving import save_model
from snakechat.planning.stage_choice import choose_stage
from snakechat.training.changed_weights import record_changed_weights, saved_values
from snakechat.training.checkpointing import Checkpointer
from snakechat.training.engine import make_engine
from snakechat.training.evaluations import Evaluations
from snakechat.training.metric_logs import MetricsLogger, StepTimer
from snakechat.training.process_group import init_process_group
from snakechat.training.zero_stages import is_partitioned
from snakechat.workflow.job import Job, run


def main(job: Job[DpoSettings]) -> None:
    """Load data and model, train, save."""
    settings = job.settings
    device = init_process_group(job.placement)
    choose_stage(job)
    max_tokens = job.placement.micro_batch_tokens
    torch.manual_seed(settings.seed)

    # Data.
    data = PreferenceData(settings, job.inputs, "train")
    eval_data = PreferenceData(settings, job.inputs, "eval")
    num_tokens = data.rows.num_tokens(with_prompts=True)
    batches = training_batches(len(data.rows), settings.global_batch_size, settings)
    steps_per_epoch = num_steps(len(data.rows), settings.global_batch_size, epochs=1)

    # Model.
    tokenizer = load_training_tokenizer(job.inputs["model"], settings.template)
    deferred = is_partitioned(job.placement, settings.dtype)
    model = load_causal(job.inputs["model"], settings.dtype, tokenizer, deferred)
    check_sequence_length(model, settings.max_length)
    if settings.lora_rank:
        model = add_lora(model, settings.lora_rank, settings.lora_alpha, settings.train_base)
    job.record["models"] = {"model": model_size(model)}
    policy = Policy(model)
    engine = make_engine(policy, settings, settings.learning_rate, len(batches), job.placement)
    check_model(policy, data.rows, engine.sampling)

    def evaluate() -> dict[str, float]:
        rewards, losses = eval_data.evaluate(policy, max_tokens)
        return eval_data.metrics(losses, rewards)

    def save(folder: Path) -> None:
        save_model(model, tokenizer, folder, engine.gathered, saved_values(engine, settings))

    # Training.
    evaluations = Evaluations(job, len(batches), evaluate, save)
    timer = StepTimer(device)
    checkpointer = Checkpointer(job, policy=engine, evaluations=evaluations)
    with MetricsLogger(job, len(batches)) as logger:
        if checkpointer.last_step == 0:
            data.check_initial_policy(policy, batches[0], max_tokens)
            if evaluations.is_due(0):
                logger.log(0, [], (), **evaluations.run(0))
        for step, rows in checkpointer.steps(batches):
            learning_rate = engine.learning_rate
            data.epoch = (step - 1) // steps_per_epoch
            scores = StepScores(rows, device)
            with timer("train"):
                # Of the whole step: it does not depend on how micro-batches divide the rows.
                reference_point = data.reference_point(policy, rows, max_tokens)
                for micro_batch in data.rows.micro_batches(
                    rows, max_tokens, policy.supports_packing, device
                ):
                    batch, counted = micro_batch.batch, micro_batch.counted
                    logprobs = sequence_sums(engine(batch), batch.target_lengths)
                    rewards, losses = data.losses(
                        logprobs.view(2, -1), micro_batch.rows, reference_point
                    )
                    engine.backward(counted / len(rows) * losses.sum(), micro_batch.is_last)
                    scores.add(micro_batch, losses, rewards)
                engine.step()
            metrics = data.metrics(*scores.gathered(), rows)
            eval_metrics = evaluations.after_step(step)
            logger.log(
                step,
                ["loss", "auc" if settings.loss == "kto" else "accuracy"],
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


if __name__ == "__main__":
    run(main, DpoSettings)
