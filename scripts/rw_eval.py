"""Have a reward model score a good and a bad response to each of some prompts that users write.

scores.jsonl has every pair, metrics.json how often the good response won, scores.html the page.
"""

import json

from snakechat.modeling.batching import Examples

from snakechat.data.dialogues import render_prompt, render_response
from snakechat.data.prompt_sets import read_pairs
from snakechat.data.tokenizers import Encoder, load_tokenizer
from snakechat.modeling.forward import Scorer, response_scores
from snakechat.modeling.models import choose_device, load_scorer
from snakechat.reporting.pages import write_page
from snakechat.reporting.translations import as_number, teller
from snakechat.training.metrics import write_json
from snakechat.workflow.errors import InputError
from snakechat.workflow.job import run

BODY = """{% for set, rows in sets %}
<h2>{{ set }}</h2>
<table>
<thead><tr><th>{{ head.prompt }}</th>
<th>{{ head.chosen }}</th><th class="number">{{ head.score }}</th>
<th>{{ head.rejected }}</th><th class="number">{{ head.score }}</th>
<th class="number">{{ head.margin }}</th><th class="name">{{ head.winner }}</th></tr></thead>
{% for pair in rows %}
<tr><td dir="auto">{{ pair.prompt }}</td>
{% for key in ("chosen", "rejected") %}
<td dir="auto">{{ pair[key] }}</td><td class="number">{{ "%.3f" % pair[key ~ "_score"] }}</td>
{% endfor %}
<td class="number">{{ "%+.3f" % pair.margin }}</td><td>{{ say(pair.winner) }}</td></tr>
{% endfor %}
</table>
{% endfor %}
"""


def main(job):
    """Scores, figures, page."""
    folder, settings = job.inputs["model"], job.settings
    pairs = read_pairs(job)
    tokenizer = load_tokenizer(folder)
    scorer = Scorer(load_scorer(folder, "fp32", tokenizer)).to(choose_device(job.placement))
    examples = encode(pairs, Encoder(tokenizer, settings.template))
    check_room(examples, scorer.model, folder)
    scores = response_scores(scorer, examples, job.placement["micro_batch_tokens"])
    rows = [
        {"set": name, **pair, **compared(*map(float, of_pair))}
        for (name, pair), of_pair in zip(pairs, scores.T, strict=True)
    ]
    with open(job.result / "scores.jsonl", "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    by_set = {name: [row for row in rows if row["set"] == name] for name in settings.prompts}
    figures = figures_of(rows) | {"sets": {name: figures_of(by_set[name]) for name in by_set}}
    write_json(job.result / "metrics.json", figures)
    print("accuracy {accuracy:.4f}, ties {ties:.4f}, margin {margin:.4f}".format(**figures))
    draw(job, figures, by_set)


def encode(pairs, encoder):
    """Ids of (set, pair) pairs, as in training. Raises InputError for special tokens in a text."""
    for _, pair in pairs:
        for key, text in pair.items():
            if encoder.has_special_token(text):
                raise InputError(f"{key} {text[:60]!r} has a special token in its text: remove it")
    prompts = encoder.prompts([render_prompt([("user", pair["prompt"])]) for _, pair in pairs])
    responses = [
        encoder.responses([render_response(pair[key]) for _, pair in pairs])
        for key in ("chosen", "rejected")
    ]
    return Examples(prompts, *responses)


def check_room(examples, model, folder):
    """Raises InputError where a prompt and a response are longer than the model has positions."""
    positions = getattr(model.config, "max_position_embeddings", None)
    longest = int((examples.prompt_lengths + examples.response_lengths).max())
    if positions is not None and longest > positions:
        raise InputError(
            f"{folder} has positions for {positions} tokens, and the longest prompt and response have"
            f" {longest}: make them shorter"
        )


def compared(chosen_score, rejected_score):
    """Scores of a pair, the margin between them, and which response wins."""
    margin = chosen_score - rejected_score
    winner = "tie" if margin == 0 else "chosen" if margin > 0 else "rejected"
    scores = {"chosen_score": chosen_score, "rejected_score": rejected_score}
    return {**scores, "margin": margin, "winner": winner}


def figures_of(rows):
    """Of scored pairs: how often the chosen response wins (a tie is no success), and mean margin."""
    wins = [row["winner"] for row in rows]
    return {
        "pairs": len(rows),
        "accuracy": wins.count("chosen") / len(rows),
        "ties": wins.count("tie") / len(rows),
        "margin": sum(row["margin"] for row in rows) / len(rows),
    }


def draw(job, figures, by_set):
    """The page: a table for each set, a row for each pair."""
    say = teller(job.settings.language)
    result = say(
        "The good response has the higher score in {accuracy} of {pairs} pairs; ties: {ties}."
        " Mean margin: {margin}."
    ).format(
        pairs=figures["pairs"],
        accuracy=f"{figures['accuracy']:.1%}",
        ties=f"{figures['ties']:.1%}",
        margin=as_number(figures["margin"]),
    )
    head = {
        "prompt": "prompt",
        "chosen": "good response (chosen)",
        "rejected": "bad response (rejected)",
        "score": "score",
        "margin": "margin",
        "winner": "higher score",
    }
    write_page(
        job.result / "scores.html",
        BODY,
        job.settings.language,
        f"{say('Good and bad responses, scored')}: reward/{job.spec['name']}",
        [result],
        head={key: say(text) for key, text in head.items()},
        sets=list(by_set.items()),
        say=say,
    )


if __name__ == "__main__":
    run(main)
