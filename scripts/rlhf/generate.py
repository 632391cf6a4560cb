"""Sampled responses."""

import numpy as np
import torch

from rlhf.batches import bucket, largest_first


@torch.no_grad()
def sample_responses(model, prompts, tokenizer, max_response_length, temperature, max_tokens):
    """One response (ids, eos included where it came) for each prompt (ids).

    Pure sampling: no top-k, no top-p. Prompts of like length go together, at most max_tokens
    tokens, padding included, in one pass.
    """
    responses = [None] * len(prompts)
    sizes = [len(prompt) + max_response_length for prompt in prompts]
    for rows in bucket(largest_first(range(len(prompts)), sizes), max_tokens):
        input_ids, attention_mask = pad_left(
            [prompts[row] for row in rows], tokenizer.pad_token_id, model.device
        )
        sampled = model.generate(
            input_ids=input_ids,
            attention_mask=attention_mask,
            do_sample=True,
            temperature=temperature,
            top_k=0,
            top_p=1.0,
            max_new_tokens=max_response_length,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )[:, input_ids.shape[1] :].tolist()
        for row, ids in zip(rows, sampled, strict=True):
            ended = tokenizer.eos_token_id in ids
            responses[row] = ids[: ids.index(tokenizer.eos_token_id) + 1] if ended else ids
    return responses


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
