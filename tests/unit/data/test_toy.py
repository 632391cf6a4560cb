"""The toy task: correct responses, and properties of its rows."""

import random
import re

import pytest

from snakechat.data import toy

PROMPT = "\n\nHuman: Can you help Pia to get a pie?\n\nAssistant:"


@pytest.fixture(scope="module")
def splits():
    return toy.make_rows(4000, 500, random.Random(1234))


def independent_check(prompt, response):
    """Check a response against the docstring of the module by parsing the response."""
    request = re.fullmatch(r"\n\nHuman: (.+)\n\nAssistant:", prompt).group(1)
    said = re.fullmatch(r" Hello ([A-Z][a-z]+), get a ([a-z]+) at the ([a-z]+)\. (.+)", response)
    if said is None:
        return False
    name, item, place, ending = said.groups()
    words = re.findall(r"\w+", request)
    polite = ending in ("You are welcome!", "Have a nice day!", "Thank you for asking!")
    return (
        polite
        and name in words
        and name in toy.NAMES
        and item in words
        and item in toy.PLACES.get(place, [])
    )


@pytest.mark.parametrize(
    "ending", ["You are welcome!", "Have a nice day!", "Thank you for asking!"]
)
def test_correct_responses(ending):
    assert toy.is_correct(PROMPT, f" Hello Pia, get a pie at the bakery. {ending}")


@pytest.mark.parametrize(
    "response",
    [
        "",
        " Hello Max, get a pie at the bakery. Have a nice day!",
        " Hello, get a pie at the bakery. Have a nice day!",
        " Hello Pia, get a bun at the bakery. Have a nice day!",
        " Hello Pia, get a pie at the garage. Have a nice day!",
        " Hello Pia, get a pie at the bakery.",
        " Hello Pia, get a pie at the bakery. Now go away!",
        " Hello Pia, Hello Pia, get a pie at the bakery. Have a nice day!",
        " Hello Pia, get a pie at the bakery. Have a nice day! Have a nice day!",
        " Hello Pia, get a pie at the bakery. Have a nice day! ",
        "Hello Pia, get a pie at the bakery. Have a nice day!",
        " Hello Pia, get a pie at the bakery. Have a nice",
    ],
)
def test_wrong_responses(response):
    assert not toy.is_correct(PROMPT, response)


def test_is_correct_agrees_with_an_independent_check(splits):
    responses = [(row["prompt"], row[kind]) for row in splits[0] for kind in ("chosen", "rejected")]
    # Responses to other questions: whole sentences that are wrong in names, items and places.
    responses += [
        (row["prompt"], next_row["chosen"]) for row, next_row in zip(*splits, strict=False)
    ]
    verdicts = [toy.is_correct(prompt, response) for prompt, response in responses]
    assert verdicts == [independent_check(prompt, response) for prompt, response in responses]
    assert 0 < sum(verdicts) < len(verdicts)


def test_every_item_is_sold_in_one_place():
    items = [item for items in toy.PLACES.values() for item in items]
    assert len(items) == len(set(items))


def test_prompts_are_all_different_and_name_one_customer_and_one_item():
    prompts = toy.all_prompts()
    # Requests, names and items in all combinations.
    assert len(prompts) == len(set(prompts)) == 8 * 16 * 25
    for prompt in prompts:
        words = re.findall(r"\w+", prompt)
        assert sum(word in toy.NAMES for word in words) == 1
        assert sum(word in toy.PLACE_OF for word in words) == 1
        assert prompt.startswith("\n\nHuman: ")
        assert prompt.endswith("\n\nAssistant:")


def test_chosen_responses_are_correct_in_about_55_percent_of_rows(splits):
    right = [toy.is_correct(row["prompt"], row["chosen"]) for row in splits[0]]
    # Four standard errors of 4,000 rows: 4 * sqrt(.55 * .45 / 4000) = .031.
    assert sum(right) / len(right) == pytest.approx(0.55, abs=0.032)


def test_rejected_responses_are_never_correct(splits):
    assert not any(
        toy.is_correct(row["prompt"], row["rejected"]) for split in splits for row in split
    )


def test_responses_of_a_pair_differ_but_for_a_few_in_100_000(splits):
    rows = splits[0] + splits[1]
    equal = sum(row["chosen"] == row["rejected"] for row in rows)
    assert equal / len(rows) < 0.001


def test_responses_start_with_one_space_and_end_without(splits):
    for row in splits[0]:
        for response in (row["chosen"], row["rejected"]):
            assert re.match(r" \S", response)
            assert response == response.rstrip()


def test_evaluation_prompts_never_occur_in_training(splits):
    train, held_out = ({row["prompt"] for row in split} for split in splits)
    assert not train & held_out
    assert len(held_out) == 500


def test_number_of_rows(splits):
    assert [len(split) for split in splits] == [4000, 500]


def test_same_seed_same_rows():
    assert toy.make_rows(50, 10, random.Random(3)) == toy.make_rows(50, 10, random.Random(3))
    assert toy.make_rows(50, 10, random.Random(3)) != toy.make_rows(50, 10, random.Random(4))


@pytest.mark.parametrize("eval_rows", [3200, 5000])
def test_more_evaluation_rows_than_prompts_are_an_error(eval_rows):
    with pytest.raises(ValueError, match="the toy has 3200 prompts"):
        toy.make_rows(10, eval_rows, random.Random(1))


def test_all_prompts_but_one_can_be_held_out():
    train, held_out = toy.make_rows(5, 3199, random.Random(1))
    assert len({row["prompt"] for row in train}) == 1
    assert train[0]["prompt"] not in {row["prompt"] for row in held_out}
