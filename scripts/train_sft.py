"""Fine-tune a language model on the chosen responses (supervised fine-tuning).

The loss is the mean of -log p(token) over the target tokens of a step. train_on selects these
tokens: the last response, all turns of the assistant, or prompts and responses. The loss does not
depend on how micro-batches and processes divide the rows.
"""

from pathlib import Path

import torch

from snakechat.config.training_settings import SftSettings
from snakechat.data.tokenizers import load_training_tokenizer
from snakechat.modeling.batching import Examples, training_batches
from snakechat.modeling.forward import Policy, response_logprobs
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
from snakechat.workflow import distributed as ranks
from snakechat.workflow.job import Job, run


def main(job: Job[SftSettings]) -> None:
    """Load data and model, train, save."""
    settings = job.settings
    with_prompts = settings.train_on == "all_tokens"
    device = init_process_group(job.placement)
    choose_stage(job)
    max_tokens = job.placement.micro_batch_tokens
    torch.manual_seed(settings.seed)

    # Data.
    train_split = Examples.read(job.inputs["tokens"], "train", "chosen")
    eval_split = Examples.read(job.inputs["tokens"], "eval", "chosen")
    num_targets = train_split.num_tokens(with_prompts)
    batches = training_batches(len(train_split), settings.global_batch_size, settings)

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
    check_model(policy, train_split, engine.sampling)

    def evaluate() -> dict[str, float]:
        logprobs = response_logprobs(policy, eval_split, max_tokens, with_prompts=with_prompts)
        return {"loss": -logprobs.sum() / eval_split.num_tokens(with_prompts).sum()}

    def save(folder: Path) -> None:
        save_model(model, tokenizer, folder, engine.gathered, saved_values(engine, settings))

    # Training.
    evaluations = Evaluations(job, len(batches), evaluate, save)
    timer = StepTimer(device)
    checkpointer = Checkpointer(job, policy=engine, evaluations=evaluations)
    with MetricsLogger(job, len(batches)) as logger:
        if checkpointer.last_step == 0 and evaluations.is_due(0):
            logger.log(0, [], (), **evaluations.run(0))
        for step, rows in checkpointer.steps(batches):
            learning_rate, num_tokens = engine.learning_rate, int(num_targets[rows].sum())
            loss_sum = torch.zeros((), device=device)
            with timer("train"):
                for micro_batch in train_split.micro_batches(
                    rows, max_tokens, policy.supports_packing, device, with_prompts
                ):
                    losses = -engine(micro_batch.batch, return_sum=True)
                    loss = micro_batch.counted / num_tokens * losses
                    engine.backward(loss, micro_batch.is_last)
                    loss_sum += loss.detach()
                engine.step()
            eval_metrics = evaluations.after_step(step)
            logger.log(
                step,
                ["loss"],
                rows,
                loss=ranks.all_reduce_sum(loss_sum).item(),
                **eval_metrics,
                tokens=num_tokens,
                learning_rate=learning_rate,
                **engine.metrics,
            )
            logger.log_times(step, timer.seconds, num_tokens, rows=len(rows))
            if evaluations.should_stop:
                break

    # Result.
    evaluations.save_result()
    record_changed_weights(job, model, job.inputs["model"])


if __name__ == "__main__":
    run(main, SftSettings)
