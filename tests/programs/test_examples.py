"""The examples: a client of inference servers, and a service of Docker Compose."""

import subprocess
import sys

import pytest
import yaml

from conftest import ROOT
from support import llm_endpoint


def ask(url, *options, **environment):
    """Run the client."""
    command = [sys.executable, ROOT / "examples/client.py", "mine", "Name a fruit.", "--url", url]
    return subprocess.run(
        [*command, *options], capture_output=True, text=True, env={"NO_PROXY": "*", **environment}
    )


def test_the_client_sends_a_conversation_and_prints_the_response():
    with llm_endpoint.serving() as endpoint:
        endpoint.replies = ["A plum 🍑."]
        process = ask(
            endpoint.url, "--system", "Be brief.", OPENAI_API_KEY="sk-1", LC_ALL="C.UTF-8"
        )
        [(path, headers, body)] = endpoint.requests
    assert process.stdout == "A plum 🍑.\n"
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == "Bearer sk-1"
    assert body["model"] == "mine"
    assert [turn["role"] for turn in body["messages"]] == ["system", "user"]


@pytest.mark.parametrize(
    "reply, message",
    [((404, {}, "no such model"), "status 404: no such model"), ((200, {}, "[]"), "did not send")],
)
def test_what_a_server_sends_instead_is_one_line(reply, message):
    with llm_endpoint.serving() as endpoint:
        endpoint.replies = [reply]
        process = ask(endpoint.url)
    assert process.returncode == 1
    assert message in process.stderr and process.stderr.count("\n") == 1


def test_the_service_has_the_model_read_only_and_a_local_port():
    services = yaml.safe_load((ROOT / "examples/compose.yaml").read_text())["services"]
    [service] = services.values()
    assert service["image"].rpartition(":")[2] != "latest"
    [volume], [port] = service["volumes"], service["ports"]
    assert volume.endswith(":/model:ro") and volume.startswith("${MODEL:?")
    assert port.startswith("127.0.0.1:")
    assert service["command"][0] == "/model"
    assert not {"privileged", "network_mode", "pid", "ipc"} & service.keys()
