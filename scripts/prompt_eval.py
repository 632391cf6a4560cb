"""Ask all models of a recipe the same prompts, and lay their responses side by side.

Each model responses each prompt three times: with the likeliest token of each place (greedy), drawn
by the seed (sampled), and with the best response that a beam search finds. responses.jsonl has them as
they are, responses.html is the page.
"""

import json

import torch
from transformers import GenerationConfig

from snakechat.data.dialogues import render_prompt
from snakechat.data.prompt_sets import read_prompts
from snakechat.data.tokenizers import Encoder, load_tokenizer
from snakechat.evaluation.comparisons import asked_models
from snakechat.modeling.generation import sample_responses
from snakechat.modeling.models import SPECIAL_IDS, choose_device, load_causal
from snakechat.reporting.pages import write_page
from snakechat.reporting.translations import teller
from snakechat.workflow.errors import InputError
from snakechat.workflow.job import run

DECODERS = ("greedy", "sampled", "beam search")

BODY = """{% for set, prompt, rows in questions %}
{% if loop.changed(set) %}<h2>{{ set }}</h2>
{% endif %}
<table>
<caption>{{ prompt }}</caption>
<thead><tr><th class="name">{{ model }}</th>
{% for name in decoders %}<th>{{ name }}</th>{% endfor %}</tr></thead>
{% for name, responses in rows %}
<tr><th>{{ name }}</th>
{% for response in responses %}
<td dir="auto">{{ response.text.strip() }}{% if not response.ended %}<span class="cut"> […]</span>
{%- endif %}</td>
{% endfor %}</tr>
{% endfor %}
</table>
{% endfor %}
"""


def main(job):
    """Ask the models one after the other; then the page."""
    settings, device = job.settings, choose_device(job.placement)
    prompts = read_prompts(job)
    responses = {}
    for name, folder in asked_models(job.inputs).items():
        responses[name] = ask(
            folder, prompts, settings, job.placement["micro_batch_tokens"], device
        )
        print(f"{name} has responded {len(prompts)} prompts")
    with open(job.result / "responses.jsonl", "w") as file:
        for place, (name, prompt) in enumerate(prompts):
            for model, found in responses.items():
                for decoder in DECODERS:
                    asked = {"set": name, "prompt": prompt, "model": model, "decoder": decoder}
                    file.write(json.dumps(asked | found[decoder][place]) + "\n")
    draw(job, prompts, responses)


def ask(folder, prompts, settings, max_tokens, device):
    """Responses of a model to (set, prompt) pairs: {decoder: [{text, ended} of each prompt]}.

    Raises InputError where the model has no room for a prompt and a response.
    """
    tokenizer = load_tokenizer(folder)
    encoder = Encoder(tokenizer, settings.template)
    for _, prompt in prompts:
        if encoder.has_special_token(prompt):
            raise InputError(f"prompt {prompt[:60]!r} has a special token in its text: remove it")
    ids = encoder.prompts([render_prompt([("user", prompt)]) for _, prompt in prompts])
    model = load_causal(folder, settings.dtype, tokenizer).to(device)
    room = room_for_responses(model, folder, ids, settings.max_response_length)
    found = {}
    for decoder, temperature in (("greedy", 0), ("sampled", settings.temperature)):
        torch.manual_seed(settings.seed)
        (found[decoder],) = sample_responses(model, ids, tokenizer, room, temperature, max_tokens)
    found["beam search"] = search_beams(model, ids, tokenizer, room, settings.num_beams)
    return {
        decoder: [told(response, tokenizer) for response in found[decoder]] for decoder in DECODERS
    }


def room_for_responses(model, folder, prompts, max_response_length):
    """Most tokens of a response to any of the prompts (ids), so that all are asked alike."""
    positions = getattr(model.config, "max_position_embeddings", None)
    longest = max(map(len, prompts))
    if positions is None:
        return max_response_length
    if positions <= longest:
        raise InputError(
            f"{folder} has positions for {positions} tokens, and the longest prompt has {longest}:"
            " make it shorter"
        )
    return min(max_response_length, positions - longest)


@torch.no_grad()
def search_beams(model, prompts, tokenizer, max_response_length, num_beams):
    """The responses (ids, eos included where it came) to prompts (ids) that a search of so many beams
    finds: those of the highest mean log-probability of a token.
    """
    # A model's own settings would be mixed in.
    model.generation_config = GenerationConfig(
        do_sample=False,
        num_beams=num_beams,
        max_new_tokens=max_response_length,
        **{name: getattr(tokenizer, name) for name in SPECIAL_IDS},
    )
    found = []
    for prompt in prompts:
        input_ids = torch.tensor([prompt], device=model.device)
        whole = model.generate(input_ids, attention_mask=torch.ones_like(input_ids))
        found.append(whole[0, len(prompt) :].tolist())
    return found


def told(ids, tokenizer):
    """A response as text, and whether it ended."""
    text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return {"text": text, "ended": ids[-1] == tokenizer.eos_token_id}


def draw(job, prompts, responses):
    """The page: a table for each prompt, a row for each model."""
    settings, say = job.settings, teller(job.settings.language)
    how = say(
        "Sampled: at temperature {temperature}, by seed {seed}. Beam search: {num_beams} beams."
        " A response has at most {max_response_length} tokens; […] stands where one had not ended."
    )
    write_page(
        job.result / "responses.html",
        BODY,
        settings.language,
        f"{say('Responses side by side')}: {job.spec['name']}",
        [how.format(**vars(settings))],
        model=say("model"),
        decoders=[say(decoder) for decoder in DECODERS],
        questions=[
            (
                name,
                prompt,
                [
                    (model, [found[decoder][place] for decoder in DECODERS])
                    for model, found in responses.items()
                ],
            )
            for place, (name, prompt) in enumerate(prompts)
        ],
    )


if __name__ == "__main__":
    run(main)
