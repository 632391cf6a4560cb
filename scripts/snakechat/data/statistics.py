"""A look at data: lengths, repetitions, and what two sets have in common."""

from array import array
from hashlib import blake2b

import numpy as np

from snakechat.data.dialogues import MARKER, is_empty

PERCENTILES = (0, 1, 10, 50, 90, 99, 100)


def fingerprint(text):
    """A number of 64 bits that stands for a text, blanks around it apart."""
    return int.from_bytes(blake2b(text.strip().encode(), digest_size=8).digest())


def percentiles(lengths):
    """{"p50": ...} and the mean of lengths; {} where there are none."""
    if not len(lengths):
        return {}
    values = np.percentile(lengths, PERCENTILES, method="nearest")
    named = {f"p{name}": int(value) for name, value in zip(PERCENTILES, values, strict=True)}
    return named | {"mean": round(float(np.mean(lengths)), 1)}


class DatasetStatistics:
    """Gathers what is worth knowing of a part's records, one after the other."""

    def __init__(self):
        self.lengths = {name: array("l") for name in ("prompt", "chosen", "rejected")}
        self.prompts, self.whole = array("Q"), array("Q")
        self.counts = dict.fromkeys(
            (
                "empty_prompt",
                "empty_response",
                "equal_responses",
                "turns_in_response",
                "chosen_longer",
            ),
            0,
        )

    def add(self, prompt, chosen, rejected):
        """Take a record into account; rejected may be None."""
        responses = [chosen] if rejected is None else [chosen, rejected]
        self.lengths["prompt"].append(len(prompt))
        self.lengths["chosen"].append(len(chosen))
        self.prompts.append(fingerprint(prompt))
        self.whole.append(fingerprint("\0".join([prompt, *responses])))
        counts = self.counts
        counts["empty_prompt"] += is_empty(prompt)
        counts["empty_response"] += any(not response.strip() for response in responses)
        counts["turns_in_response"] += any(MARKER.search(response) for response in responses)
        if rejected is not None:
            self.lengths["rejected"].append(len(rejected))
            counts["equal_responses"] += chosen.strip() == rejected.strip()
            counts["chosen_longer"] += len(chosen) > len(rejected)

    def summary(self):
        """What was found, as JSON; lengths are in characters."""
        rows, pairs = len(self.prompts), len(self.lengths["rejected"])
        summary = {
            "rows": rows,
            "pairs": pairs,
            "characters": {
                name: percentiles(lengths) for name, lengths in self.lengths.items() if lengths
            },
            "repeated_prompts": rows - len(np.unique(self.prompts)),
            "repeated_rows": rows - len(np.unique(self.whole)),
            **self.counts,
        }
        chosen_longer = summary.pop("chosen_longer")
        if pairs:
            summary["chosen_longer_share"] = round(chosen_longer / pairs, 4)
        return summary


def count_shared(prompts, others):
    """How many of the prompts (fingerprints, one for each row) stand among the others too."""
    return int(np.isin(np.asarray(prompts), np.asarray(others)).sum())
