"""Fine-tune a language model on the chosen responses (supervised fine-tuning).

The loss is the mean of -log p(token) over the target tokens of a step: those of the responses or,
with train_on_prompt, of the prompts too. It does not depend on how micro-batches and processes
divide the rows.
"""

from pathlib import Path

import numpy as np
import torch

from snakechat.config.sft import SftSettings
from snakechat.data.tokenizers import load_training_tokenizer
from snakechat.modeling.batching import Examples, global_batches
from snakechat.modeling.forward import Policy, response_logprobs
from snakechat.modeling.loading import load_causal
from snakechat.modeling.lora import add_lora
from snakechat.modeling.models import check_sequence_length, model_size
from snakechat.modeling.saving import save_model
from snakechat.reporting.model_card import write_card
from snakechat.training.best_model import BestModel
from snakechat.training.checkpointing import Checkpointer
from snakechat.training.engine import make_engine
from snakechat.training.metrics import MetricsLogger, StepTimer
from snakechat.training.process_group import init_process_group
from snakechat.workflow import distributed as ranks
from snakechat.workflow.errors import InputError
from snakechat.workflow.job import Job, run


def main(job: Job[SftSettings]) -> None:
    """Load data and model, train, save."""
    settings, max_tokens = job.settings, job.placement["micro_batch_tokens"]
    with_prompts = settings.train_on_prompt
    device = init_process_group(job.placement)
    torch.manual_seed(settings.seed)

    # Data.
    train_split = Examples.read(job.inputs["tokens"], "train", "chosen")
    eval_split = Examples.read(job.inputs["tokens"], "eval", "chosen")
    num_targets = train_split.num_tokens(with_prompts)
    batches = list(
        global_batches(len(train_split), settings.global_batch_size, settings.epochs, settings.seed)
    )
    check_targets(batches, num_targets)

    # Model.
    tokenizer = load_training_tokenizer(job.inputs["model"], settings.template)
    model = load_causal(job.inputs["model"], settings.dtype, tokenizer)
    check_sequence_length(model, settings.max_length)
    if settings.lora_rank:
        model = add_lora(model, settings.lora_rank, settings.lora_alpha, settings.train_base)
    job.record["models"] = {"model": model_size(model)}
    policy = Policy(model).to(device)
    engine = make_engine(policy, settings, settings.learning_rate, len(batches), job.placement)

    def save(folder: Path) -> None:
        with engine.gathered_weights():
            save_model(model, tokenizer, folder)

    # Training.
    best = BestModel(job, save if settings.save_strategy == "best" else None)
    timer = StepTimer(device)
    checkpointer = Checkpointer(job, policy=engine, best=best)
    with MetricsLogger(job, len(batches)) as logger:
        if checkpointer.last_step == 0:
            first_loss = evaluate(policy, eval_split, max_tokens, with_prompts)
            logger.log(0, ["eval_loss"], eval_loss=first_loss)
        for step, rows in checkpointer.steps(batches):
            learning_rate, num_tokens = engine.learning_rate, int(num_targets[rows].sum())
            loss_sum = torch.zeros((), device=device)
            with timer("train"):
                for micro_batch in train_split.micro_batches(
                    rows, max_tokens, policy.supports_packing, device, with_prompts
                ):
                    logprob_sum = engine(micro_batch.batch, return_sum=True)
                    loss = -micro_batch.counted / num_tokens * logprob_sum
                    engine.backward(loss, micro_batch.is_last)
                    loss_sum += loss.detach()
                engine.step()

            eval_loss = None
            is_due = settings.eval_steps and step % settings.eval_steps == 0
            if is_due or step == len(batches):
                eval_loss = evaluate(policy, eval_split, max_tokens, with_prompts)
                best.update(step, eval_loss)
            logger.log(
                step,
                ["loss"],
                rows,
                loss=ranks.all_reduce_sum(loss_sum).item(),
                eval_loss=eval_loss,
                tokens=num_tokens,
                learning_rate=learning_rate,
                **engine.metrics,
            )
            logger.log_times(step, timer.seconds, num_tokens, rows=len(rows))
            patience = settings.early_stopping_patience
            if patience and best.evaluations_since >= patience:
                break

    # Result.
    if settings.save_strategy == "best":
        best.copy_to(job.result)
    else:
        save(job.result)
    write_card(job)


def check_targets(batches: list[np.ndarray], num_targets: np.ndarray) -> None:
    """Raise InputError if a step has no target tokens.

    batches: rows of each step; num_targets: target tokens [n] of each row.
    """
    for step, rows in enumerate(batches, start=1):
        if not num_targets[rows].any():
            raise InputError(
                f"step {step}, rows {sorted(map(int, rows))}: no target tokens after truncation:"
                " set train_on_prompt: true or truncation_side: left"
            )


def evaluate(policy: Policy, examples: Examples, max_tokens: int, with_prompts: bool) -> float:
    """Return the mean loss over all target tokens."""
    logprobs = response_logprobs(policy, examples, max_tokens, with_prompts=with_prompts)
    return -logprobs.sum() / examples.num_tokens(with_prompts).sum()


if __name__ == "__main__":
    run(main, SftSettings)
