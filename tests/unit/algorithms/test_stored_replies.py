"""Replies in a folder that several processes share."""

import errno
import os

import pytest

from snakechat.algorithms.chat_client import Reply, find_reply, store_reply

REQUEST = {"model": "lab/wise", "messages": [{"role": "user", "content": "é?"}]}
FIRST, SECOND = Reply("7", 10, 1), Reply("8", 0, 0)


def test_a_reply_is_found_again_and_the_first_one_counts(tmp_path):
    assert find_reply(tmp_path, REQUEST) is None
    assert store_reply(tmp_path, REQUEST, FIRST) == FIRST
    # Another process may ask the same at the same time: both go on with one reply.
    assert store_reply(tmp_path, REQUEST, SECOND) == FIRST
    assert find_reply(tmp_path, {**REQUEST, "temperature": 0}) is None
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 1


@pytest.mark.parametrize("text", ["{", "[]", '{"text": "7"}'])
def test_a_damaged_reply_is_replaced(tmp_path, text):
    store_reply(tmp_path, REQUEST, FIRST)
    [file] = (path for path in tmp_path.rglob("*") if path.is_file())
    file.write_text(text)
    assert find_reply(tmp_path, REQUEST) is None
    assert store_reply(tmp_path, REQUEST, SECOND) == SECOND == find_reply(tmp_path, REQUEST)


def test_a_file_system_without_links_works(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EPERM, "no links")

    monkeypatch.setattr(os, "link", fail)
    assert store_reply(tmp_path, REQUEST, FIRST) == FIRST == find_reply(tmp_path, REQUEST)


def test_a_full_or_read_only_folder_is_one_warning(tmp_path, capsys):
    file = tmp_path / "file"
    file.touch()
    assert store_reply(file, REQUEST, FIRST) == FIRST
    assert store_reply(file, REQUEST, SECOND) == SECOND
    assert find_reply(file, REQUEST) is None
    assert capsys.readouterr().err.count("warning: replies are not stored in") == 1
