"""CUDA sources compiled for the CPU, so that the very kernels run without a GPU: stand-ins for CuPy's raw modules."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np

HEADER = Path(__file__).parent / "cuda_on_cpu.h"
KERNEL = re.compile(r'extern "C" __global__ void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)\(([^)]*)\)')
TYPES = {np.dtype(name): getattr(ctypes, f"c_{name}") for name in ("int32", "uint32", "int64", "uint64")}
TYPES |= {np.dtype(np.float64): ctypes.c_double, np.dtype(np.float32): ctypes.c_float}


def compiler():
    """Return the path of a C++ compiler, or None."""
    return shutil.which("g++")


# Constants of the sources that are smaller here.
CHANGED = {}


def plain(code):
    """Return the code without what only a GPU has: `cuda_on_cpu.h` has that."""
    for before, after in CHANGED.items():
        code = code.replace(before, after)
    return re.sub(r"__device__ __forceinline__ \w[\w ]* \w+\([^)]*\) \{[^}]*asm volatile[^}]*\}", "", code)


def wrappers(code):
    """Return for each kernel a function that runs all of its blocks."""
    found = []
    for name, parameters in KERNEL.findall(code):
        names = [one.replace("*", " ").split()[-1] for one in parameters.split(",")]
        found.append(
            f'extern "C" void run_{name}(unsigned grid, unsigned x, unsigned y, {parameters}) {{\n'
            f"  run_grid(dim3{{grid, 1, 1}}, dim3{{x, y, 1}}, [&] {{ {name}({', '.join(names)}); }});\n}}\n"
        )
    return "\n".join(found)


LOCK = threading.Lock()


def library(code):
    """Return the code as a library."""
    with LOCK:
        return build(plain(code))


@functools.cache
def build(code):
    """Compile the code, unless an earlier process has."""
    folder = Path(tempfile.gettempdir()) / f"cuda-on-cpu-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    text = f'#include "{HEADER}"\n{code}\n{wrappers(code)}'
    name = hashlib.sha256((text + HEADER.read_text()).encode()).hexdigest()[:24]
    built = folder / f"{name}.so"
    if not built.exists():
        source, made = folder / f"{name}-{os.getpid()}.cpp", folder / f"{name}-{os.getpid()}.so"
        source.write_text(text)
        options = ["-std=c++17", "-O2", "-fPIC", "-shared", "-w", "-U_FORTIFY_SOURCE", "-fno-strict-aliasing"]
        subprocess.run([compiler(), *options, source, "-o", made], check=True, timeout=300)
        made.rename(built)
    return ctypes.CDLL(str(built))


class RawModule:
    """A module of kernels."""

    def __init__(self, code):
        self.code = code

    def get_function(self, name):
        """Return a kernel, which runs at once when it is launched."""
        parameters = dict(KERNEL.findall(self.code))[name].split(",")
        function = getattr(library(self.code), f"run_{name}")
        function.restype = None

        def launch(grid, block, arguments):
            assert len(arguments) == len(parameters), f"{name} takes {len(parameters)} arguments, not {len(arguments)}"
            assert len(grid) == 1
            assert 0 < grid[0] < 2**31
            assert len(block) <= 2
            given = [argument(*pair) for pair in zip(parameters, arguments, strict=True)]
            launched = functools.partial(
                function, ctypes.c_uint(grid[0]), *(ctypes.c_uint(size) for size in (*block, 1)[:2]), *given
            )
            stream = sys.modules["cupy"].cuda.get_current_stream()
            if name in WAITING:
                # The thread that would raise the word may be this one.
                stream.queue.append(("wait", WAITING[name](arguments)))
                stream.add(launched)
                if WAITING[name] is Numbers:
                    # What arrays do after it is done at once.
                    stream.synchronize()
            elif stream.captured is None:
                launched()
            else:
                stream.captured.append(AtOnce(launched, arguments))

        return launch


class Words:
    """What a kernel waits for: one of some words in memory that is not zero."""

    def __init__(self, addresses):
        self.addresses = addresses

    @property
    def done(self):
        return any(ctypes.c_uint.from_address(int(address)).value for address in self.addresses)


class Numbers(Words):
    """What a kernel waits for: words that have come as far as one's own, or one that is not zero."""

    @property
    def done(self):
        own, others, over = self.addresses
        mine = ctypes.c_uint.from_address(int(own)).value
        theirs = [ctypes.c_uint.from_address(int(other)).value for other in others]
        return min(theirs) >= mine or bool(ctypes.c_uint.from_address(int(over)).value)


WAITING = {"wait_for_word": Words, "wait_for_words": Numbers}


class AtOnce:
    """A launch of a captured graph; like others of these kernels it is done as soon as the graph is launched."""

    def __init__(self, launched, arguments):
        self.launched, self.arguments = launched, arguments

    def __call__(self):
        self.launched()


SIZES = {"int": 4, "unsigned": 4, "long long": 8, "double": 8}


def argument(parameter, value):
    """Return an argument as C has it; its size must be that of the parameter."""
    if isinstance(value, np.ndarray):
        assert "*" in parameter, f"{parameter} is no array"
        return ctypes.c_void_p(value.__array_interface__["data"][0])
    kind = " ".join(parameter.split()[:-1])
    assert "*" not in parameter, f"{parameter} is an array"
    assert isinstance(value, np.generic), f"{parameter} is given as {type(value).__name__}"
    assert SIZES[kind] == value.dtype.itemsize, f"{parameter} is given as {value.dtype}"
    assert (kind == "double") == (value.dtype.kind == "f"), f"{parameter} is given as {value.dtype}"
    return TYPES[value.dtype](value.item())
