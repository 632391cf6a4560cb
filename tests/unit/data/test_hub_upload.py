"""Uploads to a local server that implements the hub's protocol."""

import hashlib

import httpx2
import pytest
from huggingface_hub import ModelCard, constants

from snakechat.data.hub_upload import find_destination, is_hub_license, upload
from snakechat.workflow.errors import InputError
from support.hub import serving
from support.hub_uploads import USER, UploadHub

REPOSITORY = "lab/mine"
KEY = f"model/{REPOSITORY}"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """An empty hub, whose user has a token."""
    with serving(UploadHub) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        template = f"{hub.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        # The server has no Xet.
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
        yield hub


@pytest.fixture
def files(tmp_path):
    """The files of a model, by their names."""
    contents = {
        "README.md": "---\nlicense: mit\n---\n# Mine\n",
        "config.json": "{}",
        "manifest.json": '{"files": {"config.json": {}, "model.safetensors": {}}, "inputs": {},'
        ' "lineage": {}, "facts": {}, "spec": {"inputs": {}, "path": "output/sft/mine"}}',
        "model.safetensors": "weights" * 9999,
    }
    for name, text in contents.items():
        (tmp_path / name).write_text(text)
    return {name: tmp_path / name for name in contents}


def digests(files):
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}


def send(files, repository=REPOSITORY, public=False):
    """Upload files; return the destination and the address of the commit."""
    destination = find_destination(repository, public)
    return destination, upload(destination, files, digests(files), "Upload it")


def error_of(*arguments, **named):
    with pytest.raises(InputError) as raised:
        send(*arguments, **named)
    return str(raised.value)


def test_files_arrive_in_one_commit(hub, files):
    destination, address = send(files)
    assert (destination.commit, destination.is_private) == (None, True)
    assert hub.private == {REPOSITORY} and address.startswith(hub.endpoint)
    assert hub.commits[REPOSITORY] == ["initial commit", "Upload it"]
    arrived = hub.repositories[KEY]
    assert {name: arrived[name] for name in files} == {
        name: path.read_bytes() for name, path in files.items()
    }
    # The second upload of the same files sends none of them.
    puts = len([request for request in hub.requests if request.command == "PUT"])
    assert send(files)[0].commit is not None
    assert hub.commits[REPOSITORY] == ["initial commit", "Upload it"]
    assert len([request for request in hub.requests if request.command == "PUT"]) == puts == 1


def test_a_public_repository_is_created_on_request(hub, files):
    send(files, public=True)
    assert hub.private == set()
    assert send(files)[0].is_private is False
    hub.private = {REPOSITORY}
    assert error_of(files, public=True) == (
        f"{REPOSITORY} is private: omit --public, or change it on the Hub"
    )


def test_files_of_the_last_upload_are_removed_and_others_stay(hub, files):
    send(files)
    hub.repositories[KEY]["picture.png"] = b"mine"
    (files["config.json"].parent / "sharded.safetensors").write_text("weights")
    del files["model.safetensors"]
    files["sharded.safetensors"] = files["config.json"].parent / "sharded.safetensors"
    destination, _ = send(files)
    assert destination.obsolete(files) == ["model.safetensors"]
    names = {*files, ".gitattributes", "picture.png"}
    assert hub.repositories[KEY].keys() == names


def test_the_model_of_somebody_else_stays(hub, files):
    hub.repositories[KEY] = {"config.json": b"{}", "README.md": b"# Theirs"}
    assert error_of(files) == (
        f"{REPOSITORY} has a model that this program did not upload (config.json): name another"
        " repository"
    )


FAULTS = {
    "forbidden": "the token may not write to this repository: create one that may",
    "conflict": "the repository changed during the upload, so nothing was uploaded: try again",
    "damaged": "config.json arrived with other content: upload it again",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_commit_that_fails_changes_nothing(hub, files, fault):
    hub.fault = fault
    assert error_of(files) == f"{REPOSITORY}: {FAULTS[fault]}"
    if fault != "damaged":
        assert hub.repositories[KEY].keys() == {".gitattributes"}


def test_the_token_and_the_owner_are_checked_first(hub, files, monkeypatch):
    hub.user = USER | {"auth": {"accessToken": {"role": "read"}}}
    assert "may only read" in error_of(files)
    hub.user = None
    assert "the Hub does not accept the token" in error_of(files)
    hub.user = USER
    assert error_of(files, "other/mine") == (
        "other/mine: the token belongs to lab, who is neither other nor in such an organization:"
        " name one of lab, team"
    )
    assert hub.repositories == {}
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(files["config.json"]) + ".token")
    assert error_of(files).startswith("there is no token of the Hub: run hf auth login")


def test_a_card_that_the_hub_rejects_is_an_error_before_the_upload(hub, files):
    files["README.md"].write_text("---\nlicense: strange\n---\n")
    message = error_of(files)
    assert message.startswith(f"{REPOSITORY}: Invalid metadata in README.md. - ")
    assert "PUT" not in {request.command for request in hub.requests}


def test_an_unreachable_hub_is_one_line(hub, files, monkeypatch):
    monkeypatch.setattr("snakechat.data.hub.RETRY_WAITS", ())
    monkeypatch.setattr("snakechat.data.hub.FIRST_WAITS", ())

    def fail(*_, **__):
        raise httpx2.ConnectError("Connection refused")

    monkeypatch.setattr("snakechat.data.hub_upload.HfApi.whoami", fail)
    assert error_of(files) == f"{REPOSITORY}: Connection refused"


def test_licences_of_the_hub():
    assert is_hub_license("apache-2.0") and is_hub_license("llama3.2")
    assert not is_hub_license("opt-175b") and not is_hub_license("#")


def test_a_valid_card_passes_the_validation_of_the_library(hub):
    ModelCard("---\nlicense: mit\n---\n").validate()
    with pytest.raises(ValueError, match="license"):
        ModelCard("---\nlicense: strange\n---\n").validate()
