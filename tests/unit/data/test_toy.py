"""The toy task: correct responses, and properties of its rows."""

import pytest

from snakechat.data import toy

CORRECT = " Hello Pia, get a pie at the bakery. Have a nice day!"
CHANGES = [("Pia", "Ben"), ("pie", "bun"), ("bakery", "market"), ("nice", "bad"), (" Have", "")]


@pytest.mark.parametrize("change", CHANGES)
def test_a_correct_response_names_the_customer_the_item_and_its_place(change):
    prompt = "\n\nHuman: My name is Pia and I need a pie.\n\nAssistant:"
    assert toy.is_correct(prompt, CORRECT)
    assert not toy.is_correct(prompt, CORRECT.replace(*change))


def test_rejected_responses_are_wrong_and_evaluation_prompts_are_new():
    train, held_out = toy.make_rows(4000, 500, 1234)
    assert not any(toy.is_correct(row["prompt"], row["rejected"]) for row in (*train, *held_out))
    prompts = {row["prompt"] for row in held_out}
    assert len(prompts) == 500 and not prompts & {row["prompt"] for row in train}
