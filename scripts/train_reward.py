"""Train a reward model: the chosen response shall score above the rejected one.

A response's score is the head's output at its last token, eos. The loss of a pair is
-log sigmoid(chosen - rejected) (Ouyang et al. 2022, eq. 1).
"""

import numpy as np
import torch

from rlhf.batches import global_batches, micro_batches, num_steps, pad, span_mask
from rlhf.card import write_card
from rlhf.engine import Engine, start
from rlhf.job import run
from rlhf.metrics import StepLog
from rlhf.models import load_scorer, save_model
from rlhf.passes import Scorer
from rlhf.preference import accuracy_and_ties, pairwise_loss
from rlhf.resume import Resumable
from rlhf.tokens import Ragged, load_tokenizer


def main(job):
    """Data, model, loop, save."""
    settings, placement = job.settings, job.placement
    device = start(placement)
    torch.manual_seed(settings.seed)

    fields = ("prompt", "chosen", "rejected")
    prompts, chosen, rejected = (Ragged(job.inputs["tokens"], f"train.{name}") for name in fields)
    # Both sequences of a pair go through the same pass: its cost is twice the longer one.
    lengths = 2 * (prompts.lengths + np.maximum(chosen.lengths, rejected.lengths))

    tokenizer = load_tokenizer(job.inputs["model"])
    model = load_scorer(job.inputs["model"], settings.dtype, tokenizer, new_head=True)
    steps = num_steps(len(prompts), settings.global_batch_size, settings.epochs)
    scorer = Scorer(model).to(device)
    engine = Engine(scorer, settings, settings.learning_rate, steps, placement)

    batches = global_batches(
        len(prompts), settings.global_batch_size, settings.epochs, settings.seed
    )
    training = Resumable(job, scorer=engine)
    with StepLog(job, steps) as log:
        for step, rows in training.steps(batches):
            learning_rate = engine.learning_rate
            loss_sum, scores = 0.0, []
            passes = list(
                micro_batches(rows, [lengths[row] for row in rows], placement["micro_batch_tokens"])
            )
            for number, group in enumerate(passes, start=1):
                sequences = [[*prompts[row], *chosen[row]] for row in group]
                sequences += [[*prompts[row], *rejected[row]] for row in group]
                input_ids, attention_mask = pad(sequences, tokenizer.pad_token_id, device)
                ends = [len(sequence) for sequence in sequences]
                last = span_mask([end - 1 for end in ends], ends, input_ids.shape[1], device)
                pair = engine(input_ids, attention_mask, last).view(2, len(group))
                loss = pairwise_loss(*pair).sum() / len(rows)
                engine.backward(loss, last=number == len(passes))
                loss_sum += loss.item()
                scores.append(pair.detach())
            scores = torch.cat(scores, dim=1)
            accuracy, ties = accuracy_and_ties(*scores)
            log.write(
                step,
                ["loss", "accuracy"],
                loss=loss_sum,
                accuracy=accuracy,
                ties=ties,
                margin=(scores[0] - scores[1]).mean().item(),
                learning_rate=learning_rate,
            )

    save_model(scorer.model, tokenizer, job.result)
    write_card(job)


if __name__ == "__main__":
    run(main)
