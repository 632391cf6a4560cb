"""Sample responses of a model to the prompts of datasets.

SPLIT.responses is a ragged array with the responses of each prompt, one prompt after the other, in
the order of the tokens. An interrupted run continues after its last complete batch of prompts.
"""

import json

import numpy as np
import torch

from snakechat.algorithms.rollouts import sample_on_all_ranks
from snakechat.config.rlhf import GenerationSettings
from snakechat.data.chat_templates import stop_ids
from snakechat.data.dialogues import SPLITS
from snakechat.data.ragged_arrays import Ragged, open_ragged
from snakechat.data.tokenizers import load_tokenizer
from snakechat.modeling.batching import prompt_examples
from snakechat.modeling.forward import Policy
from snakechat.modeling.models import model_size
from snakechat.training.placed_models import init_process_group, load_frozen, make_sampler
from snakechat.workflow.errors import in_batches
from snakechat.workflow.job import Job, run
from snakechat.workflow.manifest import write_atomically
from snakechat.workflow.processes import barrier, rank

# Prompts that are sampled, and saved, at a time.
BATCH_SIZE = 256


def main(job: Job[GenerationSettings]) -> None:
    """Sample the responses to the prompts of both splits."""
    settings, folder = job.settings, job.inputs["model"]
    init_process_group(job.placement)
    tokenizer = load_tokenizer(folder)
    prompts = {split: Ragged(job.inputs["tokens"], f"{split}.prompt") for split in SPLITS}
    generations = settings.num_generations
    with load_frozen(
        Policy,
        folder,
        settings.dtype,
        tokenizer,
        job.placement,
        prompt_examples(prompts["train"], settings.max_response_length, generations),
        samples=settings.generation_backend == "hf",
        longest=settings.max_prompt_length + settings.max_response_length,
    ) as policy:
        model = policy.module.model
        job.record["models"] = {"model": model_size(model)}
        sampler = make_sampler(settings, stop_ids(tokenizer, folder), folder, job.placement)
        sampler.update(model, policy.gathered)
        for number, split in enumerate(SPLITS):
            batches, total = [], len(prompts[split])
            for rows in in_batches(split, "prompts", total, BATCH_SIZE):
                batches.append(job.states / f"{split}-{rows.start:09}.json")
                if batches[-1].exists():
                    continue
                # Each batch has its own seed: a run that continues samples the same responses.
                seed = np.random.SeedSequence([settings.seed, number, rows.start])
                torch.manual_seed(int(seed.generate_state(1)[0]))
                texts = [prompts[split][row] for row in rows]
                responses, _ = sample_on_all_ranks(sampler, texts, policy.sampling)
                if rank() == 0:
                    by_prompt = [ids for row in zip(*responses, strict=True) for ids in row]
                    write_atomically(batches[-1], json.dumps(by_prompt))
                barrier()
            if rank() == 0:
                with open_ragged(job.result, f"{split}.responses", len(tokenizer)) as write:
                    for batch in batches:
                        write(json.loads(batch.read_text()))
                print(f"{split}: {total:,} prompts, {generations} responses each")


if __name__ == "__main__":
    run(main, GenerationSettings)
