"""A planned job, described by what its program reads: models, tokens, micro-batches."""

import json
import math
from collections.abc import Mapping
from typing import Any

from snakechat.config.references import input_names
from snakechat.jobs.plan import Plan
from snakechat.modeling.key_value_cache import MEMORY_FRACTION, default_generate_tokens
from snakechat.planning.activation_memory import BatchShape, ModelSpec, load_config
from snakechat.planning.memory import (
    BYTES_PER_ELEMENT,
    cache_bytes,
    num_processes,
    vllm_memory,
    weight_bytes,
)
from snakechat.planning.model_configs import model_config
from snakechat.planning.token_counts import TokenCounts, token_counts
from snakechat.planning.workload import Generation
from snakechat.training.zero_stages import is_partitioned, samples_whole
from snakechat.workflow.placement import Placement

# Assumed limit of the responses that vLLM samples at a time: max_num_seqs is 256 on most GPUs.
VLLM_MAX_SEQUENCES = 256


class JobSizes:
    """A job, with the models and tokens that its program reads.

    gpu_memory: Bytes of a GPU; 0 on CPUs.
    """

    def __init__(
        self,
        spec: Mapping[str, Any],
        placement: Placement,
        plan: Plan,
        gpu_memory: float = 0,
    ) -> None:
        self.rule, self.settings, self.inputs = spec["rule"], spec["settings"], spec["inputs"]
        self.spec, self.placement, self.plan = spec, placement, plan
        self.gpu_memory = gpu_memory

    def model(
        self, key: str, loss: str, dtype: str | None = None, lora: str | None = None
    ) -> ModelSpec:
        """Return the model of an input.

        Args:
            key: Name of the input.
            loss: What the forward pass computes (SFT, POLICY or SCORE).
            dtype: Defaults to that of the recipe.
            lora: Prefix of the settings of its adapters; None for a model that is not trained.
        """
        settings = self.settings
        return ModelSpec(
            model_config(self.inputs[key]["path"], self.plan),
            loss,
            dtype or settings["dtype"],
            settings.get(f"{lora}_rank", 0) if lora else 0,
            settings.get("train_base", "none") if lora == "lora" else "none",
            bool(lora) and self.placement.activation_checkpointing,
        )

    def scorers(self, *keys: str) -> list[str]:
        """Return the inputs with models of `reward` or `judge` (keys), in their given order."""
        return [name for key in keys for name in input_names(key, self.settings[key])]

    def critic_origin(self) -> str:
        """Return the input that a critic starts from: a reward model with the actor's tokenizer.

        Until the models exist, equal vocabulary sizes stand for equal tokenizers.
        """
        sizes = {
            name: json.loads(model_config(self.inputs[name]["path"], self.plan)).get("vocab_size")
            for name in ("actor", *self.scorers("reward"))
        }
        same = [name for name in sizes if sizes[name] == sizes["actor"]]
        # The actor itself comes first.
        return same[min(1, len(same) - 1)]

    def tokens(self, split: str = "train") -> TokenCounts:
        """Return the counts of a split of the job's tokens."""
        return token_counts(self.inputs["tokens"]["path"], split, self.plan)

    def rows_trained(self, tokens: TokenCounts) -> float:
        """Return the rows of all steps, at most; nan if the number of rows is unknown."""
        rows, settings = tokens.num_rows * self.settings["epochs"], self.settings
        if settings["max_steps"] is None:
            return rows
        batch_size = settings.get("rollout_batch_size", settings["global_batch_size"])
        return min(rows, settings["max_steps"] * batch_size)

    def micro_batch(
        self, length: int, num_targets: int, max_tokens: int | None = None
    ) -> BatchShape:
        """Return the largest micro-batch of sequences of a length, each with so many targets.

        max_tokens: Limit of its tokens; defaults to micro_batch_tokens.
        """
        sequences = max(1, (max_tokens or self.placement.micro_batch_tokens) // length)
        on_gpu = self.placement.gpus_per_node > 0
        dense_mask = not on_gpu or self.has_dense_mask()
        return BatchShape(sequences, length, num_targets, on_gpu, dense_mask)

    def has_dense_mask(self) -> bool:
        """Return whether packed sequences have a dense mask on a GPU (modeling/attention.py)."""
        one_response = self.rule == "train_sft" or self.settings.get("num_generations") == 1
        uses_varlen = one_response and self.settings.get("dtype") != "fp32"
        return self.placement.attn_implementation == "sdpa" or not uses_varlen

    def generation(
        self,
        model: ModelSpec,
        prompts: TokenCounts,
        num_responses: float,
        at_a_time: float | None = None,
    ) -> Generation:
        """Return the responses that a model samples to prompts.

        Args:
            num_responses: In all processes; nan if it is unknown.
            at_a_time: Those that are sampled at a time; defaults to all.
        """
        response_length = self.settings["max_response_length"]
        limit = self.placement.generate_tokens or default_generate_tokens(
            load_config(model),
            BYTES_PER_ELEMENT[model.dtype],
            self.placement.micro_batch_tokens,
            MEMORY_FRACTION * self.gpu_memory,
        )
        shape = self.micro_batch(prompts.longest + response_length, response_length, limit)
        vllm_ranks = 0
        if self.settings.get("generation_backend") == "vllm":
            vllm_ranks = self.placement.vllm_tensor_parallel_size
            # As many as have space in vLLM's cache; another one starts when one ends.
            space = vllm_memory(model, self.gpu_memory, vllm_ranks)["cache"] * vllm_ranks
            num_cached = int(space // cache_bytes(model, shape._replace(sequences=1)))
            shape = shape._replace(sequences=max(min(num_cached, VLLM_MAX_SEQUENCES), 1))
        num_engines = num_processes(self.placement) / max(vllm_ranks, 1)
        own = (num_responses if at_a_time is None else at_a_time) / num_engines
        if own < shape.sequences:
            shape = shape._replace(sequences=max(math.ceil(own), 1))
        gathers_layers = is_partitioned(self.placement, model.dtype) and not samples_whole(
            weight_bytes(model), self.gpu_memory
        )
        is_captured = self.placement.cuda_graphs is not False and not gathers_layers
        return Generation(model, num_responses, shape, vllm_ranks, vllm_ranks > 0 or is_captured)


def with_responses(prompts: TokenCounts, settings: Mapping[str, Any]) -> TokenCounts:
    """Return the counts of prompts with all their responses, which have the maximum length."""
    responses = settings["num_generations"] * settings["max_response_length"]
    return prompts._replace(responses=responses, longest=prompts.longest + responses)
