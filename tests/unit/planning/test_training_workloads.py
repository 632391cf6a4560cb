"""Workloads of trainings: the models in memory."""

import pytest

from snakechat.planning.compute_time import GPUS
from snakechat.planning.job_estimate import JobEstimate
from snakechat.planning.plan import Plan, PlannedJob
from snakechat.workflow.run_options import RunOptions
from support.configs import load
from support.specs import ONE_GPU

pytestmark = pytest.mark.usefixtures("opt_hub")


@pytest.mark.parametrize("lora_rank", [0, 128])
def test_a_teacher_is_in_memory_with_its_own_size(lora_rank):
    recipe = {"actor": "sft/1.3b", "lora_rank": lora_rank, "lora_alpha": 1}
    recipe |= {"algorithm": "distill", "teacher": "models/opt-6.7b"}
    config = load({"rlhf": {"recipes": {"mine": recipe}}})
    specs = {
        name: {
            "rule": "fetch_model",
            "inputs": {},
            "settings": {"hub": f"facebook/opt-{name}", "revision": "main"},
        }
        for name in ("1.3b", "6.7b")
    }
    tokens = {"datasets": [], "max_prompt_length": 256}
    specs["tokens"] = {"rule": "tokenize_rlhf", "inputs": {}, "settings": tokens}
    inputs = {"actor": "1.3b", "teacher": "6.7b", "tokens": "tokens"}
    specs["job"] = {"rule": "train_rlhf", "settings": config.program_settings("rlhf", "mine")}
    specs["job"]["inputs"] = {name: {"path": path} for name, path in inputs.items()}
    plan = {
        path: PlannedJob({"name": "a", "path": path, "files": {}, **spec}, ONE_GPU, RunOptions())
        for path, spec in specs.items()
    }
    workload = JobEstimate("job", Plan(plan, set(plan)), GPUS["h100"]).workload
    [actor], [teacher] = workload.trained, workload.frozen
    assert '"hidden_size": 2048' in actor.model.config
    assert '"hidden_size": 4096' in teacher.config
