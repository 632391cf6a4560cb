"""Compare a chat model with the SFT model that it comes from, on held-out prompts.

Both answer the same prompts several times, sampled; so does the average of the chat model's
weights, where training kept one. Differences come with 95 % intervals, by resampling the prompts.

Shapes: n prompts, S answers to each.
"""

import json

import numpy as np
import torch

from rlhf import toy
from rlhf.batches import Examples
from rlhf.gates import check_tokenizers
from rlhf.generate import sample_responses
from rlhf.job import run
from rlhf.metrics import bootstrap_interval, write_json
from rlhf.models import choose_device, load_causal, load_scorer
from rlhf.passes import Policy, Scorer, answer_logprobs, answer_scores
from rlhf.rewards import RewardFunctions
from rlhf.tokens import Ragged, load_tokenizer

# Datasets whose answers can be told right from wrong exactly.
EXACT_CHECKS = {"shop": toy.is_right}
# Figures whose differences to the SFT model are told.
COMPARED = ("score", "judge_score", "success")


def main(job):
    """Answers, scores, rates; metrics.json has the figures and answers.jsonl every answer."""
    settings = job.settings
    evaluation = Evaluation(job)
    sft = evaluation.policy(job.inputs["sft"])
    answered = {"sft": evaluation.answers_of(sft, sft)}
    folders = {"rlhf": job.inputs["rlhf"], "ema": job.inputs["rlhf"] / "ema"}
    for name, folder in folders.items():
        if folder.is_dir():
            answered[name] = evaluation.answers_of(evaluation.policy(folder), sft)
    del sft
    for answers in answered.values():
        answers.figures["score"] = evaluation.functions(answers)
    for key, name in (("reward", "score"), ("judge", "judge_score")):
        if key in job.inputs:
            scorer = evaluation.scorer(job.inputs[key])
            for answers in answered.values():
                scores = answer_scores(scorer, answers.examples, evaluation.max_tokens)
                answers.figures[name] = answers.figures.get(name, 0) + scores

    per_answer = {name: answers.figures for name, answers in answered.items()}
    figures = compare(per_answer, settings.bootstrap, settings.seed)
    write_json(job.result / "metrics.json", figures)
    with open(job.result / "answers.jsonl", "w") as file:
        for name, answers in answered.items():
            for line in answers.told():
                file.write(json.dumps({"model": name, **line}) + "\n")


class Evaluation:
    """What all models are asked, and how."""

    def __init__(self, job):
        self.settings = job.settings
        self.device = choose_device(job.placement)
        self.max_tokens = job.placement["micro_batch_tokens"]
        self.folder = job.inputs["rlhf"]
        self.tokenizer = load_tokenizer(self.folder)
        held_out = Ragged(job.inputs["tokens"], "eval.prompt")
        rows = range(min(len(held_out), self.settings.prompts))
        self.prompts = [list(map(int, held_out[row])) for row in rows]
        self.questions = self.tokenizer.batch_decode(self.prompts, skip_special_tokens=True)
        self.score = RewardFunctions(self.settings.reward_functions)
        self.is_right = EXACT_CHECKS.get(self.settings.exact_check)

    def policy(self, folder):
        """A model to be asked."""
        return Policy(load_causal(folder, self.settings.dtype, self.tokenizer)).to(self.device)

    def scorer(self, folder):
        """A reward model. Raises InputError for one that would read other tokens."""
        check_tokenizers(self.tokenizer, load_tokenizer(folder), (self.folder, folder))
        return Scorer(load_scorer(folder, "fp32", self.tokenizer)).to(self.device)

    def answers_of(self, policy, sft):
        """The answers of a model, with the figures that need it or the SFT model."""
        settings = self.settings
        torch.manual_seed(settings.seed)
        answers = Answers(self, self.sampled(policy, settings.temperature, settings.samples))
        sums = [
            answer_logprobs(by, answers.examples, self.max_tokens, settings.temperature)
            for by in (policy, sft)
        ]
        answers.figures["kl_to_sft"] = sums[0] - sums[1]
        if self.is_right:
            greedy = Answers(self, self.sampled(policy, 0, 1))
            answers.figures["greedy_success"] = greedy.figures["success"]
        return answers

    def sampled(self, policy, temperature, samples):
        """Answers [S][n] (ids) of a model; at temperature 0 the likeliest token of each place."""
        return sample_responses(
            policy.model,
            self.prompts,
            self.tokenizer,
            self.settings.max_response_length,
            temperature,
            self.max_tokens,
            samples,
        )

    def functions(self, answers):
        """The reward functions' score of each answer [S, n]."""
        samples = len(answers.texts)
        texts = [text for sample in answers.texts for text in sample]
        return self.score(self.questions * samples, texts).reshape(samples, -1)


class Answers:
    """The answers of a model: texts [S][n], and figures [S, n] by name."""

    def __init__(self, evaluation, responses):
        tokenizer, is_right = evaluation.tokenizer, evaluation.is_right
        self.examples = Examples(evaluation.prompts, *responses)
        self.questions = evaluation.questions
        self.texts = [tokenizer.batch_decode(ids, skip_special_tokens=True) for ids in responses]
        ended = [[ids[-1] == tokenizer.eos_token_id for ids in sample] for sample in responses]
        self.figures = {"length": self.examples.answer_lengths, "ended_by_eos": np.array(ended)}
        if is_right:
            right = [list(map(is_right, self.questions, sample)) for sample in self.texts]
            self.figures["success"] = np.array(right) & self.figures["ended_by_eos"]

    def told(self):
        """Yield each answer with its scores, all of a prompt together."""
        names = [name for name in ("score", "judge_score") if name in self.figures]
        for row, question in enumerate(self.questions):
            for sample, texts in enumerate(self.texts):
                scores = {name: float(self.figures[name][sample, row]) for name in names}
                yield {"prompt": question, "answer": texts[row], **scores}


def compare(per_answer, resamplings, seed):
    """Means of each model, and its differences to the SFT model with their intervals.

    per_answer: {model: {figure: [S, n]}}, of greedy answers [1, n].
    """
    samples, prompts = per_answer["sft"]["length"].shape
    figures = {"prompts": prompts, "samples": samples}
    for name, values in per_answer.items():
        figures[name] = {key: float(np.mean(value)) for key, value in values.items()}
    for name in [name for name in per_answer if name != "sft"]:
        for key in COMPARED:
            if key in per_answer[name]:
                # Answers to one prompt are alike: the prompt is what is drawn anew.
                ours, theirs = (
                    per_answer[model][key].astype(float).mean(axis=0) for model in (name, "sft")
                )
                difference = ours - theirs
                interval = bootstrap_interval(difference, resamplings, seed)
                told = {"mean": float(difference.mean()), "interval_95": interval}
                figures[f"{'' if name == 'rlhf' else f'{name}_'}{key}_difference"] = told
                print(f"{name} {key}: {figures['sft'][key]:.3f} -> {figures[name][key]:.3f}")
    return figures


if __name__ == "__main__":
    run(main)
