"""measure.py where sections fail or take too long: the others run, within the budget."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from gpu import measure


def test_a_section_that_fails_costs_no_other_one(tmp_path, monkeypatch):
    out, now, started = tmp_path / "out.jsonl", [0.0], []

    def run(command, env, timeout, **options):
        name = command[3]
        started.append(name)
        assert env["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
        assert now[0] + timeout <= measure.BUDGET + 1
        now[0] += {"ppo": 100, "vllm": 100, "decoding": timeout, "grpo": timeout}.get(name, 60)
        if name in ("decoding", "grpo"):
            raise subprocess.TimeoutExpired(command, timeout)
        error = "Traceback\n[rank0]: RuntimeError: CUDA error: an illegal memory access\n"
        return SimpleNamespace(returncode=int(name == "sft"), stderr=error)

    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    names = {name: getattr(subprocess, name) for name in ("TimeoutExpired", "PIPE")}
    monkeypatch.setattr(measure, "subprocess", SimpleNamespace(run=run, **names))
    monkeypatch.setattr(measure, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(sys, "argv", ["measure.py", str(out)])
    with pytest.raises(SystemExit, match="failed: decoding, sft, grpo, trainers"):
        measure.main()
    assert started == ["versions", "decoding", "sft", "ppo", "grpo", "vllm"]
    lines = map(json.loads, out.read_text().splitlines())
    problems = {line["section"]: line["failed"] for line in lines}
    assert problems["trainers"] == "not run: the budget of 540 s is spent"
    assert problems["decoding"] == "took more than 90 s"
    assert problems["sft"] == "RuntimeError: CUDA error: an illegal memory access"
