"""Score generated responses by reward models, LLM judges and reward functions.

SPLIT.parquet has a row for each prompt: its text, the texts of its responses, whether each of them
ended, and their scores.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np

from snakechat.algorithms.llm_judge import load_judges, record_usage
from snakechat.algorithms.reward_functions import load_functions
from snakechat.algorithms.reward_models import load_reward
from snakechat.algorithms.reward_sum import RewardSum, weighted_judges
from snakechat.algorithms.rollouts import Rollouts
from snakechat.config.references import input_names, weighted_references
from snakechat.config.rlhf import GenerationSettings
from snakechat.data.dialogues import Turn
from snakechat.data.phase_splits import SPLITS
from snakechat.data.ragged_arrays import Ragged
from snakechat.data.records import PromptTexts, ScoredPrompt, open_scored_responses
from snakechat.data.special_tokens import stop_ids
from snakechat.data.tokenizers import load_tokenizer
from snakechat.training.evaluated_models import start_evaluation
from snakechat.workflow.distributed import rank
from snakechat.workflow.job import Job, run
from snakechat.workflow.progress_lines import FIRST_LINE, ProgressLines

# Prompts whose responses are scored at a time.
BATCH_SIZE = 256


def main(job: Job[GenerationSettings]) -> None:
    """Score the responses of both splits."""
    settings, folder = job.settings, job.inputs["model"]
    judges = load_judges(job)
    device, tokenizer = start_evaluation(job.placement, settings.dtype), load_tokenizer(folder)
    weights = weighted_references(settings.reward)
    rewards = [
        load_reward(job, key, name, weights[name], "model", settings.dtype, "train")
        for key, name in input_names("reward", settings.reward).items()
    ]
    functions = load_functions(settings.reward_functions)
    ends = stop_ids(tokenizer, folder)
    for split in SPLITS:
        prompts = Ragged(job.inputs["tokens"], f"{split}.prompt")
        responses = Ragged(job.inputs["responses"], f"{split}.responses")
        texts = PromptTexts(job.inputs["tokens"], split)
        scorer = RewardSum(rewards, functions, texts, weighted_judges(settings.reward, judges))
        all_scores = []
        unreadable: Counter[str] = Counter()
        with open_on_first_rank(job.result / f"{split}.parquet") as write:
            progress = ProgressLines(split, "prompts", len(prompts), next_line=FIRST_LINE)
            for start in range(0, len(prompts), BATCH_SIZE):
                rows = range(start, min(start + BATCH_SIZE, len(prompts)))
                rollouts = Rollouts(
                    [prompts[row] for row in rows],
                    [
                        [
                            responses[row * settings.num_generations + number].tolist()
                            for row in rows
                        ]
                        for number in range(settings.num_generations)
                    ],
                    tokenizer,
                    ends,
                    settings.temperature,
                    device,
                )
                scores = scorer.score(rollouts, start // BATCH_SIZE, rows)
                write(scored_prompts(texts.turns(rows), rollouts, scores.sum.tolist()))
                all_scores += scores.sum.tolist()
                unreadable.update(scores.unreadable)
                if rank() == 0:
                    progress.update(start + len(rows))
        if rank() == 0:
            print(f"{split}: {len(prompts):,} prompts, mean score {np.nanmean(all_scores):.3f}")
            if judges:
                print(f"{split}: unreadable replies: {dict(unreadable)}")
    record_usage(job, judges.values())


def open_on_first_rank(
    path: Path,
) -> AbstractContextManager[Callable[[Sequence[ScoredPrompt]], None]]:
    """Open a file for writing, as open_scored_responses does; other ranks write nothing."""
    return open_scored_responses(path) if rank() == 0 else nullcontext(lambda _: None)


def scored_prompts(
    prompts: list[list[Turn]], rollouts: Rollouts, scores: list[float]
) -> list[ScoredPrompt]:
    """Return prompts [n] with their responses; rollouts and scores have all first ones first."""
    columns = rollouts.response_texts(), rollouts.ended.tolist(), scores
    return [
        ScoredPrompt(prompt, *(list(column[row :: len(prompts)]) for column in columns))
        for row, prompt in enumerate(prompts)
    ]


if __name__ == "__main__":
    run(main, GenerationSettings)
