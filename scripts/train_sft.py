"""Fine-tune a language model on the chosen responses.

The loss is the mean of -log p(token) over the tokens of a step (all of them, or those of the
response), whatever passes they stand in.
"""

import torch

from rlhf.batches import global_batches, micro_batches, num_steps, pad, span_mask
from rlhf.card import write_card
from rlhf.engine import Engine, start
from rlhf.job import run
from rlhf.metrics import StepLog
from rlhf.models import add_lora, load_causal, save_model
from rlhf.passes import Policy
from rlhf.resume import Resumable
from rlhf.tokens import Ragged, load_tokenizer


def main(job):
    """Data, model, loop, save."""
    settings, placement = job.settings, job.placement
    device = start(placement)
    torch.manual_seed(settings.seed)

    prompts = Ragged(job.inputs["tokens"], "train.prompt")
    responses = Ragged(job.inputs["tokens"], "train.chosen")
    lengths = prompts.lengths + responses.lengths
    # The first token has nothing before it and cannot be learnt.
    learnt_from = [1] * len(prompts) if settings.train_on_prompt else prompts.lengths
    learnt = lengths - learnt_from

    tokenizer = load_tokenizer(job.inputs["model"])
    model = load_causal(job.inputs["model"], settings.dtype, tokenizer)
    if settings.lora_rank:
        model = add_lora(model, settings.lora_rank, settings.lora_alpha)
    steps = num_steps(len(prompts), settings.global_batch_size, settings.epochs)
    policy = Policy(model).to(device)
    engine = Engine(policy, settings, settings.learning_rate, steps, placement)

    batches = global_batches(
        len(prompts), settings.global_batch_size, settings.epochs, settings.seed
    )
    training = Resumable(job, policy=engine)
    with StepLog(job, steps) as log:
        for step, rows in training.steps(batches):
            learning_rate = engine.learning_rate
            num_tokens, loss_sum = int(sum(learnt[row] for row in rows)), 0.0
            passes = list(
                micro_batches(rows, [lengths[row] for row in rows], placement["micro_batch_tokens"])
            )
            for number, group in enumerate(passes, start=1):
                sequences = [[*prompts[row], *responses[row]] for row in group]
                input_ids, attention_mask = pad(sequences, tokenizer.pad_token_id, device)
                targets = span_mask(
                    [learnt_from[row] for row in group],
                    [lengths[row] for row in group],
                    input_ids.shape[1],
                    device,
                )
                logprobs = engine(input_ids, attention_mask, targets)
                loss = -logprobs.sum() / num_tokens
                engine.backward(loss, last=number == len(passes))
                loss_sum += loss.item()
            log.write(
                step,
                ["loss"],
                loss=loss_sum,
                learning_rate=learning_rate,
                tokens=num_tokens,
            )

    save_model(policy.model, tokenizer, job.result)
    write_card(job)


if __name__ == "__main__":
    run(main)
