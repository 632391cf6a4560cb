"""Generation by vLLM, which runs inside the training processes and shares their GPUs.

An engine has one or more adjacent processes, which divide its weights (tensor parallelism). Each of
them calls it with the same prompts and seeds, and gets the same responses. While the processes
train, the engine sleeps: its weights and its cache take no memory of a GPU. On a CPU, which is for
tests, it stays awake.

vLLM is not among the requirements. Only its documented interface is used, LLM and SamplingParams,
and the engine's shutdown. vLLM's interface for RL, update_weights, transfers weights between
processes over NCCL or CUDA IPC. Here, both models are in one process, and reload_weights reads the
trained one.
"""

import atexit
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from snakechat.modeling.generation import Generations, Sampler
from snakechat.modeling.models import DTYPES, Gather, no_gather
from snakechat.modeling.saving import saved_weights
from snakechat.workflow import processes
from snakechat.workflow.errors import InputError, is_out_of_memory

# Fraction of a GPU's memory for vLLM's weights, keys and values. Training uses the rest.
GPU_MEMORY_FRACTION = 0.3
# Options of vLLM on a CPU alone.
CPU_OPTIONS = {
    # A fraction of the memory would depend on other programs, and with it how vLLM batches prompts.
    "kv_cache_memory_bytes": 1 << 30,
    # vLLM would compile the model each time it starts.
    "enforce_eager": True,
    # vLLM cannot sample with seeds from parts of prompts: a CPU's generator cannot be set back.
    "enable_chunked_prefill": False,
}


class VllmSampler(Sampler):
    """Samples from vLLM's copy of the trained model."""

    has_copy = True
    llm: Any

    def __init__(
        self, settings: Any, stop_ids: Sequence[int], folder: Path, num_ranks: int
    ) -> None:
        """Import vLLM; see placed_models.make_sampler for the arguments."""
        if processes.uses_deterministic_kernels() and torch.cuda.is_available():
            # Each response is computed as it would be alone. Read when vllm is imported.
            os.environ["VLLM_BATCH_INVARIANT"] = "1"
        # Read when vllm is imported: the engine then runs in this process, so that weights are
        # passed without a copy and requests are scheduled in a fixed order.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        # The threads of this process stay where they are.
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # Without two lines a step.
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        try:
            import vllm  # type: ignore[import-not-found]  # optional
        except ImportError as error:
            raise InputError(
                f"generation_backend: vllm, but vllm cannot be imported ({error}): install it"
                " (docs/en/gpu.md), or set generation_backend: hf"
            ) from None
        super().__init__(
            stop_ids, settings.max_response_length, settings.temperature, settings.num_generations
        )
        self.vllm, self.llm, self.is_asleep = vllm, None, False
        self.settings, self.folder, self.num_ranks = settings, folder, num_ranks

    def update(self, model: PreTrainedModel, gather: Gather = no_gather) -> None:
        """Copy the model's current weights, adapters merged, to vLLM, and wake it up.

        The first call starts vLLM, in all processes at once.
        """
        super().update(model)
        if self.llm is None:
            self.llm = self._start(model.device.type == "cuda")
        if self.is_asleep:
            # vLLM has an allocator of its own, which cannot use what torch's keeps.
            torch.cuda.empty_cache()
            self.llm.wake_up(tags=["weights"])
        # As from a checkpoint: vLLM converts weights to the layout of its kernels.
        weights = merged_weights(model, gather)
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        if self.is_asleep:
            self.llm.wake_up(tags=["kv_cache"])
            self.is_asleep = False
        # The prefix cache has keys and values that the previous weights computed.
        self.llm.reset_prefix_cache()

    def sleep(self) -> None:
        """Free the memory of vLLM's weights and cache on a GPU; update wakes it up."""
        if self.on_gpu:
            # Level 2 discards the weights: the next update has others.
            self.llm.sleep(level=2)
            self.is_asleep = True
            self.asleep_bytes = _bytes_of_others() - self.bytes_before

    def _start(self, on_gpu: bool) -> Any:
        settings, self.on_gpu = self.settings, on_gpu
        self.bytes_before = _bytes_of_others() if on_gpu else 0
        # vLLM seeds torch's generator.
        state = torch.get_rng_state()
        try:
            llm = self.vllm.LLM(
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
                enable_sleep_mode=on_gpu,
                # Input and output are token ids; sampling settings of the folder do not apply.
                skip_tokenizer_init=True,
                generation_config="vllm",
                # Of the distribution that is sampled from: after temperature.
                logprobs_mode="processed_logprobs",
                **({} if on_gpu else CPU_OPTIONS),
            )
        except ValueError as error:
            if is_out_of_memory(error):
                raise
            raise InputError(
                f"{self.folder}: vllm: {str(error).splitlines()[0]}: set generation_backend: hf"
            ) from None
        finally:
            torch.set_rng_state(state)
        # An engine that is deleted ends the job's process group. This one stays until the process
        # ends, and then ends before torch.distributed, which has groups of it.
        atexit.register(llm.llm_engine.engine_core.shutdown)
        return llm

    def sample(self, prompts: Sequence[Sequence[int]], own_rows: Sequence[int]) -> Generations:
        """Sample responses; see generation.Sampler.sample.

        All processes of an engine call this function with the same rows. Each prompt's seed comes
        from torch's generator, so steps differ and a resumed run draws the same seeds. The same
        seeds give the same tokens as far as vLLM's arithmetic is reproducible: with the same
        version on the same CPU, or on the same kind of GPU with deterministic kernels.
        """
        seeds = torch.randint(1 << 62, (len(prompts),))[list(own_rows)]
        requests = [{"prompt_token_ids": list(map(int, prompts[row]))} for row in own_rows]
        params = [
            # One object per prompt: a single seed would give all prompts the same random numbers.
            self.vllm.SamplingParams(
                n=self.num_generations,
                temperature=self.temperature,
                # Both off: sampling from the full distribution.
                top_p=1.0,
                top_k=-1,
                max_tokens=self.max_response_length,
                # A stop token stays in the ids; a stop string would be removed.
                stop_token_ids=self.stop_ids,
                # Only of the sampled token.
                logprobs=0,
                detokenize=False,
                seed=seed,
            )
            for seed in seeds.tolist()
        ]
        outputs = self.llm.generate(requests, params, use_tqdm=False)
        generations = list(zip(*(output.outputs for output in outputs), strict=True))
        return (
            [[list(response.token_ids) for response in row] for row in generations],
            [[sampled_logprobs(response) for response in row] for row in generations],
        )


def sampled_logprobs(response: Any) -> list[float]:
    """Return the log-probability of each token of a response of vLLM."""
    pairs = zip(response.token_ids, response.logprobs, strict=True)
    return [table[token].logprob for token, table in pairs]


def merged_weights(
    model: PreTrainedModel, gather: Gather = no_gather
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and weights of an equivalent model without adapters, in the model's dtype.

    A tied weight has all of its names: vLLM does not load the layers of a name that is missing.
    Each weight is valid until the next one. The model does not change.
    """
    weights = saved_weights(model)
    weights |= {
        name: weights[source]
        for name, source in model.all_tied_weights_keys.items()
        if name not in weights
    }
    for name, saved in weights.items():
        with gather(saved.sources):
            yield name, saved.value()


def _bytes_of_others() -> int:
    """Return the bytes of the GPU's memory that torch's allocator does not hold."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()
