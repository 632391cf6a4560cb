"""A rank of tests/programs/test_vllm.py, which samples with vLLM while its model changes.

    vllm_worker.py FOLDER RANKS_OF_AN_ENGINE LORA_RANK

FOLDER has the model, on which vLLM starts. Writes FOLDER/RANK.json: of each update the largest
difference between the log-probabilities of vLLM and of training, and the responses.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from snakechat.modeling.loading import add_lora  # noqa: E402
from snakechat.training.placed_models import init_process_group, make_sampler  # noqa: E402
from snakechat.workflow.processes import (  # noqa: E402
    Placement,
    all_reduce_sum,
    rank,
    world_size,
)

SETTINGS = SimpleNamespace(
    generation_backend="vllm",
    dtype="fp32",
    max_prompt_length=16,
    max_response_length=16,
    num_generations=2,
    temperature=0.7,
)
PROMPTS = [[0, 9, 8, 7], [0, 21], [0, 30, 31]] * 8
UPDATES = 3


@torch.no_grad()
def largest_difference(model, prompts, responses, logprobs):
    """Return the largest difference of log-probabilities from the model's own ones."""
    differences = []
    for ids_of_prompts, logprobs_of_prompts in zip(responses, logprobs, strict=True):
        for prompt, ids, values in zip(prompts, ids_of_prompts, logprobs_of_prompts, strict=True):
            logits = model(torch.tensor([prompt + ids], device=model.device)).logits[0].cpu()
            table = (logits[len(prompt) - 1 : -1] / SETTINGS.temperature).log_softmax(dim=-1)
            differences.append((table[range(len(ids)), ids] - torch.tensor(values)).abs().max())
    return max(differences).item()


def main():
    folder, num_ranks, lora_rank = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    gpus = torch.cuda.is_available()
    place = {"gpus_per_node": world_size()} if gpus else {"nodes": world_size()}
    placement = Placement(**{"gpus_per_node": 0, **place}, vllm_tensor_parallel_size=num_ranks)
    device = init_process_group(placement)
    model = AutoModelForCausalLM.from_pretrained(folder / "model").eval().to(device)
    if lora_rank:
        torch.manual_seed(1)
        model = add_lora(model, lora_rank, 2 * lora_rank)
    sampler = make_sampler(SETTINGS, [2], folder / "model", placement)
    rows = range(rank() // num_ranks, len(PROMPTS), world_size() // num_ranks)
    prompts = [PROMPTS[row] for row in rows]
    updates = []
    for update in range(UPDATES):
        # The same weights and random numbers in all ranks.
        torch.manual_seed(update)
        for weight in filter(lambda weight: weight.requires_grad, model.parameters()):
            weight.data += 0.05 * torch.randn_like(weight, device="cpu").to(device)
        sampler.update(model)
        responses, logprobs = sampler.sample(PROMPTS, rows)
        sampler.sleep()
        updates.append((largest_difference(model, prompts, responses, logprobs), responses))
    del sampler
    # The group of the job outlives the engine.
    assert all_reduce_sum(torch.ones(1)) == world_size()
    (folder / f"{rank()}.json").write_text(json.dumps(updates))


if __name__ == "__main__":
    main()
