"""Attempts to leave the limits of a job, run by scripts/confined.py; prints their outcomes as JSON.

    attempts.py FOLDER PORT PID

FOLDER has what FILES of tests/unit/workflow/test_hermetic.py lists. An attempt that raises nothing
counts as a success.
"""

# Attempts are texts, which use the modules.
# ruff: noqa: F401

import ctypes
import importlib.util
import json
import mmap
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy
import pyarrow
import pyarrow.json
import tokenizers

folder, port, pid = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
other = str(folder / "other/data.json")
CONNECT = f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)"


def libc(name, *arguments):
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    if function(*arguments) < 0:
        raise OSError(ctypes.get_errno(), name)


def run(*words):
    subprocess.run(words, check=True, capture_output=True)


def run_module(path):
    spec = importlib.util.spec_from_file_location("other", path)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def open_socket(family, kind="SOCK_STREAM", protocol=0):
    return socket.socket(getattr(socket, family), getattr(socket, kind), protocol)


def new(name):
    """Return the path of a new file in the result."""
    (folder / "result" / name).write_text("x")
    return folder / "result" / name


def link(target, name):
    """Return the path of a new link in the result."""
    os.symlink(target, folder / "result" / name)
    return folder / "result" / name


def write_a_result():
    (folder / "result/folder").mkdir()
    (folder / "result/folder/file").write_text("x")
    os.rename(folder / "result/folder/file", folder / "result/file")
    os.remove(folder / "result/file")


A, NAMES = folder / "store/train/a", globals()
DENIED = """
open(other).read()
os.open("data.json", os.O_RDONLY, dir_fd=os.open(folder / "other", os.O_PATH))
pyarrow.OSFile(other).read()
pyarrow.json.read_json(other)
numpy.memmap(other)
mmap.mmap(os.open(other, os.O_RDONLY), 0, prot=mmap.PROT_READ)
tokenizers.Tokenizer.from_file(other)
sqlite3.connect(f"file:{folder}/other/data.db?mode=ro", uri=True).execute("select 1 from t")
run("sh", "-c", f"cat '{other}'")
libc("open", other.encode(), 0)
open(link(other, "link")).read()
os.link(other, folder / "result/hard") or open(folder / "result/hard").read()
open(f"/proc/self/root{other}").read()
shutil.copyfile(other, folder / "result/copy")
run_module(folder / "other/module.py")
open(folder / "sources/uncounted.py").read()
open(folder / "store/train/b/model").read()
open(folder / "build.json").read()
open(folder / "home/.netrc").read()
os.listdir(folder / "other")
open(f"/proc/{pid}/environ").read()
open(f"/proc/{pid}/mem", "rb").read(1)
open(f"/proc/{pid}/fd/0").read()
open(A / "model", "a").write("x")
open(folder / "sources/counted.py", "a").write("x")
open(folder / "home/new", "w").write("x")
os.remove(A / "model")
os.truncate(A / "model", 0)
os.rename(new("new"), A / "model")
os.rename(folder / "result", folder / "store/train/c")
os.rename(link("elsewhere", "link2"), folder / "links/sft")
os.mkfifo(folder / "links/pipe")
os.mknod(folder / "result/device", 0o20600, os.makedev(1, 3))
socket.create_connection(("127.0.0.1", port), timeout=1)
run(sys.executable, "-c", CONNECT)
socket.create_server(("127.0.0.1", 8321)).close()
open_socket("AF_INET", "SOCK_DGRAM").sendto(b"x", ("127.0.0.1", port))
open_socket("AF_INET6", "SOCK_DGRAM")
open_socket("AF_INET", "SOCK_STREAM", 262)
open_socket("AF_INET", "SOCK_RAW", 1)
open_socket("AF_PACKET", "SOCK_RAW")
open_socket("AF_VSOCK", "SOCK_STREAM")
open_socket("AF_UNIX").connect(str(folder / "socket"))
open_socket("AF_UNIX").connect(f"\\0snakechat-{port}")
libc("syscall", 425, 1, ctypes.create_string_buffer(120))
os.kill(pid, 0)
libc("ptrace", 16, pid, 0, 0)
libc("mount", b"none", str(folder).encode(), b"tmpfs", 0, None)
"""
ALLOWED = """
open(A / "model").read()
open(folder / "sources/counted.py").read()
os.listdir(folder / "sources")
write_a_result()
run("true")
socket.socketpair()
socket.create_server(("127.0.0.1", 0)).close()
os.stat(other)
Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", os.environ["TMPDIR"]), "compiled").touch()
"""


def outcome(attempt):
    """Return the exception that an attempt raises; empty if it raises none."""
    try:
        eval(attempt, NAMES)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return ""


print(
    json.dumps(
        {
            kind: {attempt: outcome(attempt) for attempt in attempts.strip().splitlines()}
            for kind, attempts in (("denied", DENIED), ("allowed", ALLOWED))
        }
    )
)
