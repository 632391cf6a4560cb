"""Rows of DPO with the log-probabilities of the reference model."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from snakechat.algorithms.preference import (
    kto_reference_point,
    labelled_metrics,
    pair_metrics,
    preference_losses,
    response_rewards,
    reward_rounding,
)
from snakechat.config.settings import DpoSettings, has_reference_point
from snakechat.modeling.batching import Examples
from snakechat.modeling.forward import Policy, response_logprobs
from snakechat.modeling.models import copy_to_device


class PreferenceData:
    """A split with the log-probabilities of its responses under the reference model.

    Args:
        inputs: Folders of `tokens` and, unless compute_reference follows, of the `reference`.

    Attributes:
        rows: A prompt, its chosen and its rejected response each. For KTO, one may be empty.
        epoch: The epoch in training, to which the log-probabilities belong. They differ
            between epochs by rounding alone (compute_reference.py).
    """

    def __init__(self, settings: DpoSettings, inputs: Mapping[str, Path], split: str) -> None:
        self.settings = settings
        self.rows = Examples.read(inputs["tokens"], split, "chosen", "rejected")
        self.lengths = torch.from_numpy(self.rows.response_lengths)
        self.epoch = 0
        self.reference = self.mismatched = self.mismatched_reference = None
        if has_reference_point(settings.loss):
            self.mismatched = self.rows.mismatched(settings.max_length, split)
        # Log-probabilities [E, A, n] of the reference model.
        if folder := inputs.get("reference"):
            self.reference = torch.from_numpy(np.load(folder / f"{split}.npy"))
            if self.mismatched is not None:
                table = np.load(folder / f"{split}.mismatched.npy")
                self.mismatched_reference = torch.from_numpy(table)

    def compute_reference(self, policy: Policy) -> None:
        """Compute the log-probabilities under the reference model."""
        self.reference = torch.from_numpy(response_logprobs(policy, self.rows))[None]
        if self.mismatched is not None:
            logprobs = response_logprobs(policy, self.mismatched)
            self.mismatched_reference = torch.from_numpy(logprobs)[None]

    def reference_point(self, policy: Policy, rows: np.ndarray) -> Tensor | None:
        """Return the reward with which KTO compares the rewards of rows; None for other losses."""
        if self.mismatched is None or self.mismatched_reference is None:
            return None
        examples = self.mismatched.select(rows)
        logprobs = torch.from_numpy(response_logprobs(policy, examples))
        lengths = torch.from_numpy(examples.response_lengths)
        reference = self._of_epoch(self.mismatched_reference)[:, rows]
        return kto_reference_point(response_rewards(self.settings, logprobs, reference, lengths))

    def losses(
        self, logprobs: Tensor, rows: np.ndarray | list[int], reference_point: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the losses [B] of the given rows and the implicit rewards [2, B] of responses.

        logprobs: Of chosen and rejected responses [2, B]. reference_point: Of the step, for KTO.
        """
        device = logprobs.device
        reference = None
        if self.reference is not None:
            reference = copy_to_device(self._of_epoch(self.reference)[:, rows], device)
        lengths = copy_to_device(self.lengths[:, rows], device)
        return preference_losses(self.settings, logprobs, reference, lengths, reference_point)

    def metrics(
        self, losses: Tensor, rewards: Tensor, rows: np.ndarray | slice = slice(None)
    ) -> dict[str, float]:
        """Return the metrics of rows from their losses [B] and implicit rewards [2, B]."""
        lengths = self.lengths[:, rows]
        rounding = reward_rounding(self.settings, lengths, self.settings.dtype)
        if not has_reference_point(self.settings.loss):
            return pair_metrics(losses, rewards, rounding.sum(dim=0))
        present = lengths > 0
        limit = 2 * rounding[present].mean().item()
        return labelled_metrics(losses, rewards, present, limit)

    def evaluate(self, policy: Policy) -> tuple[Tensor, Tensor]:
        """Return the losses [n] and the implicit rewards [2, n] of all rows, in float64."""
        rows = np.arange(len(self.rows))
        logprobs = torch.from_numpy(response_logprobs(policy, self.rows))
        return self.losses(logprobs, rows, self.reference_point(policy, rows))

    def _of_epoch(self, logprobs: Tensor) -> Tensor:
        """Return those [A, n] of the current epoch of log-probabilities [E, A, n]."""
        return logprobs[min(self.epoch, len(logprobs) - 1)]
