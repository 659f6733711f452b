"""Hosts of a test's own: network namespaces on one machine, joined by a bridge, with a Dask process in each.

Needs root and iproute2; `why_not` says what is missing.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

__all__ = ["Hosts", "why_not"]

_numbers = itertools.count()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=120)


@functools.cache
def why_not() -> str:
    """Return why there can't be namespaces here; empty if there can."""
    if shutil.which("ip") is None:
        return "needs the command ip (iproute2)"
    name = f"dmm{os.getpid()}probe"
    try:
        _ip("netns", "add", name)
        _ip("link", "add", f"{name[:12]}b", "type", "bridge")
    except subprocess.CalledProcessError as error:
        return f"needs network namespaces, which root may make: {error.stderr.decode().strip()}"
    finally:
        for undo in (("netns", "del", name), ("link", "del", f"{name[:12]}b")):
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip(*undo)
    return ""


class Hosts:
    """Namespaces with one interface each, all on one bridge that this process is on too. Use as a context manager.

    Parameters
    ----------
    count
        How many.
    folder
        For what the processes print.
    """

    def __init__(self, count: int, folder: pathlib.Path) -> None:
        number = next(_numbers)
        self._tag = f"dm{os.getpid() % 100000}{number}"
        self._net = f"10.{83 + number % 100}.{os.getpid() % 250}"
        self._folder = folder
        self._stack = contextlib.ExitStack()
        self.addresses = [f"{self._net}.{10 + i}" for i in range(count)]
        self.here = f"{self._net}.1"

    def __enter__(self) -> Hosts:
        bridge = f"{self._tag}b"
        with contextlib.ExitStack() as stack:
            self._make(stack, ["link", "add", bridge, "type", "bridge"], ["link", "del", bridge])
            _ip("addr", "add", f"{self.here}/24", "dev", bridge)
            _ip("link", "set", bridge, "up")
            for i, address in enumerate(self.addresses):
                name, inside, outside = self._name(i), f"{self._tag}i{i}", f"{self._tag}o{i}"
                self._make(stack, ["netns", "add", name], ["netns", "del", name])
                _ip("link", "add", outside, "type", "veth", "peer", "name", inside)
                _ip("link", "set", inside, "netns", name)
                _ip("link", "set", outside, "master", bridge)
                _ip("link", "set", outside, "up")
                _ip("-n", name, "addr", "add", f"{address}/24", "dev", inside)
                for device in ("lo", inside):
                    _ip("-n", name, "link", "set", device, "up")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _make(self, stack: contextlib.ExitStack, do: Sequence[str], undo: Sequence[str]) -> None:
        _ip(*do)
        stack.callback(subprocess.run, ["ip", *undo], check=False, capture_output=True, timeout=120)

    def _name(self, host: int) -> str:
        return f"{self._tag}n{host}"

    def start(self, host: int | None, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
        """Start ``python -m dask ...`` on a host (None: here); it ends with the hosts."""
        command = [sys.executable, "-m", "dask", *arguments]
        if host is not None:
            command = ["ip", "netns", "exec", self._name(host), *command]
        log = (self._folder / f"{arguments[0]}-{host}-{time.monotonic_ns()}.log").open("wb")
        self._stack.callback(log.close)
        env = os.environ | environment
        process = subprocess.Popen(command, cwd=self._folder, stdout=log, stderr=log, env=env, start_new_session=True)
        self._stack.callback(self._end, process)
        return process

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=60)
        # A nanny that was killed leaves its worker behind.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait(timeout=60)

    @contextlib.contextmanager
    def cut(self, *pairs: tuple[int, int | None]) -> Iterator[None]:
        """Lose all packets between hosts (None: here) for a while: they look for each other where nobody is."""
        nobody = "02:00:00:00:de:ad"
        changed = []
        for pair in pairs:
            for host, other in (pair, pair[::-1]):
                address = self.here if other is None else self.addresses[other]
                where = ["ip"] if host is None else ["ip", "-n", self._name(host)]
                device = f"{self._tag}b" if host is None else f"{self._tag}i{host}"
                changed.append((where, address, device))
        for where, address, device in changed:
            subprocess.run(
                [*where, "neigh", "replace", address, "lladdr", nobody, "dev", device, "nud", "permanent"],
                check=True, timeout=120,
            )  # fmt: skip
        try:
            yield
        finally:
            for where, address, device in changed:
                subprocess.run([*where, "neigh", "del", address, "dev", device], check=False, timeout=120)
