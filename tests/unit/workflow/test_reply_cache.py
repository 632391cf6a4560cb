"""Replies in a folder that several processes share."""

import errno
import os

import pytest

from snakechat.workflow.reply_cache import Reply, ReplyCache

REQUEST = {"model": "lab/wise", "messages": [{"role": "user", "content": "é?"}]}
FIRST, SECOND = Reply("7", 10, 1), Reply("8", 0, 0)


def test_a_reply_is_found_again_and_the_first_one_counts(tmp_path):
    cache = ReplyCache(tmp_path / "replies")
    assert cache.find(REQUEST) is None
    assert cache.add(REQUEST, FIRST) == FIRST
    # Another process may ask the same at the same time: both go on with one reply.
    assert ReplyCache(tmp_path / "replies").add(REQUEST, SECOND) == FIRST
    assert cache.find({**REQUEST, "temperature": 0}) is None
    [file] = (path for path in tmp_path.rglob("*") if path.is_file())
    assert file.is_relative_to(cache.model_folder("lab/wise"))


@pytest.mark.parametrize("text", ["{", "[]", '{"text": "7"}'])
def test_a_damaged_reply_is_replaced(tmp_path, text):
    cache = ReplyCache(tmp_path)
    cache.add(REQUEST, FIRST)
    [file] = (path for path in tmp_path.rglob("*") if path.is_file())
    file.write_text(text)
    assert cache.find(REQUEST) is None
    assert cache.add(REQUEST, SECOND) == SECOND == cache.find(REQUEST)


def test_a_file_system_without_links_works(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EPERM, "no links")

    monkeypatch.setattr(os, "link", fail)
    cache = ReplyCache(tmp_path)
    assert cache.add(REQUEST, FIRST) == FIRST == cache.find(REQUEST)


def test_a_full_or_read_only_folder_is_one_warning(tmp_path, capsys):
    (tmp_path / "file").touch()
    cache = ReplyCache(tmp_path / "file")
    assert cache.add(REQUEST, FIRST) == FIRST
    assert cache.add(REQUEST, SECOND) == SECOND
    assert cache.find(REQUEST) is None
    assert capsys.readouterr().err.count("warning: replies are not stored in") == 1
