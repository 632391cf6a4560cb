"""Devices of the tests. make test-gpu selects those of a GPU; make test runs the others."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

ON_GPU = pytest.mark.gpu


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=ON_GPU)], scope="module")
def device(request):
    """The CPU, and the first GPU."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU: torch finds none")
    return torch.device(request.param)


@pytest.fixture(scope="session")
def guard(tmp_path_factory):
    """The compiled cuda_guard.cpp, which a process loads before torch."""
    if not shutil.which("g++"):
        pytest.skip("needs g++, to compile cuda_guard.cpp")
    if torch.version.cuda:
        pytest.skip("needs a torch without CUDA, which has no guard of its own")
    # It imports setuptools.
    from torch.utils.cpp_extension import include_paths

    library = tmp_path_factory.mktemp("guard") / "libguard.so"
    libraries = f"{Path(torch.__file__).parent}/lib"
    source = str(Path(__file__).with_name("cuda_guard.cpp"))
    command = ["g++", "-shared", "-fPIC", "-std=c++20", "-w", source]
    command += [f"-I{path}" for path in include_paths()]
    command += [f"-L{libraries}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{libraries}"]
    subprocess.run([*command, "-o", str(library)], check=True)
    return library
