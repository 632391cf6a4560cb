"""Comparison of a model's passes here with transformers' own forward pass, before a job uses it.

Training and sampling run a model in other ways than its own `forward`: hidden states times the
output matrix, packed rows, cached tokens of prompts that are padded on the left. Whether a model
computes the same in each of them depends on its code, so it is measured on two rows of the job.

Shapes: K compared tokens of a sequence (NUM_COMPARED, or fewer in a shorter one), V entries of the
vocabulary.
"""

import contextlib
import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import torch
from transformers import PreTrainedModel

from snakechat.modeling.batching import Examples, Ids
from snakechat.modeling.decoding import make_cache, next_logits, pad_left
from snakechat.modeling.forward import Policy, Scorer
from snakechat.modeling.models import (
    accelerated,
    acceleration,
    describe,
    max_positions,
    whole_shape,
)
from snakechat.workflow.errors import InputError, is_out_of_memory, warn
from snakechat.workflow.processes import all_reduce_max, missing_kernel

# Tokens of the shorter one of two rows on which passes are compared.
NUM_SHORT = 24
# Compared tokens of a sequence: its last ones, which depend on all others.
NUM_COMPARED = 16
# Tokens of the longer row. More would take seconds of a CPU, and only a sliding window tells them
# apart: a model with one is compared on a row that exceeds the window, if the job has one.
NUM_TOKENS = 128
# Tokens that follow one by one in cached passes, the last of NUM_SHORT.
NUM_STEPS = 3
# Outputs are multiplied so that the largest one is at least this large. The logits of a new model
# are near 0, where a function that limits them, such as 30 * tanh(logit / 30), changes nothing.
LARGEST_OUTPUT = 50.0
# Allowed difference of outputs of that size. Rounding causes at most a twentieth of it in models of
# 2 to 30 layers, and packing rows in a model that does not support it at least 0.03 in fp32.
TOLERANCE = {torch.float32: 5e-3, torch.float16: 1.0, torch.bfloat16: 5.0}
# Models of at most this many weights are compared in fp32. In 16 bits, rounding hides the effect of
# attention in a model with random weights, which are small models in practice.
MAX_FP32_WEIGHTS = 1 << 29


def check_model(
    module: Policy | Scorer,
    examples: Examples,
    sampling: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    samples: bool = False,
) -> None:
    """Compare the passes of a model with transformers' own; if only packing differs, disable it.

    All processes call this function. It does not change the state of random number generators.

    Args:
        module: the model, which is in evaluation mode within `sampling`.
        examples: rows of the job. The longest one and a short one are compared.
        sampling: returns a context in which the processes may call the model (training/engine.py).
        samples: whether the job samples responses by snakechat.modeling.generation.

    Raises:
        InputError: a pass fails, or differs by more than rounding.
    """
    device = next(module.parameters()).device
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad(), sampling():
        rows = probe_rows(module.model, examples)
        with comparable_weights(module):
            _ModelCheck(module, rows, device).compare_all(samples)
        # In fp32, a kernel of 16 bits has not run yet.
        if module.supports_packing and acceleration().attn_implementation == "auto":
            check = _ModelCheck(module, rows, device)
            check.compare(
                "the attention kernel of the GPU",
                lambda: check.difference(rows),
                "set attn_implementation: sdpa in the placement",
            )


def probe_rows(model: PreTrainedModel, examples: Examples) -> Examples:
    """Return the longest row and, of the others, the one with about NUM_SHORT tokens.

    Longer ones than the model, its window or NUM_TOKENS need are truncated: the start of a prompt,
    and the ends of its responses, which keep half of the room.
    """
    window = getattr(model.config, "sliding_window", None) or 0
    limit = max(NUM_TOKENS, window + NUM_COMPARED + 1)
    limit = min(limit, max_positions(model) or limit)
    lengths = examples.prompt_lengths + examples.response_lengths.max(axis=0)
    longest = int(lengths.argmax())
    distances = np.abs(lengths - NUM_SHORT)
    distances[longest] = distances.max() + 1
    rows = examples.select([longest, int(distances.argmin())])
    rooms = np.maximum(limit // 2, limit - rows.response_lengths.max(axis=0))
    prompts = [rows.prompts[row][-room:] for row, room in enumerate(rooms)]
    responses = (
        [ids[row][: limit - len(prompt)] for row, prompt in enumerate(prompts)]
        for ids in rows.responses
    )
    return Examples(prompts, *responses)


@contextlib.contextmanager
def comparable_weights(module: Policy | Scorer) -> Iterator[None]:
    """Context in which the weights of a small model are in fp32, unless a kernel excludes it."""
    weights = list(module.parameters())
    is_whole = all(weight.shape == whole_shape(weight) for weight in weights)
    is_small = sum(weight.numel() for weight in weights) <= MAX_FP32_WEIGHTS
    if not is_whole or not is_small or acceleration().compile:
        # The weights stay as they are.
        weights = []
    values = [weight.data for weight in weights]
    for weight in weights:
        weight.data = weight.data.float()
    try:
        yield
    finally:
        for weight, value in zip(weights, values, strict=True):
            weight.data = value


class _ModelCheck:
    """The comparisons of a model, on a long row and a short one."""

    def __init__(self, module: Policy | Scorer, rows: Examples, device: torch.device) -> None:
        self.module, self.rows, self.short, self.device = module, rows, rows.select([1]), device
        self.model: Any = module.model
        self.name, self.scale = describe(self.model), 1.0
        self.tolerance = TOLERANCE[self.model.dtype]
        with self.describes_errors("transformers' forward pass"):
            # The largest absolute logit or score of the short row.
            largest = self.own_pass(sequences(self.short)[0]).abs().max().item()
        if 0 < largest < LARGEST_OUTPUT:
            self.scale = LARGEST_OUTPUT / largest

    def compare_all(self, samples: bool) -> None:
        """Compare all passes that a job has."""
        self.compare_unpacked()
        if self.module.supports_packing:
            self.compare_packed()
        if samples:
            self.compare(
                "sampling with a key-value cache",
                self.cached_difference,
                "responses cannot be sampled from it: use another model",
            )
        if any(weight.requires_grad for weight in self.module.parameters()):
            self.compare(
                "the forward pass in training mode",
                self.training_difference,
                "set the noise that config.json adds in training to 0, or use another model",
            )

    def compare_unpacked(self) -> None:
        """Compare sequences that are not packed. If the model is packed, a short one suffices."""
        rows = self.short if self.module.supports_packing else self.rows
        self.compare(
            "the forward pass of training",
            lambda: self.difference(rows, packing=False),
            "models that transform hidden states, or outputs, are not supported: use another model",
        )

    def compare_packed(self) -> None:
        """Compare packed rows. If they differ, the model runs without packing."""
        difference = math.inf
        # A model that takes no mask for each pair of tokens may raise any exception.
        with contextlib.suppress(InputError), self.describes_errors("packing"):
            difference = self.difference(self.rows)
            # Long responses to one prompt have an attention of their own on a CPU.
            with accelerated(dataclasses.replace(acceleration(), min_response=1)):
                difference = max(difference, self.difference(self.rows))
        if all_reduce_max(difference) > self.tolerance:
            warn(f"{self.name}: rows are padded, not packed, because packing changes its outputs")
            self.module.supports_packing = False
            self.compare_unpacked()

    def compare(self, action: str, difference: Callable[[], float], remedy: str) -> None:
        """Raise InputError if passes fail, or outputs differ by more than the tolerance.

        action: What an error calls the passes. difference: Runs the passes; returns the largest
        difference in this process.
        """
        with self.describes_errors(action):
            found = difference()
        found = all_reduce_max(found)
        if found > self.tolerance:
            raise InputError(
                f"{self.name}: {action} differs from transformers by {found / self.scale:.3g}, and"
                f" rounding explains {self.tolerance / self.scale:.3g}: {remedy}"
            )

    def difference(self, rows: Examples, packing: bool = True) -> float:
        """Return the largest difference of rows from transformers' passes of each sequence."""
        expected = [self.own_outputs(ids) for ids in sequences(rows)]
        return largest_difference(self.outputs(rows, packing), expected)

    def training_difference(self) -> float:
        expected = self.outputs(self.short)
        self.module.train()
        outputs = self.outputs(self.short)
        self.module.eval()
        return largest_difference(outputs, expected)

    def cached_difference(self) -> float:
        """Run passes with a cache, as decoders do.

        The last tokens follow one by one on prompts of different lengths, in two rows of each.
        """
        length = min(NUM_SHORT, max_positions(self.module.model) or NUM_SHORT)
        text = np.resize(sequences(self.rows)[0], length)
        texts: list[Any] = [text, text[length // 2 :]]
        expected = torch.stack([self.own_logprobs(text, NUM_STEPS + 1) for text in texts])
        input_ids, mask = pad_left([text[:-NUM_STEPS] for text in texts], 0, self.device)
        cache = make_cache(self.model.config, mask.shape[1] + NUM_STEPS)
        copies, cached = torch.tensor([0, 0, 1, 1], device=self.device), list[torch.Tensor]()
        for token in (*text[-NUM_STEPS:], None):
            positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
            with self.scaled_logits():
                logits = next_logits(self.model, cache, input_ids, mask, positions)
            if not cached:
                cache.reorder_cache(cast(torch.LongTensor, copies))
                mask, logits = mask[copies], logits[copies]
            cached.append(logits.float().log_softmax(dim=-1))
            if token is not None:
                input_ids = torch.full_like(mask[:, :1], int(token))
                mask = torch.cat([mask, torch.ones_like(input_ids)], dim=1)
        outputs = torch.stack(cached, dim=1).flatten(end_dim=1)
        return largest_difference([*outputs], [*expected[copies].flatten(end_dim=1)])

    def outputs(self, rows: Examples, packing: bool = False) -> list[torch.Tensor]:
        """Return the outputs [K] of each sequence as training computes them.

        They are log-probabilities of a policy's logits times `scale`, or scores times `scale`.
        """
        numbers = [*range(len(rows))]
        packed = [numbers] if packing else [[row] for row in numbers]
        batch = rows.collate(packed, packing, self.device, with_prompts=True)
        if isinstance(self.module, Policy):
            values = self.module(batch, temperature=1 / self.scale)
        else:
            values = self.scale * self.module(batch, batch.target_index)
        return [part[-NUM_COMPARED:] for part in values.split(batch.target_lengths.tolist())]

    def own_outputs(self, ids: Ids) -> torch.Tensor:
        """Return the outputs [K] of a sequence as transformers computes them.

        A classifier returns the score of the last token only.
        """
        if isinstance(self.module, Policy):
            num_compared = min(NUM_COMPARED, len(ids) - 1)
            logprobs = self.own_logprobs(ids, num_compared + 1)[:-1]
            return logprobs.gather(1, self.tensor(ids)[0, -num_compared:, None]).squeeze(1)
        [outputs] = self.outputs(Examples([ids[:-1]], [ids[-1:]]))
        score = self.own_pass(ids).flatten().float()
        outputs[-1:] = self.scale * (self.module.normalizer or torch.Tensor.float)(score)
        return outputs

    def own_logprobs(self, ids: Ids, num_last: int) -> torch.Tensor:
        """Return the log-probabilities [num_last, V] that follow the last tokens of a sequence."""
        with self.scaled_logits():
            # Without logits_to_keep, the logits of a long sequence take gigabytes.
            logits = self.own_pass(ids, logits_to_keep=num_last)[0, -num_last:]
        return logits.float().log_softmax(dim=-1)

    def own_pass(self, ids: Ids, **arguments: Any) -> torch.Tensor:
        """Return the outputs of transformers' forward pass of a sequence, without a cache."""
        arguments |= {"input_ids": self.tensor(ids), "use_cache": False}
        # OPT would sum a mask of floats, for which GPUs have no deterministic kernel.
        arguments["attention_mask"] = torch.ones_like(arguments["input_ids"])
        taken = inspect.signature(self.model.forward).parameters
        return self.model(**{name: arguments[name] for name in arguments if name in taken}).logits

    @contextlib.contextmanager
    def scaled_logits(self) -> Iterator[None]:
        """Context in which the model's output layer returns `scale` times its logits."""
        head = self.model.get_output_embeddings()
        hook = head.register_forward_hook(lambda module, inputs, logits: self.scale * logits)
        try:
            yield
        finally:
            hook.remove()

    @contextlib.contextmanager
    def describes_errors(self, action: str) -> Iterator[None]:
        """Context in which any exception but a lack of memory is an InputError.

        The code of a model raises exceptions of many classes where it does not support a pass.
        """
        try:
            yield
        except Exception as error:
            if isinstance(error, InputError) or is_out_of_memory(error) or missing_kernel(error):
                raise
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise InputError(f"{self.name}: {action} fails: {reason}: use another model") from error

    def tensor(self, ids: Ids) -> torch.Tensor:
        """Return token ids as a batch of one sequence."""
        return torch.as_tensor(np.asarray(ids, np.int64), device=self.device)[None]


def sequences(rows: Examples) -> list[list[int]]:
    """Return prompt and response of each sequence, all first responses before all second ones."""
    return [
        [*rows.prompts[row], *responses[row]]
        for responses in rows.responses
        for row in range(len(rows))
    ]


def largest_difference(outputs: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Return the largest mean absolute difference of the tokens of a sequence; infinity for NaN.

    A mean: rounding may route a single token to other experts, and other passes differ in all.
    """
    # A sequence of one token has no outputs.
    means = [(a - b).abs().mean() for a, b in zip(outputs, expected, strict=True) if len(a)]
    return torch.stack(means).nan_to_num(nan=math.inf).max().item()
