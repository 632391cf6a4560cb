"""The most probable tokens of a teacher at the target tokens of a split: computed, written, read.

SPLIT.tokens.npy (the smallest unsigned type that fits the vocabulary) and SPLIT.logprobs.npy
(float32, nats) are [N, k]: the target tokens of all rows, row by row.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from snakechat.modeling.acceleration import copy_to_device
from snakechat.modeling.batching import Examples, MicroBatch
from snakechat.modeling.divergences import TopLogprobs
from snakechat.modeling.forward import Policy, evaluation_batches
from snakechat.workflow.distributed import all_reduce_sum, rank
from snakechat.workflow.progress_lines import FIRST_LINE, ProgressLines

# Rows whose tokens are in memory at a time.
BLOCK_ROWS = 1024


class TeacherSplit:
    """A split with the most probable tokens of a teacher.

    Args:
        folder: Folder of the files.
        split: train or eval.
        examples: The rows of the split, with one response each.
        with_prompts: Whether target tokens include those of the prompt.
    """

    def __init__(self, folder: Path, split: str, examples: Examples, with_prompts: bool) -> None:
        self.paths = [folder / f"{split}.{name}.npy" for name in TopLogprobs._fields]
        self.examples, self.with_prompts = examples, with_prompts
        self.offsets = np.concatenate([[0], np.cumsum(examples.num_tokens(with_prompts))])

    def compute(self, teacher: Policy, k: int, vocab_size: int, micro_batch_tokens: int) -> None:
        """Compute and write the files. All processes compute it together, and the first writes.

        vocab_size: The size of the vocabulary that teacher and student share.
        """
        blocks = self._blocks(teacher, k, vocab_size, micro_batch_tokens)
        if rank() == 0:
            self._write(blocks, k, np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32))
        else:
            for _ in blocks:
                pass

    @torch.no_grad()
    def _blocks(
        self, teacher: Policy, k: int, vocab_size: int, micro_batch_tokens: int
    ) -> Iterator[TopLogprobs]:
        """Yield the target tokens of all rows, block by block."""
        num_rows, device = len(self.examples), next(teacher.parameters()).device
        progress = ProgressLines("teacher", "rows", num_rows, next_line=FIRST_LINE)
        for start in range(0, num_rows, BLOCK_ROWS):
            rows = np.arange(start, min(start + BLOCK_ROWS, num_rows))
            first, end = self.offsets[start], self.offsets[rows[-1] + 1]
            block = TopLogprobs(
                torch.zeros(end - first, k, dtype=torch.int64), torch.zeros(end - first, k)
            )
            for micro_batch in self.examples.micro_batches(
                rows, micro_batch_tokens, teacher.supports_packing, device, self.with_prompts
            ):
                found = teacher(micro_batch.batch, top_k=k, vocab_size=vocab_size)
                if micro_batch.counted:
                    places = torch.from_numpy(self._targets(micro_batch.rows) - first)
                    for values, new in zip(block, found, strict=True):
                        values[places] = new.cpu()
            yield TopLogprobs(*map(all_reduce_sum, block))
            if rank() == 0:
                progress.update(int(rows[-1]) + 1)

    def _write(self, blocks: Iterable[TopLogprobs], k: int, token_type: np.dtype) -> None:
        types = token_type, np.dtype(np.float32)
        with self.paths[0].open("wb") as tokens, self.paths[1].open("wb") as logprobs:
            files = tokens, logprobs
            for file, dtype in zip(files, types, strict=True):
                shape = int(self.offsets[-1]), k
                header = {"descr": dtype.str, "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(file, header)
            for block in blocks:
                for file, dtype, values in zip(files, types, block, strict=True):
                    # Not ndarray.tofile: see ragged_arrays.save_array.
                    file.write(values.numpy().astype(dtype).data)

    def _targets(self, rows: Iterable[int]) -> np.ndarray:
        """Return the numbers of the target tokens of rows, in their order."""
        return np.concatenate([np.arange(*self.offsets[row : row + 2]) for row in rows])

    @cached_property
    def _arrays(self) -> list[np.ndarray]:
        return [np.load(path, mmap_mode="r", allow_pickle=False) for path in self.paths]

    def sum_of_divergences(
        self, student: Callable[..., torch.Tensor], micro_batch: MicroBatch
    ) -> torch.Tensor:
        """Return the sum of a student's divergences, in nats, at the targets of a micro-batch.

        student: A Policy, or the engine that trains it.
        """
        targets, device = self._targets(micro_batch.rows), micro_batch.batch.target_index.device
        tokens, logprobs = (torch.from_numpy(values[targets]) for values in self._arrays)
        top = TopLogprobs(copy_to_device(tokens.long(), device), copy_to_device(logprobs, device))
        return student(micro_batch.batch, teacher=top)

    @torch.no_grad()
    def mean_divergence(self, student: Policy, micro_batch_tokens: int) -> float:
        """Return a student's mean divergence, in nats per target token of the split."""
        total = torch.zeros((), dtype=torch.float64)
        for micro_batch in evaluation_batches(
            student, self.examples, micro_batch_tokens, self.with_prompts
        ):
            divergences = self.sum_of_divergences(student, micro_batch)
            total += micro_batch.counted * divergences.double().cpu()
        return all_reduce_sum(total).item() / int(self.offsets[-1])
