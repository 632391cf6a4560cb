"""Variables by which libraries compute in another way."""

import os

from snakechat.workflow.placement import computing_variables, prepare_environment


def test_variables_of_a_shell_do_not_reach_a_job(monkeypatch):
    for name in ("MKL_CBWR", "GLIBC_TUNABLES", "ONEDNN_MAX_CPU_ISA", "PYTHONOPTIMIZE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HOME", "mine")
    monkeypatch.setenv("MKL_DYNAMIC", "TRUE")
    prepare_environment()
    assert not os.environ.keys() & {"MKL_CBWR", "GLIBC_TUNABLES", "ONEDNN_MAX_CPU_ISA"}
    assert "PYTHONOPTIMIZE" not in os.environ and os.environ["HOME"] == "mine"
    # As many threads as the placement has, whatever cores a machine has.
    assert os.environ["MKL_DYNAMIC"] == "FALSE"


def test_variables_of_networks_are_no_part_of_what_a_result_is_made_from():
    environment = {"NCCL_SOCKET_IFNAME": "eth1", "GLOO_SOCKET_IFNAME": "eth1", "MKL_CBWR": "AVX2"}
    assert computing_variables(environment) == {"MKL_CBWR": "AVX2"}
