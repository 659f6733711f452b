"""A report as text."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from dask.utils import format_bytes

from dask_distmm.tools.doctor.differences import differing, short
from dask_distmm.tools.doctor.findings import HERE, Finding, Report

_WIDTH = 100
_TITLES = {
    "dask_distmm": "dask_distmm",
    "python": "Python",
    "cublasmp": "cuBLASMp",
    "cusolvermp": "cuSOLVERMp",
    "nccl": "NCCL",
    "nvmath": "nvmath-python",
    "cupy": "CuPy",
    "dask_cuda": "dask-cuda",
    "ucxx": "UCX (distributed-ucxx)",
    "rmm": "RMM",
    "numpy": "NumPy",
    "zarr": "Zarr",
}
_MARKS = {"error": "ERROR", "warning": "WARNING", "note": "note"}


def report_text(report: Report) -> str:
    """Return the text that ``dask distmm check`` prints."""
    parts = [_head(report), _worker_tables(report), _library_table(report), _verdict(report)]
    return "\n\n".join(part for part in parts if part)


def _head(report: Report) -> str:
    hosts = {facts["host"] for facts in report.answering.values()}
    count, places = len(report.workers), len(hosts)
    what = f"cluster {report.address}, {count} worker{'s' * (count != 1)} on {places} host{'s' * (places != 1)}"
    engine = report.engine
    share = f" on {len(report.able(engine))} of {count} workers" if engine and report.address else ""
    return "\n".join(
        [
            f"dask_distmm check: {what if report.address else HERE}",
            _wrapped("engine     ", f"{engine or 'none'}{share}: {report.reason}"),
        ]
    )


def _worker_tables(report: Report) -> str:
    """Return the workers' facts: a line for each worker, then a line for each fact that most have in common."""
    if not report.answering:
        return ""
    lines = []
    if report.address:
        rows = [["worker", "host", "threads", "memory limit", "protocol", "engines"]]
        for address, facts in report.answering.items():
            limit = format_bytes(facts["memory_limit"]) if facts["memory_limit"] else "none"
            threads = f"{facts['threads']} of {facts['cores']}"
            rows.append([address, facts["host"], threads, limit, facts["protocol"], _able(facts["engines"])])
        lines += [_table(rows), ""]
    described = {address: _described(facts, report) for address, facts in report.answering.items()}
    for title in next(iter(described.values())):
        found = differing({address: cells[title] for address, cells in described.items()})
        texts = [f"{value} ({short(who)})" if len(found) > 1 else value for value, who in found.items()]
        lines.append(_wrapped(f"{title:<11}", "; ".join(texts)))
    return "\n".join(lines)


def _described(facts: Mapping[str, Any], report: Report) -> dict[str, str]:
    """Return the facts of a worker or of this machine, by title."""
    cells = {"BLAS": _blas(facts["blas"]), "GPU": _gpu(facts)}
    if any("error" not in one["gpus"] for one in report.answering.values()):
        cells |= {"peers": _peers(facts), "RMM pool": _rmm(facts["rmm"])}
    if report.address:
        return cells
    here = {"cores": str(facts["cores"]), "memory": _sized(facts["memory"]), "engines": _able(facts["engines"])}
    return here | cells


def _able(engines: Mapping[str, Any]) -> str:
    """Return the names of the engines that can run."""
    names = [] if "error" in engines else [name for name, found in engines.items() if "error" not in found]
    return ", ".join(names) or "none"


def _sized(memory: Any) -> str:
    return format_bytes(memory) if isinstance(memory, int) else "unknown"


def _blas(pools: Any) -> str:
    if not isinstance(pools, list) or not pools:
        return "unknown"
    texts = [
        f"{pool['internal_api']} {pool['version'] or ''}".strip() + f", {pool['num_threads']} threads" for pool in pools
    ]
    return "; ".join(sorted(set(texts)))


def _gpu(facts: Mapping[str, Any]) -> str:
    gpus = facts["gpus"]
    if "error" in gpus:
        return "none"
    devices: Sequence[Mapping[str, Any]] = gpus["devices"]
    kinds = differing(
        {str(i): f"{device['name']} ({format_bytes(device['memory'])})" for i, device in enumerate(devices)}
    )
    names = ", ".join(f"{len(who)} x {kind}" for kind, who in kinds.items())
    return f"{names or 'none'}, driver {gpus['driver']}, CUDA {gpus['cuda']}"


def _peers(facts: Mapping[str, Any]) -> str:
    gpus = facts["gpus"]
    if "error" in gpus or len(gpus["devices"]) < 2:
        return "-"
    apart = gpus["without_peer_access"]
    if not isinstance(apart, list):
        return "unknown"
    return f"{len(apart)} pairs without access" if apart else "all reach each other"


def _rmm(rmm: Any) -> str:
    if not rmm:
        return "none"
    if "error" in rmm:
        return "unknown"
    size = f", {format_bytes(rmm['pool_bytes'])}" if rmm["pool_bytes"] else ""
    return f"{rmm['resource']}{size}" + (", used by CuPy" if rmm["used_by_cupy"] else "")


def _library_table(report: Report) -> str:
    """Return the versions: one line a library, one column for each of client, scheduler and workers."""
    columns: dict[str, Mapping[str, Any]] = {}
    if report.address:
        columns["client"] = {"this client": report.client}
        if report.scheduler is not None:
            columns["scheduler"] = {"the scheduler": report.scheduler}
    columns["workers" if report.address else "version"] = report.answering
    names = list(report.client["versions"])
    rows, missing = [["library", *columns]], []
    for name in sorted(names, key=lambda name: list(_TITLES).index(name) if name in _TITLES else len(_TITLES)):
        cells = [_version_cell(name, who) for who in columns.values()]
        if set(cells) == {"-"}:
            missing.append(_TITLES.get(name, name))
        else:
            rows.append([_TITLES.get(name, name), *cells])
    return _table(rows) + ("\n" + _wrapped("not installed: ", ", ".join(missing)) if missing else "")


def _version_cell(name: str, asked: Mapping[str, Mapping[str, Any]]) -> str:
    found = differing({who: facts["versions"].get(name) for who, facts in asked.items()})
    if len(found) > 1:
        return "; ".join(f"{version} ({short(who, 1)})" for version, who in found.items())
    return next((version for version in found if version != "none"), "-")


def _verdict(report: Report) -> str:
    findings = report.findings
    if not findings:
        return "All is well."
    text = "\n".join(_finding(found, report) for found in findings)
    return text if report.status else f"{text}\nAll is well."


def _finding(found: Finding, report: Report) -> str:
    where = "" if not found.where or not report.address else f"   ({short(found.where)})"
    lines = [_wrapped(f"{_MARKS[found.level]:<9}", found.text + where)]
    if found.remedy:
        lines.append(f"{'':9}mend: {found.remedy}")
    return "\n".join(lines)


def _wrapped(title: str, value: str) -> str:
    return textwrap.fill(
        value,
        _WIDTH,
        initial_indent=title,
        subsequent_indent=" " * len(title),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)
