"""1 for an exactly right answer of the toy dataset, 0 for any other."""

from rlhf.toy import is_right


def score(prompts, answers):
    """One number for each answer."""
    return [float(is_right(*asked)) for asked in zip(prompts, answers, strict=True)]
