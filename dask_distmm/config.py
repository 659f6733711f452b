"""Options, read from ``dask.config`` once, on the client.

The configuration of a client does not reach the workers or the scheduler, so what a run needs of it
travels inside its Problem, as an `Options`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
from collections.abc import Callable, Mapping
from typing import Any

import dask.config
import yaml
from dask.utils import parse_bytes, parse_timedelta

from dask_distmm.errors import PlanError

__all__ = [
    "DEFAULTS",
    "DaskCosts",
    "Machine",
    "Options",
    "dask_costs",
    "parsed",
    "read_options",
    "register_defaults",
    "setting",
]

DEFAULTS: dict[str, Any] = yaml.safe_load(importlib.resources.files("dask_distmm").joinpath("distmm.yaml").read_text())


def register_defaults() -> None:
    """Add the shipped ``distmm.yaml`` to Dask's defaults; the user's settings win."""
    dask.config.update_defaults(DEFAULTS)


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """Measured constants of one engine on this kind of machine, for the cost model.

    Parameters
    ----------
    gflops
        10^9 operations per second and thread (of a CPU) or device, ``(type, rate)`` pairs; ``"other"`` for all
        others.
    bandwidth, memory_bandwidth
        Bytes per second: received by one worker; of a sum or copy in memory.
    latency
        Seconds per message.
    network_bandwidth
        Bytes per second received by one worker from another host; 0: as `bandwidth`.
    dask_bandwidth
        Bytes per second received over Dask's own connections, where the engine has quicker ones; 0: as `bandwidth`.
    exposed
        For each method the share of its own transfers that is not hidden behind the multiply, ``(method, share)``
        pairs; 1 for those not named.
    """

    gflops: tuple[tuple[str, float], ...]
    bandwidth: float
    memory_bandwidth: float
    latency: float
    network_bandwidth: float = 0.0
    dask_bandwidth: float = 0.0
    exposed: tuple[tuple[str, float], ...] = ()

    def rate(self, dtype: str) -> float:
        """Operations per second of one thread that computes in `dtype`."""
        rates = dict(self.gflops)
        return rates.get(dtype, rates["other"]) * 1e9


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """The configuration of a run. Times in seconds, sizes in bytes."""

    retries: int
    limit_fraction: float
    load_timeout: float
    vote_timeout: float
    transfer_timeout: float
    silence_timeout: float
    grace_timeout: float
    panel_bytes: int
    prefetch_panels: int
    pack_below: int
    max_groups: int
    keep_workspace_bytes: int
    allow_plaintext_nccl: bool
    buffer_bytes: int
    machines: tuple[tuple[str, Machine], ...]

    def machine(self, name: str) -> Machine:
        """Constants of the machine by their name in the config, which is that of an engine."""
        found = dict(self.machines)
        return found[name] if name in found else found["numpy"]


def read_options() -> Options:
    """Read and check the options from ``dask.config``.

    Raises
    ------
    PlanError
        A value has the wrong type or range; the message names its key.
    """
    # Each `@` asks for them, and they hardly ever change.
    return _read_options(repr(dask.config.get("distmm", None)))


@functools.lru_cache(maxsize=16)
def _read_options(config: str) -> Options:
    def number(key: str, low: float, high: float = float("inf")) -> float:
        value = setting(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise PlanError(f"config distmm.{key} is {value!r}; expected a number from {low} to {high}")
        return float(value)

    def truth(key: str) -> bool:
        value = setting(key)
        if not isinstance(value, bool):
            raise PlanError(f"config distmm.{key} is {value!r}; expected true or false")
        return value

    def machine(engine: str) -> Machine:
        gflops, exposed = setting(f"machine.{engine}.gflops"), setting(f"machine.{engine}.exposed") or {}
        if not isinstance(gflops, Mapping) or "other" not in gflops:
            raise PlanError(f"config distmm.machine.{engine}.gflops is {gflops!r}; expected a mapping with 'other'")
        if not isinstance(exposed, Mapping):
            raise PlanError(f"config distmm.machine.{engine}.exposed is {exposed!r}; expected a mapping")
        return Machine(
            gflops=tuple(sorted((str(name), number(f"machine.{engine}.gflops.{name}", 1e-9)) for name in gflops)),
            bandwidth=number(f"machine.{engine}.bandwidth", 1.0),
            memory_bandwidth=number(f"machine.{engine}.memory-bandwidth", 1.0),
            latency=number(f"machine.{engine}.latency", 0.0),
            network_bandwidth=number(f"machine.{engine}.network-bandwidth", 0.0),
            dask_bandwidth=number(f"machine.{engine}.dask-bandwidth", 0.0),
            exposed=tuple(sorted((str(n), number(f"machine.{engine}.exposed.{n}", 0.0)) for n in exposed)),
        )

    return Options(
        retries=int(number("retries", 0)),
        limit_fraction=number("memory.limit-fraction", 1e-9, 1.0),
        load_timeout=float(parsed("timeouts.load", parse_timedelta)),
        vote_timeout=float(parsed("timeouts.vote", parse_timedelta)),
        transfer_timeout=float(parsed("timeouts.transfer", parse_timedelta)),
        silence_timeout=float(parsed("timeouts.silence", parse_timedelta)),
        grace_timeout=float(parsed("timeouts.grace", parse_timedelta)),
        panel_bytes=int(parsed("numpy.panel-bytes", parse_bytes)),
        prefetch_panels=int(number("numpy.prefetch-panels", 1)),
        pack_below=int(number("numpy.pack-below", 0)),
        max_groups=int(number("cublasmp.max-groups", 1)),
        keep_workspace_bytes=int(parsed("cublasmp.keep-workspace", parse_bytes)),
        allow_plaintext_nccl=truth("allow-plaintext-nccl"),
        buffer_bytes=int(parsed("peer.buffer-bytes", parse_bytes)),
        machines=tuple((engine, machine(engine)) for engine in _default("machine")),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class DaskCosts:
    """The costs of Dask's own side of a run, in seconds.

    Parameters
    ----------
    run, chunk
        Around a run, from ``persist`` to all of D in memory; and for each chunk of A, B and D.
    start, task
        Of a graph of Dask's own tasks, and of each of these.
    """

    run: float
    chunk: float
    start: float
    task: float


def dask_costs() -> DaskCosts:
    """Read the costs of Dask's own side of a run.

    Raises
    ------
    PlanError
        A value can't be read; the message names its key.
    """
    return DaskCosts(*(float(parsed(f"dask.{field.name}", parse_timedelta)) for field in dataclasses.fields(DaskCosts)))


def parsed(key: str, parse: Callable[[Any], Any]) -> Any:
    """Return one option as `parse` reads it.

    Raises
    ------
    PlanError
        It can't be read; the message names its key.
    """
    value = setting(key)
    try:
        return parse(value)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise PlanError(f"config distmm.{key} is {value!r}; expected something like {_default(key)!r}") from error


def setting(key: str) -> Any:
    """Return one option: the user's, or the shipped default."""
    return dask.config.get(f"distmm.{key}", default=_default(key))


def _default(key: str) -> Any:
    value: Any = DEFAULTS["distmm"]
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value
