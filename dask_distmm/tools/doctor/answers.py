"""What one worker, or one engine, has answered: parts of the facts, for the findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dask_distmm.installing import install_command
from dask_distmm.planning import ENGINES


def answer_about(facts: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a worker's answer about an engine."""
    engines: Mapping[str, Any] = facts["engines"]
    if "error" in engines:
        return engines
    found: Mapping[str, Any] = engines.get(name, {"error": f"its dask_distmm has no engine {name!r}"})
    return found


def has(engine: str | None, ability: str) -> bool:
    """Return whether an engine that this process knows has an ability; no other engine has any."""
    return bool(getattr(ENGINES.get(engine or ""), ability, False))


def apart(workers: Sequence[Mapping[str, Any]]) -> str:
    """Say why the GPUs of workers can't read each other's memory; empty if they can."""
    hosts = {str(facts["host"]) for facts in workers}
    if len(hosts) > 1:
        return f"its GPUs are on {len(hosts)} hosts"
    return "not all GPUs have peer access" if any(facts["gpus"].get("without_peer_access") for facts in workers) else ""


def install_line(facts: Mapping[str, Any]) -> str:
    """Return the command that installs the libraries for GPUs, for the CUDA of the driver."""
    driver = str(facts["gpus"].get("cuda", "13"))
    return install_command("cu12" if driver.startswith("12") else "cu13", elsewhere=True)


def device_of(facts: Mapping[str, Any]) -> str | None:
    """Return the UUID of the GPU that a worker computes on: the first that it sees. None if that is not known."""
    devices, visible = facts["gpus"]["devices"], facts["visible_devices"]
    first = "0" if visible is None else str(visible).split(",")[0].strip()
    if first.isdecimal():
        return str(devices[int(first)]["uuid"]) if int(first) < len(devices) else None
    return next((str(device["uuid"]) for device in devices if first and device["uuid"].startswith(first)), None)


def computes(engine: str, kind: str) -> bool:
    """Return whether an engine that this process knows runs computations of a kind."""
    return engine in ENGINES and kind in ENGINES[engine].computes
