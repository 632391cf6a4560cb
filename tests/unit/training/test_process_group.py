"""The process group of a job."""

from datetime import timedelta

import torch


def test_a_process_may_work_alone_for_hours(group):
    backend = torch.distributed.group.WORLD._get_backend(torch.device("cpu"))
    assert backend.options._timeout >= timedelta(hours=6)
