"""What RLHF looks at before it spends hours, and as it goes: whether its parts go together."""

import sys

import numpy as np

from snakechat.data.tokens import Ragged
from snakechat.modeling.batching import Examples
from snakechat.modeling.forward import response_scores
from snakechat.modeling.models import SPECIAL_IDS
from snakechat.workflow.distributed import rank
from snakechat.workflow.errors import InputError
from snakechat.workflow.manifest import manifest_path, read_manifest

# Of the deviation of a reward model's recorded scores: what another device may change.
PROBE_TOLERANCE = 0.1
# By how much rounding alone may part the first update of a step from the pass before it: the mean
# ratio from 1, and the mean KL from 0.
ROUNDING = {"fp32": 1e-3, "bf16": 0.05, "fp16": 0.05}
# An actor that has ended none of so many responses in a row never will.
NEVER_ENDS = 500


def check_tokenizers(actor, reward, folders):
    """Raises InputError where a reward model would read a response otherwise than it was written.

    actor, reward: tokenizers; folders: where they are from.
    """
    if actor.get_vocab() != reward.get_vocab():
        raise InputError(
            f"{folders[0]} and {folders[1]} have different tokenizers:"
            " a reward model can only score tokens that it knows"
        )
    for name in SPECIAL_IDS:
        ids = [getattr(tokenizer, name) for tokenizer in (actor, reward)]
        if ids[0] != ids[1]:
            raise InputError(
                f"{folders[0]} and {folders[1]} have different tokens for {name}: {ids[0]} and"
                f" {ids[1]}: train both from models of one family"
            )


def check_probes(scorer, folder, tokens, max_tokens):
    """Raises InputError if a reward model does not score as it did at the end of its training.

    folder: of the reward model; tokens: those that it was trained on.
    """
    recorded = np.array(read_manifest(manifest_path(folder))["facts"]["probe_scores"])
    probes = Examples.read(tokens, "eval", "chosen", "rejected").first(recorded.shape[1])
    difference = np.abs(response_scores(scorer, probes, max_tokens) - recorded).max()
    if not difference < PROBE_TOLERANCE * recorded.std():
        raise InputError(
            f"{folder} does not score its probes as recorded: they differ by {difference:.3g},"
            f" beside a deviation of {recorded.std():.3g}: delete it and start the build again"
        )


def shared_prompts(prompts, inputs):
    """How many prompts were seen in other phases too, {phase: number}; says so.

    inputs: the folders of a job by name, the tokens of other phases as tokens.PHASE.
    """
    found = {}
    for name, folder in inputs.items():
        _, _, phase = name.partition("tokens.")
        if not phase:
            continue
        others = Ragged(folder, "train.prompt")
        seen = {bytes(others[row]) for row in range(len(others))}
        found[phase] = sum(bytes(prompts[row]) in seen for row in range(len(prompts)))
        if found[phase] and rank() == 0:
            print(
                f"note: {found[phase]:,} of {len(prompts):,} prompts are also among those of"
                f" {phase}: split.by: prompt keeps phases apart",
                file=sys.stderr,
            )
    return found


# And what it looks at as it goes.


def check_responses(rollouts, unended, step):
    """Raises InputError where responses are all empty, or never end.

    unended: responses in a row before these of which none ended; returns it for the next step.
    """
    number = len(rollouts.ended)
    if rollouts.ended.all() and rollouts.lengths.max() == 1:
        raise InputError(
            f"step {step}: all {number} responses are empty: the actor ends at once; look at the"
            " responses that sft was trained on"
        )
    if rollouts.ended.any():
        return 0
    if unended + number >= NEVER_ENDS:
        raise InputError(
            f"step {step}: none of the last {unended + number} responses ended within"
            " max_response_length: make it larger, or train sft on responses that are not cut"
        )
    return unended + number


def check_first(figures, dtype, step):
    """Raises InputError if a step's first update saw another policy than the one that responded.

    figures: of that update, where the ratio is 1 and the KL 0 but for rounding.
    """
    ratio, kl = figures["policy/ratio"], figures["policy/approxkl"]
    if not (abs(ratio - 1) < ROUNDING[dtype] and kl < ROUNDING[dtype]):
        raise InputError(
            f"step {step}: before any update the actor's ratio to itself is {ratio:.4g} and its KL"
            f" {kl:.4g}, instead of 1 and 0: its passes do not agree"
        )
