"""The toy task: correct responses, and properties of its rows."""

import random
import re

import pytest

from snakechat.data import toy


@pytest.fixture(scope="module")
def splits():
    return toy.make_rows(4000, 500, random.Random(1234))


def independent_check(prompt, response):
    """Check a response against the docstring of the module by parsing the response."""
    said = re.fullmatch(r" Hello ([A-Z][a-z]+), get a ([a-z]+) at the ([a-z]+)\. (.+)", response)
    if said is None:
        return False
    name, item, place, ending = said.groups()
    return (
        ending in ("You are welcome!", "Have a nice day!", "Thank you for asking!")
        and {name, item} <= set(re.findall(r"\w+", prompt))
        and name in toy.NAMES
        and item in toy.PLACES.get(place, [])
    )


def test_is_correct_agrees_with_an_independent_check(splits):
    responses = [(row["prompt"], row[kind]) for row in splits[0] for kind in ("chosen", "rejected")]
    # Responses to other questions: whole sentences that are wrong in names, items and places.
    responses += [
        (row["prompt"], next_row["chosen"]) for row, next_row in zip(*splits, strict=False)
    ]
    verdicts = [toy.is_correct(prompt, response) for prompt, response in responses]
    assert verdicts == [independent_check(prompt, response) for prompt, response in responses]
    assert 0 < sum(verdicts) < len(verdicts)


def test_chosen_responses_are_correct_in_about_55_percent_of_rows(splits):
    right = [toy.is_correct(row["prompt"], row["chosen"]) for row in splits[0]]
    # Four standard errors of 4,000 rows: 4 * sqrt(.55 * .45 / 4000) = .031.
    assert sum(right) / len(right) == pytest.approx(0.55, abs=0.032)


def test_rejected_responses_are_wrong_and_evaluation_prompts_are_new(splits):
    train, held_out = splits
    assert not any(toy.is_correct(row["prompt"], row["rejected"]) for row in (*train, *held_out))
    prompts = {row["prompt"] for row in held_out}
    assert len(prompts) == 500 and not prompts & {row["prompt"] for row in train}
