"""Options, read from ``dask.config`` once, on the client.

The configuration of a client does not reach the workers or the scheduler, so what a run needs of it
travels inside its Problem, as an `Options`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import math
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import dask.config
import yaml
from dask.utils import parse_bytes, parse_timedelta

from dask_distmm._version import __version__
from dask_distmm.errors import PlanError, page, unknown_name

# The loader in C takes a tenth of the time.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
DEFAULTS: dict[str, Any] = yaml.load(
    importlib.resources.files("dask_distmm").joinpath("distmm.yaml").read_text(), _LOADER
)


def register_defaults() -> None:
    """Add the shipped ``distmm.yaml`` to Dask's defaults; the user's settings win."""
    dask.config.update_defaults(DEFAULTS)


def parsed(key: str, parse: Callable[[Any], Any]) -> Any:
    """Return one option as `parse` reads it."""
    value = setting(key)
    try:
        return parse(value)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise PlanError(f"config distmm.{key} is {value!r}; expected something like {_default(key)!r}") from error


def _expected(key: str, fits: Callable[[Any], bool], expected: str) -> Any:
    """Return one option, which has to fit; `expected` says how."""
    if not fits(value := setting(key)):
        raise PlanError(f"config distmm.{key} is {value!r}; expected {expected}")
    return value


def setting(key: str) -> Any:
    """Return one option: the user's, or the shipped default."""
    return dask.config.get(f"distmm.{key}", default=_default(key))


def _default(key: str) -> Any:
    value: Any = DEFAULTS["distmm"]
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """Measured constants of one engine on this kind of machine, for the cost model."""

    # 10^9 operations per second and thread (of a CPU) or device, ``(type, rate)`` pairs; ``"other"`` for all others.
    gflops: tuple[tuple[str, float], ...]
    # Bytes per second: received by one worker; of a sum or copy in memory.
    bandwidth: float
    memory_bandwidth: float
    # Seconds per message.
    latency: float
    # Bytes per second received by one worker from another host; 0: as `bandwidth`.
    network_bandwidth: float = 0.0
    # Bytes per second received over Dask's own connections, where the engine has faster ones; 0: as `bandwidth`.
    dask_bandwidth: float = 0.0
    # Bytes per second that one worker copies from host memory to its GPU; 0 where it has none.
    host_bandwidth: float = 0.0
    # For each method the share of its own transfers that is not hidden behind the multiply, ``(method, share)``
    # pairs; 1 for those not named.
    exposed: tuple[tuple[str, float], ...] = ()

    def rate(self, dtype: str) -> float:
        """Operations per second of one thread that computes in `dtype`."""
        rates = dict(self.gflops)
        return rates.get(dtype, rates["other"]) * 1e9


def _number(key: str, low: float, high: float = float("inf")) -> float:
    def fits(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high

    return float(_expected(key, fits, f"a number from {low} to {high}"))


def _truth(key: str) -> bool:
    return bool(_expected(key, lambda value: isinstance(value, bool), "true or false"))


def _machines(key: str) -> tuple[tuple[str, Machine], ...]:
    return tuple((engine, _machine(f"{key}.{engine}")) for engine in _default(key))


def _machine(key: str) -> Machine:
    gflops = _expected(
        f"{key}.gflops", lambda value: isinstance(value, Mapping) and "other" in value, "a mapping with 'other'"
    )
    exposed = _expected(f"{key}.exposed", lambda value: isinstance(value or {}, Mapping), "a mapping") or {}
    return Machine(
        gflops=tuple(sorted((str(name), _number(f"{key}.gflops.{name}", 1e-9)) for name in gflops)),
        **{name: _number(f"{key}.{name.replace('_', '-')}", least) for name, least in _LEAST.items()},
        exposed=tuple(sorted((str(n), _number(f"{key}.exposed.{n}", 0.0)) for n in exposed)),
    )


# The least values of constants of machines.
_LEAST = dict.fromkeys(("bandwidth", "memory_bandwidth"), 1.0)
_LEAST |= dict.fromkeys(("latency", "network_bandwidth", "dask_bandwidth", "host_bandwidth"), 0.0)


def _option(key: str, read: Callable[..., Any], *how: Any) -> Any:
    """Declare a field of `Options`: the key in the configuration, and how it is read and checked."""
    return dataclasses.field(metadata={"read": functools.partial(read, key, *how)})


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """The configuration of a run, and the package's version on the client. Times in seconds, sizes in bytes."""

    retries: int = _option("retries", _number, 0)
    limit_fraction: float = _option("memory.limit-fraction", _number, 1e-9, 1.0)
    load_timeout: float = _option("timeouts.load", parsed, parse_timedelta)
    vote_timeout: float = _option("timeouts.vote", parsed, parse_timedelta)
    transfer_timeout: float = _option("timeouts.transfer", parsed, parse_timedelta)
    silence_timeout: float = _option("timeouts.silence", parsed, parse_timedelta)
    grace_timeout: float = _option("timeouts.grace", parsed, parse_timedelta)
    panel_bytes: int = _option("numpy.panel-bytes", parsed, parse_bytes)
    prefetch_panels: int = _option("numpy.prefetch-panels", _number, 1)
    pack_below: int = _option("numpy.pack-below", _number, 0)
    cross_memory: bool = _option("numpy.cross-memory", _truth)
    max_groups: int = _option("cublasmp.max-groups", _number, 1)
    keep_workspace_bytes: int = _option("cublasmp.keep-workspace", parsed, parse_bytes)
    allow_plaintext_nccl: bool = _option("allow-plaintext-nccl", _truth)
    buffer_bytes: int = _option("peer.buffer-bytes", parsed, parse_bytes)
    machines: tuple[tuple[str, Machine], ...] = _option("machine", _machines)
    version: str = _option("", lambda _: __version__)

    def machine(self, name: str) -> Machine:
        """Constants of the machine by their name in the config, which is that of an engine."""
        machines = dict(self.machines)
        return machines[name] if name in machines else machines["numpy"]


def read_options() -> Options:
    """Read and check the options from ``dask.config``."""
    return _read_options(_state("distmm"))


def _state(*names: str) -> bytes:
    """Return a value that tells the state of some options: each `@` asks for them, and they hardly ever change."""
    settings = [dask.config.get(name, None) for name in names]
    try:
        return pickle.dumps(settings)  # in a tenth of the time in which their text is made
    except Exception:
        return repr(settings).encode()


@functools.lru_cache(maxsize=16)
def _read_options(state: bytes) -> Options:
    _check_keys(dask.config.get("distmm", {}), DEFAULTS["distmm"], "distmm")
    # Read elsewhere, checked here: a mistake in the configuration shows at the first product.
    minimum_flops(), enabled_setting(), hints_wanted(), regions_wanted()
    kinds: dict[Any, Any] = {"int": int, "float": float, "bool": bool, "str": str}
    every = dataclasses.fields(Options)
    return Options(**{field.name: kinds.get(field.type, tuple)(field.metadata["read"]()) for field in every})


@dataclasses.dataclass(frozen=True, slots=True)
class DaskCosts:
    """The costs of Dask's own side of a run, in seconds."""

    # Around a run, from ``persist`` to all of D in memory; and for each chunk of A, B and D.
    run: float
    chunk: float
    # Of a graph of Dask's own tasks, and of each of these.
    start: float
    task: float


def dask_costs() -> DaskCosts:
    """Read the costs of Dask's own side of a run."""
    return _dask_costs(_state("distmm.dask"))


@functools.lru_cache(maxsize=16)
def _dask_costs(state: bytes) -> DaskCosts:
    return DaskCosts(*(float(parsed(f"dask.{field.name}", parse_timedelta)) for field in dataclasses.fields(DaskCosts)))


def minimum_flops() -> float | None:
    """Return the least floating-point operations of a product that `@` takes under `enable`; None: as planned."""

    def fits(value: Any) -> bool:
        try:
            return value is None or (float(value) >= 0 and not isinstance(value, bool))
        except (TypeError, ValueError):
            return False

    value = _expected("minimum-flops", fits, "a number of at least 0, as 1e9, or null for the cost model's choice")
    return None if value is None else float(value)


def raises_beyond_memory() -> bool:
    """Whether what does not fit into memory is an error under ``enable()``, or left to Dask's own tasks."""
    exceeded = _expected("memory.exceeded", ("dask", "raise").__contains__, "'dask' or 'raise'")
    return bool(exceeded == "raise")


def hints_wanted() -> bool:
    """Whether the log says why `enable` has made no run of any product."""
    return _truth("hints")


def regions_wanted() -> bool:
    """Whether what is around products and routed functions in a graph may be one run under ``enable()``."""
    return _truth("regions")


def enabled_setting() -> bool | None:
    """Return whether products are routed here from the start (true), after `enable` (None), or never (false)."""
    value: bool | None = _expected(
        "enabled", lambda value: isinstance(value, bool | None), "true, false or null (only after enable())"
    )
    return value


# Below these the keys are names of engines, types and methods.
_FREE = ("gflops", "exposed")


def _check_keys(keys: Any, schema: Mapping[str, Any], path: str) -> None:
    """Refuse keys that nobody reads: a misspelt one would change nothing, and say nothing."""
    for key, value in keys.items() if isinstance(keys, Mapping) else ():
        name = str(key).replace("_", "-")
        if key not in schema and name not in schema:
            if path == "distmm.machine":
                continue
            raise PlanError(unknown_name(f"key of the config {path}:", key, schema, page("configuration")))
        inner = schema.get(key, schema.get(name))
        if isinstance(inner, Mapping) and name not in _FREE:
            _check_keys(value, inner, f"{path}.{name}")


@dataclasses.dataclass(frozen=True, slots=True)
class Budget:
    """The memory that a worker may hold while a product is made in waves, and what it holds anyway."""

    # Shares of the memory limit from which Dask spills: of results in memory, and of the process.
    managed: float
    process: float
    # Bytes of NumPy chunks and of CuPy chunks that one worker loads or makes in a second, for the estimate.
    read_bandwidth: float
    device_bandwidth: float = 1e11

    def rate(self, array: str) -> float:
        """Return the bytes of chunks, ``"numpy"`` or ``"cupy"``, that one worker loads or makes in a second."""
        return self.device_bandwidth if array == "cupy" else self.read_bandwidth

    def of(self, worker: Any) -> float:
        """Return the bytes that a worker (`planning.Worker`) may hold."""
        limit = worker.memory_limit
        return min(self.managed * limit, self.process * limit - worker.used) if limit else math.inf


def wave_budget() -> Budget | None:
    """Return the memory that waves may take; None if the configuration says that there are to be none.

    Dask's own thresholds are those of its configuration here.
    """
    return _wave_budget(_state("distmm.waves", "distmm.memory", "distributed.worker.memory"))


@functools.lru_cache(maxsize=16)
def _wave_budget(state: bytes) -> Budget | None:
    mode = _expected("waves.mode", ("auto", "off").__contains__, "'auto' or 'off'")
    rates = {key: float(parsed(f"waves.{key}", float)) for key in ("read-bandwidth", "device-bandwidth")}
    for key, rate in rates.items():
        if not rate > 0:
            raise PlanError(f"config distmm.waves.{key} is {rate!r}; expected a number above 0")
    most = float(setting("memory.limit-fraction"))
    # Without spilling a worker may hold what a run may.
    target, spill = (dask.config.get(f"distributed.worker.memory.{key}", None) or most for key in ("target", "spill"))
    return Budget(min(most, float(target)), min(most, float(spill)), *rates.values()) if mode == "auto" else None
