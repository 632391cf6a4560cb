"""Compare a chat model with the SFT model that it comes from, on held-out prompts.

Both answer the same prompts several times, sampled. Differences come with 95 % intervals, by
resampling the prompts.
"""

import json

import numpy as np
import torch

from rlhf import toy
from rlhf.batches import Examples
from rlhf.generate import sample_responses
from rlhf.job import run
from rlhf.metrics import bootstrap_interval, write_json
from rlhf.models import choose_device, load_causal, load_scorer
from rlhf.passes import Policy, Scorer, answer_logprobs, answer_scores
from rlhf.tokens import Ragged, load_tokenizer

# Datasets whose answers can be told right from wrong exactly.
EXACT_CHECKS = {"shop": toy.is_right}


def main(job):
    """Answers, scores, rates; metrics.json has the figures and answers.jsonl every answer."""
    settings, placement = job.settings, job.placement
    device = choose_device(placement)
    max_tokens = placement["micro_batch_tokens"]
    tokenizer = load_tokenizer(job.inputs["rlhf"])
    held_out = Ragged(job.inputs["tokens"], "eval.prompt")
    prompts = [list(map(int, held_out[row])) for row in range(min(len(held_out), settings.prompts))]
    policies = {
        name: Policy(load_causal(job.inputs[name], settings.dtype, tokenizer)).to(device)
        for name in ("sft", "rlhf")
    }
    reward = Scorer(load_scorer(job.inputs["reward"], "fp32", tokenizer)).to(device)

    asked = [prompt for prompt in prompts for _ in range(settings.samples)]
    per_answer, answers = {}, []
    for name, policy in policies.items():
        torch.manual_seed(settings.seed)
        responses = sample_responses(
            policy.model,
            asked,
            tokenizer,
            settings.max_response_length,
            settings.temperature,
            max_tokens,
        )
        examples = Examples(asked, responses)
        [scores] = answer_scores(reward, examples, max_tokens)
        sums = {
            other: answer_logprobs(by, examples, max_tokens, settings.temperature)[0]
            for other, by in policies.items()
        }
        texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
        questions = tokenizer.batch_decode(asked, skip_special_tokens=True)
        figures = {
            "score": scores,
            "length": np.array([len(response) for response in responses]),
            "ended_by_eos": np.array([r[-1] == tokenizer.eos_token_id for r in responses]),
            "kl_to_sft": sums[name] - sums["sft"],
        }
        if settings.exact_check:
            check = EXACT_CHECKS[settings.exact_check]
            right = [check(q, t) for q, t in zip(questions, texts, strict=True)]
            figures["success"] = np.array(right) & figures["ended_by_eos"]
        per_answer[name] = figures
        answers += [
            {"model": name, "prompt": q, "answer": t, "score": float(s)}
            for q, t, s in zip(questions, texts, figures["score"], strict=True)
        ]

    write_json(job.result / "metrics.json", compare(per_answer, len(prompts), settings))
    with open(job.result / "answers.jsonl", "w") as file:
        file.writelines(json.dumps(answer) + "\n" for answer in answers)


def compare(per_answer, num_prompts, settings):
    """Means of both models, and the difference of scores and success with its interval."""
    figures = {"prompts": num_prompts, "samples": settings.samples}
    for name, values in per_answer.items():
        figures[name] = {key: float(np.mean(value)) for key, value in values.items()}
    for key in ("score", "success"):
        if key in per_answer["rlhf"]:
            # Answers to one prompt are alike: the prompt is what is drawn anew.
            by_prompt = [
                per_answer[name][key].astype(float).reshape(num_prompts, -1).mean(axis=1)
                for name in ("rlhf", "sft")
            ]
            difference = by_prompt[0] - by_prompt[1]
            interval = bootstrap_interval(difference, settings.bootstrap, settings.seed)
            figures[f"{key}_difference"] = {
                "mean": float(difference.mean()),
                "interval_95": interval,
            }
            print(f"{key}: {figures['sft'][key]:.3f} -> {figures['rlhf'][key]:.3f}")
    return figures


if __name__ == "__main__":
    run(main)
