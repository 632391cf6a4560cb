"""Digests: what changes them, and what does not."""

import hashlib
import modulefinder
import os
import threading
import time
from pathlib import Path

import pytest

from rlhf import digests
from rlhf.digests import (
    DigestCache,
    canonical_json,
    code_digests,
    digest,
    file_digest,
    requirements_digest,
    source_digest,
    write_atomically,
)

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"

SOURCE = '''"""A module."""

import math

LIMIT = 3


class Circle:
    """A circle."""

    def area(self, radius, scale=1.0):
        """Its area."""
        # Pi times the square.
        square = radius * radius
        area = math.pi * square
        return area * scale


async def wait(seconds=2):
    """Wait."""
    return "waited", seconds
'''


def test_canonical_json_is_one_text_for_each_value():
    assert canonical_json({"b": [1, 2.5, None], "a": True}) == '{"a":true,"b":[1,2.5,null]}'


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (1, 1.0),
        ({"a": [1, {"b": 2.0}]}, {"a": [1.0, {"b": 2}]}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (1e-5, 0.00001),
        (1e3, 1000),
    ],
)
def test_the_same_value_has_one_digest_however_it_is_written(first, second):
    assert digest(first) == digest(second)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"a": 1, "b": 2}, {"a": 2, "b": 1}),
        ([1, 2], [2, 1]),
        ([[1], 2], [1, [2]]),
        (1, "1"),
        (1, 1.0000001),
        (1, True),
        (0, None),
        (0, False),
        ("", None),
        ({}, []),
        ({"a": None}, {}),
        ("a", "A"),
    ],
)
def test_other_values_have_other_digests(first, second):
    assert digest(first) != digest(second)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_json_does_not_have_are_refused(value):
    with pytest.raises(ValueError, match="JSON"):
        digest({"a": [value]})


def test_a_digest_is_sha256_of_the_canonical_text():
    assert digest({"b": 1.0, "a": "x"}) == hashlib.sha256(b'{"a":"x","b":1}').hexdigest()


def test_file_digest_is_sha256_of_the_bytes(tmp_path):
    path = tmp_path / "file"
    # More than one chunk of reading.
    content = bytes(range(256)) * 8193
    path.write_bytes(content)
    assert file_digest(path) == hashlib.sha256(content).hexdigest()


@pytest.fixture
def digest_of(tmp_path):
    def source(text):
        path = tmp_path / "module.py"
        path.write_text(text)
        return source_digest(path)

    return source


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# Pi times the square.", "# Another comment."),
        ("        # Pi times the square.\n", ""),
        ('"""A module."""', '"""Another module."""'),
        ('"""A module."""\n', ""),
        ('"""A circle."""', '"""No square."""'),
        ('    """A circle."""\n\n', ""),
        ('        """Its area."""\n', ""),
        ('    """Wait."""\n', ""),
        ("radius * radius", "(radius\n            * radius)  # wrapped"),
        ("LIMIT = 3\n\n\n", "LIMIT = 3\n"),
        ("scale=1.0", "scale = 1.0"),
        ('"waited"', "'waited'"),
    ],
)
def test_comments_docstrings_and_layout_do_not_count(digest_of, old, new):
    assert SOURCE.count(old) >= 1
    assert digest_of(SOURCE.replace(old, new)) == digest_of(SOURCE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("radius * radius", "radius + radius"),
        ("LIMIT = 3", "LIMIT = 4"),
        ("LIMIT = 3", "LIMIT = 3.0"),
        ("LIMIT = 3", "LIMIT = '3'"),
        ("LIMIT = 3", "LIMIT = None"),
        ("LIMIT = 3", "LIMIT = 3\nOTHER = 4"),
        ("LIMIT = 3\n", ""),
        ("LIMIT", "BOUND"),
        ("scale=1.0", "scale=2.0"),
        ("scale=1.0", "scale=1"),
        ("scale=1.0", "*, scale=1.0"),
        ("scale=1.0", "scale"),
        ("square = radius", "area = radius"),
        ("import math", "import cmath as math"),
        ('"waited", seconds', 'seconds, "waited"'),
        ('"waited"', '"Waited"'),
        ("async def", "def"),
        ("return area * scale", "return -area * scale"),
        ("return area * scale", "area * scale"),
        ("class Circle:", "class Circle(object):"),
        (
            "        square = radius * radius\n        area = math.pi * square\n",
            "        area = math.pi * square\n        square = radius * radius\n",
        ),
    ],
)
def test_every_real_change_counts(digest_of, old, new):
    assert SOURCE.count(old) >= 1
    assert digest_of(SOURCE.replace(old, new)) != digest_of(SOURCE)


@pytest.mark.parametrize(
    ("old", "new"),
    [("1", "True"), ("0", "False"), ("0", "None"), ("''", "None"), ("[]", "None"), ("0", "-0.0")],
)
def test_constants_that_are_equal_or_empty_are_told_apart(digest_of, old, new):
    assert digest_of(f"x = {old}\n") != digest_of(f"x = {new}\n")


def test_a_string_that_is_no_docstring_counts(digest_of):
    assert digest_of('x = "a"\n') != digest_of('x = "b"\n')
    assert digest_of('def f():\n    return "a"\n') != digest_of('def f():\n    return "b"\n')


@pytest.fixture
def scripts(tmp_path):
    """A program that uses a and, through it, b; b and c use each other; d stands beside them."""
    (tmp_path / "rlhf").mkdir()
    modules = {
        "program.py": "import json\n\nfrom rlhf.a import one\n",
        "rlhf/a.py": "import numpy\n\n\ndef one():\n    from rlhf.b import two\n    return two\n",
        "rlhf/b.py": "from rlhf.c import three\n\ntwo = 2\n",
        "rlhf/c.py": "from rlhf.b import two\n\nthree = 3\n",
        "rlhf/d.py": "from rlhf.a import one\n",
        "other.py": "from rlhf.d import one\n",
    }
    for name, text in modules.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_code_is_the_program_and_what_it_imports_and_nothing_else(scripts):
    found = code_digests(scripts / "program.py")
    assert sorted(found) == ["program.py", "rlhf/a.py", "rlhf/b.py", "rlhf/c.py"]
    assert all(found[name] == source_digest(scripts / name) for name in found)


def test_a_change_of_an_imported_module_changes_its_digest_alone(scripts):
    before = code_digests(scripts / "program.py")
    (scripts / "rlhf/c.py").write_text("three = 4\n")
    after = code_digests(scripts / "program.py")
    assert [name for name in before if before[name] != after[name]] == ["rlhf/c.py"]


@pytest.mark.parametrize(
    "line",
    [
        "from rlhf.a import one",
        "from rlhf.a import one as first, one as second",
        "from rlhf import a",
        "from rlhf import a as other",
        "import rlhf.a",
        "import json, rlhf.a as other",
        "def late():\n    from rlhf import a\n",
    ],
)
def test_imports_of_every_form_are_followed(scripts, line):
    (scripts / "program.py").write_text(f"{line}\n")
    found = code_digests(scripts / "program.py")
    assert sorted(found) == ["program.py", "rlhf/a.py", "rlhf/b.py", "rlhf/c.py"]


@pytest.mark.parametrize("line", ["from . import d", "from .d import one"])
def test_imports_from_the_same_package_are_followed(scripts, line):
    (scripts / "rlhf/c.py").write_text(f"{line}\n\nthree = 3\n")
    assert "rlhf/d.py" in code_digests(scripts / "program.py")


@pytest.mark.parametrize("line", ["import json", "from os import path", "import rlhfother.a"])
def test_imports_of_others_are_not(scripts, line):
    (scripts / "program.py").write_text(f"{line}\n")
    assert sorted(code_digests(scripts / "program.py")) == ["program.py"]


@pytest.mark.parametrize("program", sorted(path.name for path in SCRIPTS.glob("*.py")))
def test_all_our_modules_that_a_program_loads_are_in_its_code(program):
    # Python's own finder of imports, which sees every form of them.
    finder = modulefinder.ModuleFinder(path=[str(SCRIPTS)])
    finder.run_script(str(SCRIPTS / program))
    loaded = {name.replace(".", "/") + ".py" for name in finder.modules if "rlhf." in name}
    assert set(code_digests(SCRIPTS / program)) == {program, *loaded}


def requirements(folder, text):
    path = folder / "requirements.txt"
    path.write_text(text)
    return requirements_digest(path)


@pytest.mark.parametrize(
    "text",
    [
        "numpy==2.4.6\ntorch==2.13.0\n",
        "torch==2.13.0\nnumpy==2.4.6",
        "# The pins.\ntorch==2.13.0  # why\n\nnumpy==2.4.6\n",
        "Torch==2.13.0\n  numpy==2.4.6  \n",
    ],
)
def test_order_case_and_comments_of_requirements_do_not_count(tmp_path, text):
    expected = requirements(tmp_path, "torch==2.13.0\nnumpy==2.4.6\n")
    assert requirements(tmp_path, text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "torch==2.13.1\nnumpy==2.4.6\n",
        "torch==2.13.0\n",
        "torch==2.13.0\nnumpy==2.4.6\npeft==0.21.2\n",
        "torch==2.13.0\n# numpy==2.4.6\n",
        "torch==2.4.6\nnumpy==2.13.0\n",
    ],
)
def test_a_changed_pin_counts(tmp_path, text):
    expected = requirements(tmp_path, "torch==2.13.0\nnumpy==2.4.6\n")
    assert requirements(tmp_path, text) != expected


@pytest.fixture
def cache_path(tmp_path):
    return tmp_path / "cache" / "digests.json"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(b"first")
    return path


def edit_in_place(path, content):
    """Write without a new file, and give the old time of change back."""
    before = path.stat()
    # Some file systems count times in ticks of the kernel's clock: an edit in the same one is not
    # to be seen by anybody.
    time.sleep(0.03)
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_mtime_ns, after.st_size, after.st_ino) == (
        before.st_mtime_ns,
        before.st_size,
        before.st_ino,
    )


def test_the_cache_gives_the_digest_of_the_content(cache_path, file):
    assert DigestCache(cache_path)[file] == hashlib.sha256(b"first").hexdigest()


def test_the_cache_notices_an_edit_in_place_with_its_time_restored(cache_path, file):
    cache = DigestCache(cache_path)
    first = cache[file]
    edit_in_place(file, b"other")
    assert cache[file] == hashlib.sha256(b"other").hexdigest() != first


def test_a_cache_read_again_notices_the_edit_too(cache_path, file):
    DigestCache(cache_path)[file]
    edit_in_place(file, b"other")
    assert DigestCache(cache_path)[file] == hashlib.sha256(b"other").hexdigest()


def test_a_touched_or_rewritten_file_keeps_its_digest(cache_path, file):
    cache = DigestCache(cache_path)
    first = cache[file]
    os.utime(file, (1, 1))
    assert cache[file] == first
    file.unlink()
    file.write_bytes(b"first")
    assert cache[file] == first


def test_a_known_file_is_not_read_again(cache_path, file, monkeypatch):
    first = DigestCache(cache_path)[file]

    def fail(path):
        raise AssertionError(f"{path} was read again")

    monkeypatch.setattr(digests, "file_digest", fail)
    assert DigestCache(cache_path)[file] == first


def test_a_link_has_the_digest_of_what_it_points_to_now(cache_path, file, tmp_path):
    cache = DigestCache(cache_path)
    link = tmp_path / "link"
    link.symlink_to(file)
    assert cache[link] == hashlib.sha256(b"first").hexdigest()
    (tmp_path / "elsewhere").write_bytes(b"other")
    link.unlink()
    link.symlink_to(tmp_path / "elsewhere")
    assert cache[link] == hashlib.sha256(b"other").hexdigest()


def test_the_cache_refuses_a_file_that_is_gone(cache_path, file):
    cache = DigestCache(cache_path)
    assert cache[file]
    file.unlink()
    with pytest.raises(FileNotFoundError):
        cache[file]


def test_an_atomic_write_makes_folders_and_leaves_the_file_alone_in_them(tmp_path):
    path = tmp_path / "a" / "b" / "file.json"
    write_atomically(path, "one")
    write_atomically(path, "two")
    assert path.read_text() == "two"
    assert [found.name for found in path.parent.iterdir()] == ["file.json"]


def test_a_failed_write_leaves_the_old_text(tmp_path):
    path = tmp_path / "file.json"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "new \ud800")
    assert path.read_text() == "old"


def test_a_reader_never_sees_a_part(tmp_path):
    path = tmp_path / "file.json"
    texts = ["a" * 200_000, "b" * 200_000]
    write_atomically(path, texts[0])
    done = threading.Event()

    def write():
        for number in range(200):
            write_atomically(path, texts[number % 2])
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = set()
    while not done.is_set():
        seen.add(path.read_text())
    writer.join()
    assert seen <= set(texts)
