"""Train a chat model on pairs without a reward model, by DPO (Rafailov et al. 2023).

An answer's implicit reward is beta * (log-probability under the policy - that under the reference);
the loss is that of a reward model on these. The reference's log-probabilities are an input.
"""

import numpy as np
import torch

from rlhf.batches import global_batches, micro_batches, num_steps, pad, span_mask
from rlhf.card import write_card
from rlhf.engine import Engine, start
from rlhf.job import run
from rlhf.metrics import StepLog
from rlhf.models import add_lora, load_causal, save_model
from rlhf.passes import Policy, row_sums
from rlhf.preference import accuracy_and_ties, dpo_loss, implicit_rewards
from rlhf.resume import Resumable
from rlhf.tokens import Ragged, load_tokenizer


def main(job):
    """Data, model, loop, save."""
    settings, placement = job.settings, job.placement
    device = start(placement)
    torch.manual_seed(settings.seed)

    fields = ("prompt", "chosen", "rejected")
    prompts, chosen, rejected = (Ragged(job.inputs["tokens"], f"train.{name}") for name in fields)
    ref_logprobs = torch.stack(
        [
            torch.from_numpy(np.load(job.inputs["reference"] / f"train.{name}.npy"))
            for name in ("chosen", "rejected")
        ]
    ).to(device)
    # Both sequences of a pair go through the same pass: its cost is twice the longer one.
    lengths = 2 * (prompts.lengths + np.maximum(chosen.lengths, rejected.lengths))

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
            loss_sum, rewards = 0.0, []
            passes = list(
                micro_batches(rows, [lengths[row] for row in rows], placement["micro_batch_tokens"])
            )
            for number, group in enumerate(passes, start=1):
                sequences = [[*prompts[row], *chosen[row]] for row in group]
                sequences += [[*prompts[row], *rejected[row]] for row in group]
                input_ids, attention_mask = pad(sequences, tokenizer.pad_token_id, device)
                starts = [len(prompts[row]) for row in group] * 2
                ends = [len(sequence) for sequence in sequences]
                tokens = span_mask(starts, ends, input_ids.shape[1], device)
                logprobs = engine(input_ids, attention_mask, tokens)
                logprobs = row_sums(logprobs, tokens).view(2, len(group))
                pair = implicit_rewards(logprobs, ref_logprobs[:, group], settings.beta)
                loss = dpo_loss(*pair, settings.label_smoothing).sum() / len(rows)
                engine.backward(loss, last=number == len(passes))
                loss_sum += loss.item()
                rewards.append(pair.detach())
            rewards = torch.cat(rewards, dim=1)
            accuracy, ties = accuracy_and_ties(*rewards)
            log.write(
                step,
                ["loss", "accuracy"],
                loss=loss_sum,
                accuracy=accuracy,
                ties=ties,
                margin=(rewards[0] - rewards[1]).mean().item(),
                chosen_reward=rewards[0].mean().item(),
                rejected_reward=rewards[1].mean().item(),
                learning_rate=learning_rate,
            )

    save_model(policy.model, tokenizer, job.result)
    write_card(job)


if __name__ == "__main__":
    run(main)
