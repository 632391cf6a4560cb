"""Sampled responses by vLLM, which runs inside each process that trains and on its GPU.

vLLM is not among the requirements; its documented interface is used: LLM and SamplingParams.
"""

import os

import torch

from snakechat.modeling.lora import merged_weights
from snakechat.modeling.models import DTYPES
from snakechat.workflow.errors import InputError

# Of a GPU's memory, for vLLM's weights, keys and values: training has the rest.
MEMORY_SHARE = 0.3


class VllmSampler:
    """Samples from a copy of the model that is trained, which vLLM has."""

    def __init__(self, settings, tokenizer, folder):
        """folder: of a model of the same shapes. Raises InputError where vLLM is not installed."""
        # Read when vllm is imported. The engine then runs in this process: weights are handed over
        # as they are, and requests are scheduled in the same order each time.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        try:
            import vllm
        except ImportError as error:
            raise InputError(
                f"generation_backend: vllm, but vllm cannot be imported ({error}): pip install vllm, or set"
                " generation_backend: hf"
            ) from None
        self.vllm, self.llm = vllm, None
        self.settings, self.folder = settings, folder
        self.eos_id = tokenizer.eos_token_id

    def update(self, model):
        """Take on the weights of a model as they are now, adapters merged; all of them are here.

        The first time vLLM starts, in all processes at once.
        """
        if self.llm is None:
            self.llm = self._start()
        weights = merged_weights(model)
        self.llm.apply_model(lambda copy: copy.load_weights(weights.items()) and None)
        # It holds keys and values of prompts, made with the weights before.
        self.llm.reset_prefix_cache()

    def _start(self):
        settings = self.settings
        # vLLM seeds torch's generator anew.
        state = torch.get_rng_state()
        try:
            return self.vllm.LLM(
                model=str(self.folder),
                dtype=str(DTYPES[settings.dtype]).removeprefix("torch."),
                max_model_len=settings.max_prompt_length + settings.max_response_length,
                gpu_memory_utilization=MEMORY_SHARE,
                # One engine in each process of the group that is there, on its own GPU.
                tensor_parallel_size=1,
                distributed_executor_backend="external_launcher",
                # Ids go in and come out; what the folder says of sampling does not count.
                skip_tokenizer_init=True,
                generation_config="vllm",
                # Of what tokens are drawn from: after temperature.
                logprobs_mode="processed_logprobs",
            )
        except ValueError as error:
            raise InputError(
                f"{self.folder}: vllm: {str(error).splitlines()[0]}: set generation_backend: hf"
            ) from None
        finally:
            torch.set_rng_state(state)

    def sample(self, prompts):
        """Responses (ids, eos included where it came) to prompts (ids), found[s][row]; and, nested
        the same way, the log-probability of each token under what it was drawn from.

        A prompt's seed comes from torch's generator: other draws in each step, and in a run that is
        resumed those that it would have made. The tokens are the same as far as vLLM's sums are,
        which it says of the same hardware and version, and not of other batches.
        """
        seeds = torch.randint(1 << 62, (len(prompts),)).tolist()
        asked = [{"prompt_token_ids": list(map(int, prompt))} for prompt in prompts]
        # One object each: with one seed, all prompts would be responded by the same chances.
        ways = [self._way(seed) for seed in seeds]
        outputs = self.llm.generate(asked, ways, use_tqdm=False)
        samples = list(zip(*(output.outputs for output in outputs), strict=True))
        found = [[list(response.token_ids) for response in responses] for responses in samples]
        logprobs = [[told(response) for response in responses] for responses in samples]
        return found, logprobs

    def _way(self, seed):
        settings = self.settings
        return self.vllm.SamplingParams(
            n=settings.num_generations,
            temperature=settings.temperature,
            # Neither of them cuts anything off.
            top_p=1.0,
            top_k=-1,
            max_tokens=settings.max_response_length,
            # A token that stops stays in the ids, as a text that stops would not.
            stop_token_ids=[self.eos_id],
            # Of the token that was drawn, and of none beside it.
            logprobs=0,
            detokenize=False,
            seed=seed,
        )

    def close(self):
        """Let go of vLLM's copy."""
        self.llm = None


def told(response):
    """The log-probability of each token of one of vLLM's responses."""
    return [
        table[token].logprob
        for token, table in zip(response.token_ids, response.logprobs, strict=True)
    ]
