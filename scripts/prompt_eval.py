"""Generate responses of all models of a recipe to the same prompts.

Each model responds to each prompt twice: with greedy decoding and with sampling.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from snakechat.data.encoder import Encoder
from snakechat.data.prompt_sets import read_prompts
from snakechat.data.tokenizers import load_tokenizer
from snakechat.evaluation.comparisons import evaluated_models
from snakechat.evaluation.held_out_rows import Response, respond
from snakechat.modeling.batching import prompt_examples
from snakechat.modeling.forward import Policy
from snakechat.training.metric_logs import write_json_lines
from snakechat.training.placed_models import load_frozen, start_evaluation
from snakechat.workflow.errors import InputError
from snakechat.workflow.job import Job, run
from snakechat.workflow.processes import rank


def main(job: Job[Any]) -> None:
    """Generate the responses of one model after the other, then write responses.jsonl."""
    start_evaluation(job.placement, job.settings.dtype)
    prompts = read_prompts(job.settings.prompt_sets, Path(job.options.source))
    responses = {}
    for name, folder in evaluated_models(job.inputs).items():
        responses[name] = generate(job, folder, prompts)
        if rank() == 0:
            print(f"{name} responded to {len(prompts)} prompts")
    if rank() > 0:
        return
    lines = [
        {
            "set": name,
            "prompt": prompt,
            "model": model,
            "decoder": decoder,
            **of_model[decoder][row],
        }
        for row, (name, prompt) in enumerate(prompts)
        for model, of_model in responses.items()
        for decoder in of_model
    ]
    write_json_lines(job.result / "responses.jsonl", lines)


def generate(
    job: Job[Any], folder: Path, prompts: Sequence[tuple[str, str]]
) -> dict[str, list[Response]]:
    """Generate responses of a model to (set, prompt) pairs, by decoder.

    Raises:
        InputError: A prompt contains a special token, or leaves no positions for a response.
    """
    settings = job.settings
    tokenizer = load_tokenizer(folder)
    encoder = Encoder(tokenizer, settings.template)
    for _, prompt in prompts:
        if encoder.has_special_token(prompt):
            raise InputError(f"prompt {prompt[:60]!r} contains a special token: remove it")
    ids = encoder.prompts([[("user", prompt)] for _, prompt in prompts])
    examples = prompt_examples(ids, settings.max_response_length, 1)
    generated = {}
    with load_frozen(
        Policy, folder, settings.dtype, tokenizer, job.placement, examples, samples=True
    ) as policy:
        for decoder, temperature in (("greedy", 0), ("sampled", settings.temperature)):
            torch.manual_seed(settings.seed)
            generated[decoder] = respond(
                policy, tokenizer, folder, ids, settings.max_response_length, temperature
            )
    return generated


if __name__ == "__main__":
    run(main)
