"""The toy task: a customer service whose responses are exactly correct or wrong.

A customer gives a name and asks for an item. The correct response greets by name, names the item
and the only place that sells it, and ends politely. Chosen responses sometimes have defects;
rejected responses have more. A model that is fine-tuned on the chosen responses therefore samples
correct ones about half of the time, and the preferences contain what it takes to improve.
"""

import random
import re
from typing import Any

PLACES = {
    "boutique": ["hat", "scarf", "coat", "belt", "dress"],
    "bakery": ["loaf", "cake", "bun", "pie", "roll"],
    "library": ["book", "map", "atlas", "novel", "comic"],
    "garage": ["tyre", "battery", "jack", "lamp", "mirror"],
    "market": ["melon", "leek", "plum", "carrot", "onion"],
}
PLACE_OF = {item: place for place, items in PLACES.items() for item in items}
ITEMS = sorted(PLACE_OF)
NAMES = ["Anna", "Ben", "Carl", "Dora", "Emil", "Fay", "Gus", "Hana"]
NAMES += ["Ivan", "Jane", "Kurt", "Lena", "Max", "Nora", "Otto", "Pia"]
REQUESTS = [
    "My name is {name} and I need a {item}.",
    "I am {name}. Where can I find a {item}?",
    "Hi, {name} here, looking for a {item}.",
    "{name} would like to buy a {item}.",
    "This is {name}. I want a {item}, please.",
    "Can you help {name} to get a {item}?",
    "A {item} for {name}, where is it sold?",
    "They call me {name} and I miss a {item}.",
]
ENDINGS = ["You are welcome!", "Have a nice day!", "Thank you for asking!"]
RUDE_ENDINGS = ["Now go away!", "Stop asking me!", "I do not care!"]
DEFECTS = ["name", "item", "place", "ending", "repetition"]

# Probabilities of 0, 1 and 2 defects of a chosen response. The rejected response has the same
# defects and one or two more.
CHOSEN_DEFECTS = [0.55, 0.30, 0.15]
# Fraction of pairs that differ in the additional defects only.
SAME_VARIANTS = 0.7
# Fraction of rejected responses with words that are also cut off, dropped, doubled or swapped.
GARBLED = 0.25


def all_prompts() -> list[str]:
    """Return all prompts in a fixed order."""
    return [
        f"\n\nHuman: {request.format(name=name, item=item)}\n\nAssistant:"
        for request in REQUESTS
        for name in NAMES
        for item in ITEMS
    ]


def is_correct(prompt: str, response: str) -> bool:
    """Return whether a response is one of the correct responses to a prompt, letter by letter."""
    name, item = _word_of(prompt, NAMES), _word_of(prompt, ITEMS)
    return response in {_text(name, item, [], {"polite": ending}) for ending in ENDINGS}


def _word_of(prompt: str, words: list[str]) -> str:
    return next(word for word in words if re.search(rf"\b{word}\b", prompt))


def _variant(rng: random.Random) -> dict[str, Any]:
    """Draw the form of each defect, and the ending of a response without that defect."""
    return {
        "name": rng.choice([None, *NAMES]),
        "item": rng.choice(ITEMS),
        "place": rng.choice(sorted(PLACES)),
        "ending": rng.choice(["", *RUDE_ENDINGS]),
        "repetition": rng.choice(["greeting", "advice"]),
        "polite": rng.choice(ENDINGS),
    }


def _text(name: str, item: str, defects: list[str], variant: dict[str, Any]) -> str:
    """Return the response with some defects, in the forms of a variant."""
    place, greeting = PLACE_OF[item], f"Hello {name},"
    if "place" in defects:
        place = next(other for other in (variant["place"], *PLACES) if other != place)
    if "item" in defects:
        item = variant["item"] if variant["item"] != item else ITEMS[ITEMS.index(item) - 1]
    if "name" in defects:
        greeting = "Hello," if variant["name"] in (None, name) else f"Hello {variant['name']},"
    advice = f"get a {item} at the {place}."
    if "repetition" in defects and variant["repetition"] == "greeting":
        greeting = f"{greeting} {greeting}"
    elif "repetition" in defects:
        advice = f"{advice} {advice}"
    ending = variant["ending" if "ending" in defects else "polite"]
    return f" {greeting} {advice} {ending}".rstrip()


def _garble(text: str, rng: random.Random) -> str:
    words = text.split()
    position = rng.randrange(len(words) - 1)
    start, first, second, end = words[:position], *words[position:][:2], words[position + 2 :]
    cut, doubled = [*start, first], [*start, first, first, second, *end]
    dropped, swapped = [*start, second, *end], [*start, second, first, *end]
    return " " + " ".join(rng.choice([cut, dropped, doubled, swapped]))


def make_row(prompt: str, rng: random.Random) -> dict[str, str]:
    """Return a row with this prompt: prompt, chosen and rejected."""
    name, item = _word_of(prompt, NAMES), _word_of(prompt, ITEMS)
    number = rng.choices([0, 1, 2], weights=CHOSEN_DEFECTS)[0]
    order = rng.sample(DEFECTS, len(DEFECTS))
    fewer, more = order[:number], order[: number + rng.choice([1, 2])]
    variant = _variant(rng)
    chosen = _text(name, item, fewer, variant)
    if rng.random() >= SAME_VARIANTS:
        variant = _variant(rng)
    rejected = _text(name, item, more, variant)
    if rng.random() < GARBLED:
        rejected = _garble(rejected, rng)
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def make_rows(
    rows: int, eval_rows: int, seed: int
) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return training and evaluation rows without common prompts; the latter have distinct ones."""
    prompts = all_prompts()
    rng = random.Random(seed)
    rng.shuffle(prompts)
    held_out, others = prompts[:eval_rows], prompts[eval_rows:]
    train = [make_row(rng.choice(others), rng) for _ in range(rows)]
    return train, [make_row(prompt, rng) for prompt in held_out]
