"""Files of object stores: their versions, names and errors, with fsspec's file system in memory."""

import sys

import fsspec
import pytest

from snakechat.data.remote_files import SCHEMES, Scheme, downloaded, list_files, url_problem
from snakechat.workflow.errors import InputError

URL = "memory://bucket/pairs"


@pytest.fixture
def pairs(monkeypatch):
    """A store with the scheme memory, in which `created` stands for a digest."""
    monkeypatch.setitem(SCHEMES, "memory", Scheme("fsspec", ("created",), {}))
    store = fsspec.filesystem("memory")
    store.pipe({f"/bucket/pairs/{name}": name.encode() for name in ("a.json", "b/c.json")})
    store.pipe("/bucket/pairs-of-others/d.json", b"")
    yield store
    store.store.clear()


def test_planned_files_and_the_card_are_downloaded_and_deleted_again(pairs, tmp_path):
    pairs.pipe("/bucket/pairs/README.md", b"# Card")
    planned = {"b/c.json": list_files(URL)["b/c.json"]}
    with downloaded(URL, planned, tmp_path) as folder:
        found = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        assert found == {folder / "README.md": b"# Card", folder / "b/c.json": b"b/c.json"}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("url", [URL, f"{URL}/", f"{URL}/a.json"])
def test_an_error_about_a_downloaded_file_names_its_url(pairs, tmp_path, url):
    planned = {"a.json": list_files(url)["a.json"]}
    with (
        pytest.raises(InputError, match=rf"^{URL}/a\.json: row 1$"),
        downloaded(url, planned, tmp_path) as folder,
    ):
        raise InputError(f"{folder / 'a.json'}: row 1")


@pytest.mark.parametrize("changes_later", [False, True])
def test_a_file_that_changes_before_or_during_the_download_is_an_error(
    pairs, tmp_path, monkeypatch, changes_later
):
    planned = list_files(URL)
    get_file = type(pairs).get_file

    def get_and_replace(store, path, target):
        get_file(store, path, target)
        pairs.pipe("/bucket/pairs/a.json", b"other")

    if changes_later:
        monkeypatch.setattr(type(pairs), "get_file", get_and_replace)
    else:
        pairs.pipe("/bucket/pairs/a.json", b"other")
    with (
        pytest.raises(InputError, match=rf"^{URL}/a\.json changed since"),
        downloaded(URL, planned, tmp_path),
    ):
        pass


@pytest.mark.parametrize("name", ["b/../../evil", "b//c", "a\nb"])
def test_a_name_that_is_not_one_of_a_local_file_is_rejected(pairs, monkeypatch, name):
    found = {f"/bucket/pairs/{name}": {"size": 1, "created": 1}}
    monkeypatch.setattr(type(pairs), "find", lambda *_, **__: found)
    with pytest.raises(InputError, match=rf"^{URL}: '.*' cannot be the name of a local file"):
        list_files(URL)


def test_an_error_of_the_store_is_one_line_without_a_password(pairs, monkeypatch):
    def find(*_, **__):
        raise RuntimeError("no answer of\nhttp://me:secret@host/bucket")

    monkeypatch.setattr(type(pairs), "find", find)
    with pytest.raises(InputError, match=rf"^{URL}: no answer of http://host/bucket: check"):
        list_files(URL)


def test_a_missing_library_is_named_with_its_version(monkeypatch):
    # An import of a module that is None fails.
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(InputError) as error:
        list_files("s3://bucket/pairs")
    assert str(error.value) == (
        f"s3://bucket/pairs needs s3fs: pip install s3fs=={fsspec.__version__}"
    )


@pytest.mark.parametrize(
    "url",
    [
        "s3://user:secret@bucket/pairs",
        "s3://bucket/pairs?token=secret",
        "simplecache::s3://bucket/secret",
        "file:///secret",
        "s3://bucket/secret\n",
    ],
)
def test_other_urls_are_rejected_without_showing_them(url):
    problem = url_problem(url)
    assert "one of s3://, gs:// and" in problem and "secret" not in problem
