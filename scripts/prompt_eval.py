"""Generate responses of all models of a recipe to the same prompts.

Each model responds to each prompt twice: with greedy decoding and with sampling.
"""

from pathlib import Path
from typing import Any

import torch

from snakechat.data.encoder import Encoder
from snakechat.data.tokenizers import load_tokenizer
from snakechat.data.yaml_files import read_prompts
from snakechat.evaluation.comparisons import evaluated_models
from snakechat.evaluation.held_out_rows import Response, respond
from snakechat.modeling.batching import prompt_examples
from snakechat.modeling.forward import Policy
from snakechat.training.placed_models import load_frozen
from snakechat.workflow.job import Job, run, write_json_lines
from snakechat.workflow.processes import rank


def main(job: Job[Any]) -> None:
    """Generate the responses of one model after the other, then write responses.jsonl."""
    settings = job.settings
    entries = list(read_prompts(settings.prompt_sets, Path(job.options.source, "prompts")))
    prompts = [entry["prompt"] for _, entry in entries]
    # Of each prompt, by model and decoder.
    responses: dict[tuple[str, str], list[Response]] = {}
    for name, folder in evaluated_models(job.inputs).items():
        tokenizer = load_tokenizer(folder)
        encoder = Encoder(tokenizer, settings.template)
        encoder.require_text("prompt", prompts)
        ids = encoder.prompts([[("user", prompt)] for prompt in prompts])
        examples = prompt_examples(ids, settings.max_response_length, 1)
        arguments = folder, settings.dtype, tokenizer, job.placement, examples
        with load_frozen(Policy, *arguments, samples=True) as policy:
            for decoder, temperature in (("greedy", 0), ("sampled", settings.temperature)):
                torch.manual_seed(settings.seed)
                options = settings.max_response_length, temperature
                responses[name, decoder] = respond(policy, tokenizer, folder, ids, *options)
        if rank() == 0:
            print(f"{name} responded to {len(prompts)} prompts")
    if rank() == 0:
        lines = [
            {"set": name, **entry, "model": model, "decoder": decoder, **of_model[row]}
            for row, (name, entry) in enumerate(entries)
            for (model, decoder), of_model in responses.items()
        ]
        write_json_lines(job.result / "responses.jsonl", lines)


if __name__ == "__main__":
    run(main)
