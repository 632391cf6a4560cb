"""Sampled responses, by a loop of our own over a model's forward passes.

A prompt goes through the model once, however many responses to it are sampled; rows that have ended
leave the pass; keys and values stand in tensors that have room for all that come.

Shapes: n prompts, S samples of each, R tokens of the longest response; b rows are in a pass.
"""

import inspect

import numpy as np
import torch
from torch.nn import functional
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from snakechat.modeling.batching import bucket_by_size, sort_by_size

# A pass goes on without the rows that have ended once it has no more than that share of its rows.
STILL_OPEN = 7 / 8
# Likelihoods that are summed at a time to draw a token.
BLOCK = 64


def make_sampler(settings, tokenizer, max_tokens, folder):
    """What samples responses: settings.generation_backend. folder: of the model that is there at first."""
    if settings.generation_backend == "vllm":
        from snakechat.modeling.vllm_sampler import VllmSampler

        return VllmSampler(settings, tokenizer, folder)
    return HfSampler(settings, tokenizer, max_tokens)


class HfSampler:
    """Samples from the model that is trained."""

    def __init__(self, settings, tokenizer, max_tokens):
        self.settings, self.tokenizer, self.max_tokens = settings, tokenizer, max_tokens

    def update(self, model):
        """Take on the weights of a model as they are now."""
        self.model = model

    def sample(self, prompts):
        """Responses (ids) to prompts (ids), found[s][row]; and None in place of log-probabilities:
        those of a pass as in training are the same.
        """
        settings = self.settings
        found = sample_responses(
            self.model,
            prompts,
            self.tokenizer,
            settings.max_response_length,
            settings.temperature,
            self.max_tokens,
            settings.num_generations,
        )
        return found, None

    def close(self):
        """Nothing is held."""


@torch.no_grad()
def sample_responses(
    model, prompts, tokenizer, max_response_length, temperature, max_tokens, samples=1
):
    """Responses (ids, eos included where it came) to prompts (ids): found[s][row].

    Pure sampling: no top-k, no top-p; at temperature 0 the likeliest token. Prompts of like length
    go together, at most max_tokens tokens in one pass, padding and all samples included. What is
    drawn for a row does not depend on the rows that it shares a pass with.
    """
    eos_id, shape = tokenizer.eos_token_id, (len(prompts), samples, max_response_length)
    # From the CPU's generator, whatever the device.
    chances = torch.rand(shape, dtype=torch.float64).to(model.device)
    found = [[None] * len(prompts) for _ in range(samples)]
    sizes = [samples * (len(prompt) + max_response_length) for prompt in prompts]
    for rows in bucket_by_size(sort_by_size(range(len(prompts)), sizes), max_tokens):
        padded = pad_left([prompts[row] for row in rows], tokenizer.pad_token_id, model.device)
        tokens = respond(model, *padded, chances[rows], eos_id, temperature).tolist()
        for place, ids in enumerate(tokens):
            ended = ids.index(eos_id) + 1 if eos_id in ids else len(ids)
            found[place % samples][rows[place // samples]] = ids[:ended]
    return found


def respond(model, input_ids, mask, chances, eos_id, temperature):
    """Responses [b * S, R] to prompts [b, T], those to one prompt together; eos fills them up.

    chances: [b, S, R], uniform in [0, 1): all that is random.
    """
    chances = chances.flatten(end_dim=1)
    mask = torch.cat([mask, mask.new_ones(len(mask), chances.shape[1])], dim=1)
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    # BLOOM's follow from the mask.
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    cache = make_cache(model.config, mask.shape[1])
    tokens = torch.full_like(chances, eos_id, dtype=torch.int64)
    # Of the tokens, those in the pass; and whether each has ended.
    rows = torch.arange(len(tokens), device=tokens.device)
    ended = torch.zeros_like(rows, dtype=torch.bool)
    start, end = 0, input_ids.shape[1]
    for place in range(tokens.shape[1]):
        logits = model(
            input_ids=input_ids,
            attention_mask=mask[:, :end],
            **({"position_ids": positions[:, start:end]} if takes_positions else {}),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        # Samples of each row of the pass: S as long as the prompts are all that it has.
        copies = len(rows) // len(logits)
        drawn = draw(logits, chances[rows, place].view(-1, copies), temperature).flatten()
        drawn = drawn.masked_fill(ended, eos_id)
        tokens[rows, place] = drawn
        ended = drawn == eos_id
        num_open = len(rows) - int(ended.sum())
        if num_open == 0:
            break
        if copies > 1 or num_open <= STILL_OPEN * len(rows):
            kept = (~ended).nonzero().squeeze(1)
            sources = kept // copies
            cache.reorder_cache(sources)
            mask, positions = mask[sources], positions[sources]
            rows, drawn, ended = rows[kept], drawn[kept], ended[kept]
        input_ids, start, end = drawn[:, None], end, end + 1
    return tokens


def draw(logits, chances, temperature):
    """Tokens [b, c] from logits [b, V]: where the cumulative distribution passes chances [b, c].

    One number for a token, and not one for each of the vocabulary, as torch.multinomial takes. The
    distribution is summed in blocks, then in the block of the token: over all of a vocabulary the
    cumulative sum takes four times as long as all else.
    """
    if temperature == 0:
        return logits.argmax(dim=1, keepdim=True).expand_as(chances)
    likelihoods = torch.softmax(logits.float() / temperature, dim=1)
    likelihoods = functional.pad(likelihoods, (0, -likelihoods.shape[1] % BLOCK))
    blocks = likelihoods.view(len(logits), -1, BLOCK)
    block, chances = passed(blocks.sum(dim=2), chances)
    rows = torch.arange(len(logits), device=logits.device)[:, None]
    place, _ = passed(blocks[rows, block], chances[..., None])
    return block * BLOCK + place.squeeze(-1)


def passed(parts, chances):
    """Where the cumulative sum of parts [..., n] passes chances [..., c] of the whole; and how much
    of that part is before each.
    """
    # fp32 would lose rare tokens in the sum.
    sums = parts.cumsum(dim=-1, dtype=torch.float64)
    # Rounding must not lead to a place behind the last part.
    targets = chances.clamp(0, 1 - 2**-52) * sums[..., -1:]
    place = torch.searchsorted(sums, targets, right=True)
    part = parts.gather(-1, place).double()
    return place, (targets - sums.gather(-1, place) + part) / part


def make_cache(config, size):
    """An empty cache for a model, with room for so many tokens in each row."""
    cache = DynamicCache(config=config)
    # Not those of a window that slides: they throw tokens away.
    cache.layers = [Room(size) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


class Room(DynamicLayer):
    """Keys and values [b, H, T, D] of a layer. Those of new tokens go into a tensor that is there;
    transformers' own copies all the others each time.
    """

    def __init__(self, size):
        super().__init__()
        self.size, self.length, self.rooms = size, 0, None

    def update(self, key_states, value_states, *args, **kwargs):
        """Put new ones behind those that are there; returns all."""
        states = key_states, value_states
        if self.rooms is None:
            shapes = [(*new.shape[:2], self.size, new.shape[3]) for new in states]
            self.rooms = [new.new_empty(shape) for new, shape in zip(states, shapes, strict=True)]
        start, self.length = self.length, self.length + key_states.shape[2]
        for room, new in zip(self.rooms, states, strict=True):
            room[:, :, start : self.length] = new
        return tuple(room[:, :, : self.length] for room in self.rooms)

    def get_seq_length(self):
        """Tokens that are there."""
        return self.length

    def reorder_cache(self, beam_idx):
        """Take rows of the pass, each any number of times."""
        self.rooms = [room[beam_idx] for room in self.rooms]


def pad_left(sequences, pad_id, device):
    """Stack sequences so that all end together. Returns input_ids and attention_mask, [B, T].

    The mask comes from the lengths, so that pad_id may be any id.
    """
    longest = max(len(sequence) for sequence in sequences)
    input_ids = torch.full((len(sequences), longest), pad_id, dtype=torch.int64)
    attention_mask = torch.zeros_like(input_ids)
    for row, sequence in enumerate(sequences):
        input_ids[row, longest - len(sequence) :] = torch.as_tensor(np.asarray(sequence, np.int64))
        attention_mask[row, longest - len(sequence) :] = 1
    return input_ids.to(device), attention_mask.to(device)
