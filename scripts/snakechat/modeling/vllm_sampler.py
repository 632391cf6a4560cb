"""Generation by vLLM, which runs inside the training processes and shares their GPUs.

An engine has one or more adjacent processes, which divide its weights (tensor parallelism). Each of
them calls it with the same prompts and seeds, and gets the same responses. While the processes
train, the engine sleeps: its weights and its cache take no memory of a GPU.

vLLM is not among the requirements. Only its documented interface is used: LLM and SamplingParams.
"""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from snakechat.modeling.generation import Generations, GenerationSettings
from snakechat.modeling.lora import merged_layers
from snakechat.modeling.models import DTYPES
from snakechat.modeling.partitions import Gather, no_gather
from snakechat.workflow.errors import InputError

# Fraction of a GPU's memory for vLLM's weights, keys and values. Training uses the rest.
GPU_MEMORY_FRACTION = 0.3


class VllmSampler:
    """Samples from vLLM's copy of the trained model.

    Attributes:
        num_ranks: processes of an engine.
    """

    def __init__(
        self,
        settings: GenerationSettings,
        stop_ids: Sequence[int],
        folder: Path,
        num_ranks: int = 1,
    ) -> None:
        """Import vLLM.

        Args:
            stop_ids: token ids that end a response.
            folder: a model of the same architecture.
            num_ranks: processes of an engine, a divisor of those of the job.

        Raises:
            InputError: vLLM cannot be imported.
        """
        # Read when vllm is imported: the engine then runs in this process, so that weights are
        # passed without a copy and requests are scheduled in a fixed order.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        try:
            import vllm  # type: ignore[import-not-found]  # optional
        except ImportError as error:
            raise InputError(
                f"generation_backend: vllm, but vllm cannot be imported ({error}): install it"
                " (docs/en/gpu.md), or set generation_backend: hf"
            ) from None
        self.vllm = vllm
        self.llm: Any = None
        self.is_asleep = False
        self.settings, self.folder = settings, folder
        self.stop_ids, self.num_ranks = list(stop_ids), num_ranks

    def update(self, model: PreTrainedModel, gather: Gather = no_gather) -> None:
        """Copy the model's current weights, adapters merged, to vLLM, and wake it up.

        The first call starts vLLM, in all processes at once.
        """
        if self.llm is None:
            self.llm = self._start()
            if self.num_ranks > 1:
                self.device = model.device
                self.engine_group, _ = torch.distributed.new_subgroups(self.num_ranks)
        if self.is_asleep:
            # vLLM has an allocator of its own, which cannot use what torch's keeps.
            torch.cuda.empty_cache()
            self.llm.wake_up(tags=["weights"])
        for layer in merged_layers(model, gather):
            self.llm.apply_model(partial(_load_weights, layer))
        if self.is_asleep:
            self.llm.wake_up(tags=["kv_cache"])
            self.is_asleep = False
        # The prefix cache has keys and values that the previous weights computed.
        self.llm.reset_prefix_cache()

    def sleep(self) -> None:
        """Free the memory of vLLM's weights and cache; update wakes it up."""
        # Level 2 discards the weights: the next update has others.
        self.llm.sleep(level=2)
        self.is_asleep = True

    def _start(self) -> Any:
        settings = self.settings
        # vLLM seeds torch's generator.
        state = torch.get_rng_state()
        try:
            return self.vllm.LLM(
                model=str(self.folder),
                dtype=str(DTYPES[settings.dtype]).removeprefix("torch."),
                max_model_len=settings.max_prompt_length + settings.max_response_length,
                gpu_memory_utilization=GPU_MEMORY_FRACTION,
                # A worker in each process of the existing group, on the process's GPU. Adjacent
                # ones form an engine.
                tensor_parallel_size=self.num_ranks,
                distributed_executor_backend="external_launcher",
                # The same in all processes of an engine.
                seed=0,
                enable_sleep_mode=True,
                # Input and output are token ids; sampling settings of the folder do not apply.
                skip_tokenizer_init=True,
                generation_config="vllm",
                # Of the distribution that is sampled from: after temperature.
                logprobs_mode="processed_logprobs",
            )
        except ValueError as error:
            raise InputError(
                f"{self.folder}: vllm: {str(error).splitlines()[0]}: set generation_backend: hf"
            ) from None
        finally:
            torch.set_rng_state(state)

    def sample(self, prompts: Sequence[Sequence[int]]) -> Generations:
        """Sample responses; see generation.Sampler.sample.

        All processes of an engine call this function with the same prompts. Each prompt's seed
        comes from torch's generator, so steps differ and a resumed run draws the same seeds. The
        same seeds give the same tokens as far as vLLM's arithmetic is reproducible: on the same
        hardware and version, and not across batches.
        """
        seeds = torch.randint(1 << 62, (len(prompts),))
        if self.num_ranks > 1:
            # Those of the first process of the engine.
            seeds = seeds.to(self.device)
            torch.distributed.broadcast(seeds, group=self.engine_group, group_src=0)
        requests = [{"prompt_token_ids": list(map(int, prompt))} for prompt in prompts]
        # One object per prompt: a single seed would give all prompts the same random numbers.
        params = [self._sampling_params(seed) for seed in seeds.tolist()]
        outputs = self.llm.generate(requests, params, use_tqdm=False)
        generations = list(zip(*(output.outputs for output in outputs), strict=True))
        ids = [[list(response.token_ids) for response in responses] for responses in generations]
        logprobs = [
            [_token_logprobs(response) for response in responses] for responses in generations
        ]
        return ids, logprobs

    def _sampling_params(self, seed: int) -> Any:
        settings = self.settings
        return self.vllm.SamplingParams(
            n=settings.num_generations,
            temperature=settings.temperature,
            # Both off: sampling from the full distribution.
            top_p=1.0,
            top_k=-1,
            max_tokens=settings.max_response_length,
            # A stop token stays in the ids; a stop string would be removed.
            stop_token_ids=self.stop_ids,
            # Only of the sampled token.
            logprobs=0,
            detokenize=False,
            seed=seed,
        )

    def close(self) -> None:
        """Free vLLM's copy of the model."""
        self.llm, self.is_asleep = None, False


def _load_weights(weights: list[tuple[str, torch.Tensor]], copy: Any) -> None:
    """Load some weights into vLLM's copy of the model."""
    copy.load_weights(weights)


def _token_logprobs(response: Any) -> list[float]:
    """Return the log-probability of each token of a response by vLLM."""
    return [
        table[token].logprob
        for token, table in zip(response.token_ids, response.logprobs, strict=True)
    ]
