"""Attempts to leave the limits of a job, run by scripts/confined.py; prints their outcomes as JSON.

    attempts.py FOLDER PORT PID

FOLDER has what FILES of tests/unit/workflow/test_hermetic.py lists. An attempt that raises nothing
counts as a success.
"""

# ruff: noqa: SIM115

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
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet
import tokenizers

folder, port, pid = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
OTHER = str(folder / "other/data.json")
ATTEMPTS = {}


def attempt(run):
    ATTEMPTS[run.__name__] = run
    return run


def libc(name, *arguments):
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    if function(*arguments) < 0:
        raise OSError(ctypes.get_errno(), name)


def folder_descriptor():
    return os.open(folder / "other", os.O_PATH)


# Readers.
@attempt
def read_by_open():
    open(OTHER).read()


@attempt
def read_by_a_descriptor_of_its_folder():
    os.read(os.open("data.json", os.O_RDONLY, dir_fd=folder_descriptor()), 9)


@attempt
def read_by_pyarrow_file():
    pyarrow.OSFile(OTHER).read()


@attempt
def read_by_pyarrow_json():
    pyarrow.json.read_json(OTHER)


@attempt
def read_by_pyarrow_csv():
    pyarrow.csv.read_csv(OTHER)


@attempt
def read_by_pyarrow_memory_map():
    pyarrow.memory_map(OTHER)


@attempt
def read_by_numpy_memmap():
    numpy.memmap(OTHER)


@attempt
def read_by_mmap():
    mmap.mmap(os.open(OTHER, os.O_RDONLY), 0, prot=mmap.PROT_READ)


@attempt
def read_by_tokenizers():
    tokenizers.Tokenizer.from_file(OTHER)


@attempt
def read_by_sqlite():
    sqlite3.connect(f"file:{folder}/other/data.db?mode=ro", uri=True).execute("select 1 from t")


@attempt
def read_by_a_subprocess():
    subprocess.run(["cat", OTHER], check=True, capture_output=True)


@attempt
def read_by_a_shell():
    if os.system(f"cat '{OTHER}' > /dev/null 2>&1"):
        raise OSError


@attempt
def read_by_libc():
    libc("open", OTHER.encode(), 0)


@attempt
def read_by_a_link():
    os.symlink(OTHER, folder / "result/link")
    open(folder / "result/link").read()


@attempt
def read_by_a_hard_link():
    os.link(OTHER, folder / "result/hard")
    open(folder / "result/hard").read()


@attempt
def read_by_proc():
    open(f"/proc/self/root{OTHER}").read()


@attempt
def read_by_copy():
    shutil.copyfile(OTHER, folder / "result/copy")


@attempt
def read_by_import():
    spec = importlib.util.spec_from_file_location("other", folder / "other/module.py")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


@attempt
def read_a_module_that_does_not_count():
    exec(open(folder / "sources/uncounted.py").read())


@attempt
def read_another_version():
    open(folder / "store/train/b/model").read()


@attempt
def read_the_file_of_the_build():
    open(folder / "build.json").read()


@attempt
def read_the_home_of_the_user():
    open(folder / "home/.netrc").read()


@attempt
def list_another_folder():
    os.listdir(folder / "other")


@attempt
def list_by_glob():
    assert [*(folder / "other").glob("*")]


@attempt
def read_the_environment_of_another_process():
    open(f"/proc/{pid}/environ").read()


@attempt
def read_the_memory_of_another_process():
    open(f"/proc/{pid}/mem", "rb").read(1)


@attempt
def read_an_open_file_of_another_process():
    open(f"/proc/{pid}/fd/0").read()


# Writers.
@attempt
def write_into_another_result():
    open(folder / "store/train/a/model", "a").write("x")


@attempt
def write_into_a_manifest():
    open(folder / "store/train/a/manifest.json", "w").write("{}")


@attempt
def write_into_the_sources():
    open(folder / "sources/counted.py", "a").write("x")


@attempt
def write_into_the_home_of_the_user():
    open(folder / "home/new", "w").write("x")


@attempt
def write_beside_the_result():
    open(folder / "store/train/new", "w").write("x")


@attempt
def delete_another_result():
    os.remove(folder / "store/train/a/model")


@attempt
def delete_a_folder():
    shutil.rmtree(folder / "store/train/a")


@attempt
def truncate_another_result():
    os.truncate(folder / "store/train/a/model", 0)


@attempt
def rename_over_another_result():
    open(folder / "result/new", "w").write("x")
    os.rename(folder / "result/new", folder / "store/train/a/model")


@attempt
def rename_another_result_here():
    os.rename(folder / "store/train/a/model", folder / "result/taken")


@attempt
def rename_its_own_folder():
    os.rename(folder / "result", folder / "store/train/c")


@attempt
def replace_a_link():
    os.symlink("elsewhere", folder / "result/link2")
    os.rename(folder / "result/link2", folder / "links/sft")


@attempt
def make_a_named_pipe():
    os.mkfifo(folder / "links/pipe")


@attempt
def make_a_device():
    os.mknod(folder / "result/device", 0o20600, os.makedev(1, 3))


# Network and other processes.
@attempt
def connect_by_tcp():
    socket.create_connection(("127.0.0.1", port), timeout=1)


@attempt
def connect_by_a_subprocess():
    code = f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@attempt
def bind_a_port():
    socket.create_server(("127.0.0.1", 8321)).close()


@attempt
def send_by_udp():
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", port))


@attempt
def send_by_udp_6():
    socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)


@attempt
def open_a_multipath_socket():
    socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)


@attempt
def open_a_raw_socket():
    socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)


@attempt
def open_a_packet_socket():
    socket.socket(socket.AF_PACKET, socket.SOCK_RAW)


@attempt
def open_a_virtual_socket():
    socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)


@attempt
def connect_by_a_unix_socket():
    socket.socket(socket.AF_UNIX).connect(str(folder / "socket"))


@attempt
def connect_by_an_abstract_socket():
    socket.socket(socket.AF_UNIX).connect(f"\0snakechat-{port}")


@attempt
def make_a_ring_of_calls():
    libc("syscall", 425, 1, ctypes.create_string_buffer(120))


@attempt
def signal_another_process():
    os.kill(pid, 0)


@attempt
def trace_another_process():
    libc("ptrace", 16, pid, 0, 0)


@attempt
def mount_a_file_system():
    libc("mount", b"none", str(folder).encode(), b"tmpfs", 0, None)


# What a job may do.
@attempt
def may_read_its_input():
    open(folder / "store/train/a/model").read()


@attempt
def may_read_a_module_that_counts():
    open(folder / "sources/counted.py").read()


@attempt
def may_list_the_sources():
    os.listdir(folder / "sources")


@attempt
def may_write_its_result():
    (folder / "result/folder").mkdir()
    (folder / "result/folder/file").write_text("x")
    os.rename(folder / "result/folder/file", folder / "result/file")
    os.remove(folder / "result/file")


@attempt
def may_start_threads_and_processes():
    subprocess.run(["true"], check=True)


@attempt
def may_use_a_pair_of_sockets():
    socket.socketpair()


@attempt
def may_listen_on_a_port_that_the_kernel_chooses():
    socket.create_server(("127.0.0.1", 0)).close()


@attempt
def may_learn_that_a_file_exists():
    assert os.stat(OTHER).st_size


outcomes = {}
for name, run in ATTEMPTS.items():
    try:
        run()
        outcomes[name] = ""
    except BaseException as error:
        outcomes[name] = f"{type(error).__name__}: {error}"
print(json.dumps(outcomes))
