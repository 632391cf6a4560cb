"""Sampled responses."""

import torch

from rlhf.batches import micro_batches, pad


@torch.no_grad()
def sample_responses(model, prompts, tokenizer, max_response_length, temperature, max_tokens):
    """One response (ids, eos included where it came) for each prompt (ids).

    Pure sampling: no top-k, no top-p. Prompts of like length go together, at most max_tokens
    tokens, padding included, in one pass.
    """
    responses = [None] * len(prompts)
    lengths = [len(prompt) + max_response_length for prompt in prompts]
    for rows in micro_batches(range(len(prompts)), lengths, max_tokens):
        input_ids, attention_mask = pad(
            [prompts[row] for row in rows], tokenizer.pad_token_id, model.device, side="left"
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
