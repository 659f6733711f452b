"""LAPACK in place of cuBLAS and cuSOLVER, for factorizations over the stand-ins."""

from __future__ import annotations

import importlib
import sys

import devices
import numpy as np
from factoring import NarrowKernels


class DeviceKernels(NarrowKernels):
    """LAPACK in place of cuSOLVER: matrices are on the device, and what comes of calls is looked at in the end."""

    asynchronous, streams = True, (devices.Stream.null, devices.Stream.null)

    def empty(self, shape, dtype):
        return super().empty(shape, dtype).view(devices.ndarray)

    def getrf(self, a, *, pivoting=True):
        pivots = super().getrf(a, pivoting=pivoting)
        return pivots.view(devices.ndarray) if pivoting else None

    def potrf(self, a):
        return super().potrf(a).view(devices.ndarray)

    def geqrt(self, a):
        return super().geqrt(a).view(devices.ndarray)

    def triangle(self, a, *, lower, unit):
        return super().triangle(a, lower=lower, unit=unit).view(devices.ndarray)


class QueuedKernels(DeviceKernels):
    """The same where each call comes after all that is queued on the stream of the work, and is looked at then."""

    asynchronous = False

    def __init__(self, stream):
        self.streams, self.xp = (stream, stream), sys.modules["cupy"]
        merging = importlib.import_module("dask_distmm.engines.gpu.tridiagonal").DeviceMerging()
        vars(self).update(
            {name: getattr(merging, name) for name in ("tridiagonal_values", "secular", "rotate", "take", "add_sizes")}
        )

    def __getattribute__(self, name):
        found = super().__getattribute__(name)
        if callable(found) or name == "xp":
            self.streams[0].synchronize()
        return found

    def empty(self, shape, dtype):
        return devices.empty(shape, dtype, "F")

    def product(self, a, b, out=None, *, beta=0):
        found = np.asarray(a) @ np.asarray(b)
        if out is None:
            return found.view(devices.ndarray)
        out[...] = found + beta * out if beta else found
        return out

    def solve(self, a, b=None):
        found = np.linalg.inv(a) if b is None else np.linalg.solve(a, b)
        return found.view(devices.ndarray)
