"""Score generated responses by reward models, LLM judges and reward functions.

SPLIT.parquet has a row for each prompt: its turns, the texts of its responses, whether each of them
ended, and their scores.
"""

from collections import Counter
from contextlib import nullcontext

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from snakechat.algorithms.llm_judge import load_judges, record_usage
from snakechat.algorithms.reward_functions import load_functions
from snakechat.algorithms.rewards import RewardSum, load_rewards, weighted_judges
from snakechat.algorithms.rollouts import Rollouts
from snakechat.config.rlhf import GenerationSettings
from snakechat.data.chat_templates import stop_ids
from snakechat.data.dialogues import SPLITS
from snakechat.data.ragged_arrays import Ragged
from snakechat.data.records import SCORED, PromptTexts
from snakechat.data.tokenizers import load_tokenizer
from snakechat.training.placed_models import start_evaluation
from snakechat.workflow.errors import in_batches
from snakechat.workflow.job import Job, run
from snakechat.workflow.processes import rank

# Prompts whose responses are scored at a time.
BATCH_SIZE = 256


def main(job: Job[GenerationSettings]) -> None:
    """Score the responses of both splits."""
    settings, folder = job.settings, job.inputs["model"]
    device, tokenizer = start_evaluation(job.placement, settings.dtype), load_tokenizer(folder)
    judges = load_judges(job)
    rewards = list(load_rewards(job, "reward", "model", settings.dtype, "train"))
    functions = load_functions(settings.reward_functions)
    ends, generations = stop_ids(tokenizer, folder), settings.num_generations
    for split in SPLITS:
        prompts = Ragged(job.inputs["tokens"], f"{split}.prompt")
        responses = Ragged(job.inputs["responses"], f"{split}.responses")
        texts = PromptTexts(job.inputs["tokens"], split)
        scorer = RewardSum(rewards, functions, texts, weighted_judges(settings.reward, judges))
        all_scores: list[float] = []
        unreadable: Counter[str] = Counter()
        path, is_first = job.result / f"{split}.parquet", rank() == 0
        writer = pq.ParquetWriter(path, SCORED, compression="zstd") if is_first else nullcontext()
        with writer as file:
            for rows in in_batches(split, "prompts", len(prompts), BATCH_SIZE):
                sampled = [
                    [responses[row * generations + number].tolist() for row in rows]
                    for number in range(generations)
                ]
                rollouts = Rollouts(
                    *([prompts[row] for row in rows], sampled, tokenizer, ends),
                    temperature=settings.temperature,
                    device=device,
                )
                scores = scorer.score(rollouts, rows.start // BATCH_SIZE, rows)
                sums = scores.sum.tolist()
                all_scores += sums
                unreadable.update(scores.unreadable)
                if file:
                    # They have all first responses first.
                    columns = rollouts.response_texts(), rollouts.ended.tolist(), sums
                    cells = [
                        [each[row :: len(rows)] for row in range(len(rows))] for each in columns
                    ]
                    file.write_table(pa.table([texts.turns(rows), *cells], SCORED))
        if rank() == 0:
            print(f"{split}: {len(prompts):,} prompts, mean score {np.nanmean(all_scores):.3f}")
            if judges:
                print(f"{split}: unreadable replies: {dict(unreadable)}")
    record_usage(job, judges.values())


if __name__ == "__main__":
    run(main, GenerationSettings)
