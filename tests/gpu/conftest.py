"""Devices of the tests. make test-gpu selects those of a GPU; make test runs the others."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from conftest import ROOT

ON_GPU = pytest.mark.gpu
HERE = ROOT / "tests/gpu"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=ON_GPU)], scope="module")
def device(request):
    """The CPU, and the first GPU."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU: torch finds none")
    return torch.device(request.param)


@pytest.fixture(scope="session")
def emulated(tmp_path_factory):
    """A function that runs Python with the compiled cuda_guard.cpp and returns its output.

    Its arguments are those of Python, and a program of this folder is its name.
    """
    if not shutil.which("g++"):
        pytest.skip("needs g++, to compile cuda_guard.cpp")
    if torch.version.cuda:
        pytest.skip("needs a torch without CUDA, which has no guard of its own")
    # It imports setuptools.
    from torch.utils.cpp_extension import include_paths

    library = tmp_path_factory.mktemp("guard") / "libguard.so"
    libraries = f"{Path(torch.__file__).parent}/lib"
    command = ["g++", "-shared", "-fPIC", "-std=c++20", "-w", "cuda_guard.cpp"]
    command += [f"-I{path}" for path in include_paths()]
    command += [f"-L{libraries}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{libraries}"]
    subprocess.run([*command, "-o", str(library)], cwd=HERE, check=True)

    def run(*arguments, accelerator="cuda"):
        process = subprocess.run(
            [sys.executable, "-W", "ignore", *map(str, arguments)],
            cwd=HERE,
            env={
                **os.environ,
                "LD_PRELOAD": str(library),
                "DS_ACCELERATOR": accelerator,
                "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in ("tests", "scripts")),
            },
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert process.returncode == 0, process.stderr[-5000:]
        return process.stdout

    return run
