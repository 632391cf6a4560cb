"""1 for an exactly right response of the toy dataset, 0 for any other."""

from snakechat.data.toy import is_correct


def score(prompts, responses):
    """One number for each response."""
    return [float(is_correct(*asked)) for asked in zip(prompts, responses, strict=True)]
