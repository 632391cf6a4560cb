"""The CUDA guard of emulated tensors, which a process loads before it imports torch."""

import ctypes
import sys


def load_guard(library):
    """Load the compiled cuda_guard.cpp.

    library: Path of the shared library that the fixture `guard` compiles.
    """
    assert "torch" not in sys.modules
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
