"""Implicit rewards of a DPO model on held-out pairs: accuracy, margin, loss."""

import numpy as np
import torch

from rlhf.job import run
from rlhf.metrics import write_json
from rlhf.models import choose_device, load_causal
from rlhf.passes import Policy, response_logprobs
from rlhf.preference import accuracy_and_ties, dpo_loss, implicit_rewards
from rlhf.tokens import Ragged, load_tokenizer


def main(job):
    """Rewards of both answers of each pair, and what "the longer one wins" would reach."""
    settings = job.settings
    device = choose_device(job.placement)
    tokenizer = load_tokenizer(job.inputs["model"])
    policy = Policy(load_causal(job.inputs["model"], settings.dtype, tokenizer)).to(device).eval()
    prompts = Ragged(job.inputs["tokens"], "eval.prompt")
    rewards, lengths = {}, {}
    for answer in ("chosen", "rejected"):
        responses = Ragged(job.inputs["tokens"], f"eval.{answer}")
        logprobs = response_logprobs(
            policy, prompts, responses, tokenizer.pad_token_id, job.placement["micro_batch_tokens"]
        )
        ref_logprobs = np.load(job.inputs["reference"] / f"eval.{answer}.npy")
        rewards[answer] = torch.from_numpy(
            implicit_rewards(logprobs, ref_logprobs.astype(np.float64), settings.beta)
        )
        lengths[answer] = torch.tensor(responses.lengths)
    accuracy, ties = accuracy_and_ties(rewards["chosen"], rewards["rejected"])
    longer, as_long = accuracy_and_ties(lengths["chosen"], lengths["rejected"])
    loss = dpo_loss(rewards["chosen"], rewards["rejected"], settings.label_smoothing)
    figures = {
        "pairs": len(prompts),
        "accuracy": accuracy,
        "ties": ties,
        "loss": loss.mean().item(),
        "margin": (rewards["chosen"] - rewards["rejected"]).mean().item(),
        "chosen_reward": rewards["chosen"].mean().item(),
        "rejected_reward": rewards["rejected"].mean().item(),
        "longer_wins_accuracy": longer,
        "equal_lengths": as_long,
    }
    write_json(job.result / "metrics.json", figures)
    print(f"accuracy {accuracy:.3f}, ties {ties:.4f}, the longer one wins: {longer:.3f}")


if __name__ == "__main__":
    run(main)
