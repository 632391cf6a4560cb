"""Fine-tune a language model on the chosen responses.

The loss is the mean of -log p(token) over the tokens of a step (all of them, or those of the
response), whatever passes and processes they stand in.
"""

import torch

from snakechat.data.tokenizers import load_training_tokenizer
from snakechat.modeling.batching import Examples, global_batches
from snakechat.modeling.forward import Policy, response_logprobs
from snakechat.modeling.lora import add_lora
from snakechat.modeling.models import check_sequence_length, load_causal, model_size, save_model
from snakechat.reporting.model_card import write_card
from snakechat.training.best_model import BestModel
from snakechat.training.checkpointing import Checkpointer
from snakechat.training.engine import make_engine
from snakechat.training.metrics import MetricsLogger, StepTimer
from snakechat.training.process_group import init_process_group
from snakechat.workflow import distributed as ranks
from snakechat.workflow.errors import InputError
from snakechat.workflow.job import run


def main(job):
    """Data, model, loop, save."""
    settings, placement = job.settings, job.placement
    max_tokens, with_prompts = placement["micro_batch_tokens"], settings.train_on_prompt
    device = init_process_group(placement)
    torch.manual_seed(settings.seed)

    examples = Examples.read(job.inputs["tokens"], "train", "chosen")
    held_out = Examples.read(job.inputs["tokens"], "eval", "chosen")
    learnt = examples.num_tokens(with_prompts)
    batches = list(
        global_batches(len(examples), settings.global_batch_size, settings.epochs, settings.seed)
    )
    for step, rows in enumerate(batches, start=1):
        if not learnt[rows].any():
            raise InputError(
                f"step {step} has no token to learn, in rows {sorted(map(int, rows))}:"
                " set train_on_prompt, or truncation_side: left"
            )

    tokenizer = load_training_tokenizer(job.inputs["model"], settings.template)
    model = load_causal(job.inputs["model"], settings.dtype, tokenizer)
    check_sequence_length(model, settings.max_length)
    if settings.lora_rank:
        model = add_lora(model, settings.lora_rank, settings.lora_alpha, settings.train_base)
    job.record["models"] = {"model": model_size(model)}
    policy = Policy(model).to(device)
    engine = make_engine(policy, settings, settings.learning_rate, len(batches), placement)

    def evaluate():
        """Mean loss of the tokens of held-out rows."""
        logprobs = response_logprobs(policy, held_out, max_tokens, with_prompts=with_prompts)
        return -logprobs.sum() / held_out.num_tokens(with_prompts).sum()

    def save(folder):
        with engine.gathered_weights():
            save_model(model, tokenizer, folder)

    best = BestModel(job, save if settings.keep == "best" else None)
    timer = StepTimer(device)
    training = Checkpointer(job, policy=engine, best=best)
    with MetricsLogger(job, len(batches)) as logger:
        if training.last_step == 0:
            logger.log(0, ["eval_loss"], eval_loss=evaluate())
        for step, rows in training.steps(batches):
            learning_rate, num_tokens = engine.learning_rate, int(learnt[rows].sum())
            loss_sum = torch.zeros((), device=device)
            with timer("train"):
                for micro_batch in examples.micro_batches(
                    rows, max_tokens, policy.supports_packing, device, with_prompts
                ):
                    loss = (
                        -micro_batch.counted
                        / num_tokens
                        * engine(micro_batch.batch, return_sum=True)
                    )
                    engine.backward(loss, micro_batch.is_last)
                    loss_sum += loss.detach()
                engine.step()

            eval_loss = None
            is_due = settings.eval_steps and step % settings.eval_steps == 0
            if is_due or step == len(batches):
                eval_loss = evaluate()
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
            if settings.patience and best.evaluations_since >= settings.patience:
                break

    if settings.keep == "best":
        best.copy_to(job.result)
    else:
        save(job.result)
    write_card(job)


if __name__ == "__main__":
    run(main)
