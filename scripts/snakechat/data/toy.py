"""The shop: a toy dataset whose responses are exactly right or wrong, so that learning is measured.

A customer says a name and an item; the right response greets by the name, names the item and the one
place that sells it, and ends politely. Chosen responses have defects at times, and rejected ones have
more, so that a model fine-tuned on the chosen responses is right about half of the time when it
samples, while the preferences tell what would be better.
"""

import re

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

# Chances of 0, 1 and 2 defects of a chosen response.
CHOSEN_DEFECTS = [0.55, 0.30, 0.15]
# A rejected response has chosen's defects and one or two more.
SAME_CHOICES = 0.7  # share of pairs that are alike in all but the added defects
GARBLED = 0.25  # share of rejected responses that are also cut, thinned, doubled or swapped


def all_prompts():
    """Every prompt there is, in a fixed order."""
    return [
        f"\n\nHuman: {request.format(name=name, item=item)}\n\nAssistant:"
        for request in REQUESTS
        for name in NAMES
        for item in ITEMS
    ]


def is_correct(prompt, response):
    """Whether a response is exactly a right response to the prompt."""
    name = next(name for name in NAMES if re.search(rf"\b{name}\b", prompt))
    item = next(item for item in ITEMS if re.search(rf"\b{item}\b", prompt))
    return response in {_response(name, item, PLACE_OF[item], ending) for ending in ENDINGS}


def _response(name, item, place, ending):
    return f" Hello {name}, get a {item} at the {place}. {ending}".rstrip()


def _choices(random):
    """What a response says where it has a defect, and its ending where it has none."""
    return {
        "name": random.choice([None, *NAMES]),
        "item": random.choice(ITEMS),
        "place": random.choice(sorted(PLACES)),
        "ending": random.choice(["", *RUDE_ENDINGS]),
        "repetition": random.choice(["greeting", "advice"]),
        "polite": random.choice(ENDINGS),
    }


def _text(name, item, defects, choices):
    place, ending = PLACE_OF[item], choices["polite"]
    if "place" in defects and choices["place"] == place:
        choices = {**choices, "place": next(other for other in PLACES if other != place)}
    if "place" in defects:
        place = choices["place"]
    if "item" in defects:
        item = choices["item"] if choices["item"] != item else ITEMS[ITEMS.index(item) - 1]
    greeting = f"Hello {name},"
    if "name" in defects:
        other = choices["name"] if choices["name"] != name else None
        greeting = f"Hello {other}," if other else "Hello,"
    if "ending" in defects:
        ending = choices["ending"]
    advice = f"get a {item} at the {place}."
    if "repetition" in defects and choices["repetition"] == "greeting":
        greeting = f"{greeting} {greeting}"
    elif "repetition" in defects:
        advice = f"{advice} {advice}"
    return f" {greeting} {advice} {ending}".rstrip()


def _garble(text, random):
    words = text.split()
    position = random.randrange(len(words) - 1)
    kind = random.choice(["cut", "drop", "double", "swap"])
    if kind == "cut":
        words = words[: position + 1]
    elif kind == "drop":
        del words[position]
    elif kind == "double":
        words.insert(position, words[position])
    else:
        words[position], words[position + 1] = words[position + 1], words[position]
    return " " + " ".join(words)


def make_row(prompt, random):
    """One row: prompt, chosen, rejected. random: a random.Random."""
    name = next(name for name in NAMES if re.search(rf"\b{name}\b", prompt))
    item = next(item for item in ITEMS if re.search(rf"\b{item}\b", prompt))
    number = random.choices([0, 1, 2], weights=CHOSEN_DEFECTS)[0]
    order = random.sample(DEFECTS, len(DEFECTS))
    fewer, more = order[:number], order[: number + random.choice([1, 2])]
    choices = _choices(random)
    chosen = _text(name, item, fewer, choices)
    if random.random() >= SAME_CHOICES:
        choices = _choices(random)
    rejected = _text(name, item, more, choices)
    if random.random() < GARBLED:
        rejected = _garble(rejected, random)
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def make_rows(rows, eval_rows, random):
    """Rows for training and for evaluation, which share no prompt.

    Every evaluation row has a prompt of its own. random: a random.Random. Raises ValueError where
    there are too few prompts.
    """
    prompts = all_prompts()
    random.shuffle(prompts)
    if eval_rows >= len(prompts):
        raise ValueError(f"eval_rows is {eval_rows}: the toy has {len(prompts)} prompts in all")
    held_out, others = prompts[:eval_rows], prompts[eval_rows:]
    train = [make_row(random.choice(others), random) for _ in range(rows)]
    return train, [make_row(prompt, random) for prompt in held_out]
