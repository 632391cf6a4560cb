"""Accuracy of a reward model on held-out pairs: strict, ties counted apart."""

import torch

from rlhf.job import run
from rlhf.metrics import write_json
from rlhf.models import choose_device, load_scorer
from rlhf.passes import Scorer, score_last_tokens
from rlhf.preference import accuracy_and_ties, pairwise_loss
from rlhf.tokens import Ragged, load_tokenizer


def main(job):
    """Scores of both responses of each pair, and what "the longer one wins" would reach."""
    device = choose_device(job.placement)
    fields = ("prompt", "chosen", "rejected")
    prompts, chosen, rejected = (Ragged(job.inputs["tokens"], f"eval.{name}") for name in fields)
    tokenizer = load_tokenizer(job.inputs["model"])
    scorer = Scorer(load_scorer(job.inputs["model"], "fp32", tokenizer)).to(device).eval()

    def scores(responses):
        sequences = [[*prompts[row], *responses[row]] for row in range(len(prompts))]
        max_tokens = job.placement["micro_batch_tokens"]
        return score_last_tokens(scorer, sequences, tokenizer.pad_token_id, max_tokens)

    chosen_scores, rejected_scores = scores(chosen), scores(rejected)
    accuracy, ties = accuracy_and_ties(chosen_scores, rejected_scores)
    lengths = torch.tensor(chosen.lengths), torch.tensor(rejected.lengths)
    longer, as_long = accuracy_and_ties(*lengths)
    figures = {
        "pairs": len(prompts),
        "accuracy": accuracy,
        "ties": ties,
        "loss": pairwise_loss(chosen_scores, rejected_scores).mean().item(),
        "margin": (chosen_scores - rejected_scores).mean().item(),
        "chosen_score": chosen_scores.mean().item(),
        "rejected_score": rejected_scores.mean().item(),
        "longer_wins_accuracy": longer,
        "equal_lengths": as_long,
    }
    write_json(job.result / "metrics.json", figures)
    print(f"accuracy {accuracy:.3f}, ties {ties:.4f}, the longer one wins: {longer:.3f}")


if __name__ == "__main__":
    run(main)
