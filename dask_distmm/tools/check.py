"""``dask distmm check``: the engine that multiplies here or on a cluster, and the commands that fix what is wrong.

`facts` collects, on every worker, and imports nothing of this package: it is sent to workers that lack it. From the
facts come findings, of three weights: an *error* makes multiplies fail; a *warning* makes them slow, or can make them
fail; a *note* is worth knowing.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import cloudpickle
from dask.utils import format_bytes
from distributed import Client
from packaging.version import Version

from dask_distmm._version import TESTED_DASK
from dask_distmm.config import setting
from dask_distmm.installing import install_command
from dask_distmm.planning import ENGINES
from dask_distmm.tools import facts as questions
from dask_distmm.tools.local import connected

# The name of the only "worker" where no cluster was asked.
HERE = "this machine"
_LEVELS = ("note", "warning", "error")
# Dask's libraries speak with each other, and functions travel from one Python to another.
_SAME_EVERYWHERE = ("python", "dask", "distributed", "numpy")


_PROGRAM = "import json, sys; from dask_distmm.tools import facts; json.dump(facts.of_process(), sys.stdout)"
# Loading the libraries for GPUs takes seconds.
_SECONDS = 120


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


def examine(scheduler: str | None = None) -> Report:
    """Return the facts of this machine, or of every worker of a cluster."""
    client, wanted = {"versions": questions.versions()}, str(setting("engine"))
    if scheduler is None:
        return Report({HERE: _of_this_machine()}, client, None, "", wanted)
    with connected(scheduler, None, "check") as found:
        workers, answer = _of_cluster(found)
        return Report(workers, client, answer, scheduler, wanted)


def _of_this_machine() -> dict[str, Any]:
    """Ask a process of its own: a library that it loads may end it, and goes with it."""
    try:
        done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"a process that loads the engines' libraries did not end within {_SECONDS} s"}
    if done.returncode:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        return {"error": f"a process that loads the engines' libraries ended with status {done.returncode}: {last}"}
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _of_cluster(client: Client) -> tuple[dict[str, Mapping[str, Any]], Mapping[str, Any]]:
    """Ask all workers at the same time, and the scheduler. They need not have this package."""
    cloudpickle.register_pickle_by_value(questions)
    try:
        answers = client.run(questions.of_worker, on_error="return")
        scheduler: Mapping[str, Any] = client.run_on_scheduler(questions.of_scheduler)
    finally:
        cloudpickle.unregister_pickle_by_value(questions)
    workers = {
        address: answer if isinstance(answer, Mapping) else {"error": f"{type(answer).__name__}: {answer}"[:300]}
        for address, answer in answers.items()
    }
    return workers, scheduler


# Parts of the facts


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


def short(addresses: Sequence[str], most: int = 3) -> str:
    """Return some addresses as text, and how many more there are."""
    more = len(addresses) - most
    return ", ".join(addresses[:most]) + (f" and {more} more" if more > 0 else "")


def differing(values: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the workers that have each value, by value as text; the most common first."""
    found: dict[str, list[str]] = collections.defaultdict(list)
    for who, value in values.items():
        found["none" if value is None else str(value)].append(who)
    return dict(sorted(found.items(), key=lambda pair: -len(pair[1])))


# Findings


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was found."""

    # ``"error"``, ``"warning"`` or ``"note"``.
    level: str
    # The fault, and the state that is expected.
    text: str
    # The command that fixes it, or another remedy; empty where there is nothing to do.
    remedy: str = ""
    # Addresses of the workers that it is about; empty for all.
    where: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Report:
    """All facts, and the findings from them."""

    # For each address the facts of that worker, as `facts.of_worker` gives them; or ``{"error": reason}``.
    workers: Mapping[str, Mapping[str, Any]]
    # Facts of this process: its versions.
    client: Mapping[str, Any]
    # Facts of the scheduler; None where there is none.
    scheduler: Mapping[str, Any] | None
    # Of the scheduler; empty where there is none.
    address: str
    # The engine that is asked for, by the config ``distmm.engine``; ``"auto"`` for none.
    wanted: str

    @property
    def answering(self) -> dict[str, Mapping[str, Any]]:
        """The workers that could be asked."""
        return {address: facts for address, facts in self.workers.items() if "error" not in facts}

    def able(self, engine: str) -> list[str]:
        """Return the addresses of the workers that have an engine, and can use it together."""
        found = [address for address, facts in self.answering.items() if "error" not in answer_about(facts, engine)]
        return [] if has(engine, "reads_peers") and apart([self.answering[address] for address in found]) else found

    @property
    def engine(self) -> str | None:
        """The engine that would multiply NumPy arrays here; None if there is none."""
        asked = self.kinds["product"] if self.wanted == "auto" else (self.wanted,)
        return next((name for name in asked if self.able(name)), None)

    @property
    def kinds(self) -> dict[str, tuple[str, ...]]:
        """The engines of each kind of computation."""
        kinds = "product", "factorization"
        return {kind: tuple(name for name, one in ENGINES.items() if kind in one.computes) for kind in kinds}

    @property
    def reason(self) -> str:
        """Why it is this engine."""
        name = self.engine
        if name is None:
            return (
                "no worker has an engine" if self.wanted == "auto" else f"no worker has {self.wanted!r}, as asked for"
            )
        if self.wanted != "auto":
            return f"the configuration asks for it: distmm.engine is {self.wanted!r}"
        better = self.kinds["product"][: self.kinds["product"].index(name)]
        if not better:
            return "the first choice, and it can run"
        causes: dict[str, list[str]] = {}
        for other in better:
            cause = _why_not(self, other).removeprefix("EngineError: ").removeprefix(f"engine {other!r} ")
            causes.setdefault(cause.removeprefix("can't be imported: "), []).append(other)
        return "; ".join(f"{' and '.join(others)} can't run: {cause}" for cause, others in causes.items())

    @property
    def findings(self) -> list[Finding]:
        """All findings, the worst first."""
        return sorted(judge(self), key=lambda found: -_LEVELS.index(found.level))

    @property
    def status(self) -> int:
        """Exit status of the command: 2 with an error, 1 with a warning, else 0."""
        return max((_LEVELS.index(found.level) for found in self.findings), default=0)

    def to_json(self) -> dict[str, Any]:
        """As plain types."""
        return {
            "status": self.status,
            "engine": self.engine,
            "reason": self.reason,
            "findings": [dataclasses.asdict(found) for found in self.findings],
            "address": self.address,
            "client": dict(self.client),
            "scheduler": self.scheduler and dict(self.scheduler),
            "workers": {address: dict(facts) for address, facts in self.workers.items()},
        }


def judge(report: Report) -> Iterator[Finding]:
    """Yield all findings."""
    if not report.workers:
        yield Finding("error", "the cluster has no workers", f"dask worker {report.address} --preload dask_distmm")
        return
    for address, facts in report.workers.items():
        if "error" in facts:
            yield Finding("error", f"could not be asked: {facts['error']}", "look at its log", (address,))
    yield from _package(report)
    yield from _engines(report)
    yield from _factorizations(report)
    yield from _versions(report)
    yield from _tested(report)
    yield from _gpus(report)
    yield from _machines(report)


def _package(report: Report) -> Iterator[Finding]:
    """Yield findings unless dask_distmm is everywhere, in one version."""
    here = report.client["versions"]["dask_distmm"]
    install = install_command(elsewhere=True)
    missing = [a for a, facts in report.answering.items() if not facts["versions"]["dask_distmm"]]
    if missing:
        yield Finding(
            "error", "dask_distmm is not installed", f"{install}   # there, then start them again", tuple(missing)
        )
    others = {
        a: v for a, facts in report.answering.items() if (v := facts["versions"]["dask_distmm"]) not in (None, here)
    }
    for version, addresses in differing(others).items():
        yield Finding(
            "error", f"dask_distmm {version} is installed there, {here} here", f"{install}   # there", tuple(addresses)
        )
    if report.scheduler is None:
        return
    version = report.scheduler["versions"]["dask_distmm"]
    if version is None or version != here:
        found = f"has dask_distmm {version}, this client {here}" if version else "lacks dask_distmm"
        yield Finding("error", f"the scheduler {found}", f"{install}   # there, then start it again")
    elif isinstance(broken := report.scheduler.get("package"), Mapping):
        yield Finding("error", f"the scheduler can't import dask_distmm: {broken['error']}", f"{install}   # there")


def _engines(report: Report) -> Iterator[Finding]:
    """Yield findings unless the engine that multiplies is on all workers, with the same libraries."""
    for address, facts in report.answering.items():
        if facts["versions"]["dask_distmm"] and "error" in (found := facts["engines"]):
            text = f"dask_distmm can't be imported: {found['error']}"
            yield Finding(
                "error", text, f"{install_command(elsewhere=True)}   # there, then start it again", (address,)
            )
    name = report.engine
    if name is None:
        # Where all lack the package that has been said.
        if any("error" not in facts["engines"] for facts in report.answering.values()):
            why = "; ".join(f"{engine}: {_why_not(report, engine)}" for engine in report.kinds["product"])
            remedy = f"{install_command('cu13', elsewhere=True)}   # or cu12" if has(report.wanted, "on_gpus") else ""
            yield Finding("error", f"{report.reason}. {why}", remedy)
        return
    able = report.able(name)
    # Of those that lack the package or can't import it something else is said.
    without = [
        address
        for address, facts in report.answering.items()
        if address not in able and facts["versions"]["dask_distmm"] and "error" not in facts["engines"]
    ]
    if without:
        yield Finding(
            "warning",
            f"only {len(able)} of {len(report.answering)} workers have engine {name!r}, the others don't multiply: "
            f"{answer_about(report.answering[without[0]], name).get('error', 'it is missing')}",
            install_line(report.answering[without[0]]) if has(name, "on_gpus") else "",
            tuple(without),
        )
    versions = {address: sorted(answer_about(report.answering[address], name).items()) for address in able}
    found = differing({address: ", ".join(f"{k} {v}" for k, v in each) for address, each in versions.items()})
    if len(found) > 1:
        listed = "; ".join(f"{text or 'unknown'} on {short(who)}" for text, who in found.items())
        yield Finding(
            "error",
            f"workers have different libraries of engine {name!r}: {listed}",
            install_line(report.answering[able[0]]),
        )


def _factorizations(report: Report) -> Iterator[Finding]:
    """Yield a note where products run on GPUs, and factorizations can't."""
    names = [name for name in report.kinds["factorization"] if has(name, "on_gpus")]
    if has(report.engine, "on_gpus") and not any(map(report.able, names)):
        why = "; ".join(f"{name}: {_why_not(report, name)}" for name in names)
        remedy = install_line(next(iter(report.answering.values())))
        yield Finding("note", f"no engine factorizes matrices on these GPUs: {why}", remedy)


def _versions(report: Report) -> Iterator[Finding]:
    """Yield which libraries are not the same for client, scheduler and workers."""
    everybody = {"this client": report.client, **report.answering}
    if report.scheduler is not None:
        everybody["the scheduler"] = report.scheduler
    for name in _SAME_EVERYWHERE:
        versions = {who: facts["versions"].get(name) for who, facts in everybody.items()}
        if name == "numpy":  # the scheduler doesn't compute
            versions.pop("the scheduler", None)
        if name == "python":  # functions travel between releases that differ in the third number only
            versions = {who: version and ".".join(version.split(".")[:2]) for who, version in versions.items()}
        found = differing(versions)
        if len(found) > 1:
            common = next(iter(found))
            listed = "; ".join(f"{version} on {short(who)}" for version, who in found.items())
            remedy = "" if name == "python" else f'python -m pip install "{name}=={common}"   # on the others'
            yield Finding(
                "warning", f"versions of {name} differ: {listed}", remedy or f"use Python {common} everywhere"
            )


def _tested(report: Report) -> Iterator[Finding]:
    """Yield a note where Dask is newer than the versions that were tested."""
    newest = max(map(Version, TESTED_DASK))
    here = str(report.client["versions"].get("distributed") or newest)
    if Version(here) > newest:
        yield Finding(
            "note",
            f"distributed {here} is newer than those tested, {', '.join(TESTED_DASK)}; where it lacks something "
            "that is needed, multiplies say so and products under enable() are Dask's own",
        )


def _gpus(report: Report) -> Iterator[Finding]:
    """Yield findings unless GPUs are used, each by one worker, and reach each other."""
    owners: dict[str, list[str]] = collections.defaultdict(list)
    seen: set[tuple[str, str]] = set()
    for_gpus = [name for name in report.kinds["product"] if has(name, "on_gpus")]
    for address, facts in report.answering.items():
        gpus, host = facts["gpus"], str(facts["host"])
        if "error" in gpus:
            if facts["driver_loaded"] and (host, "nvml") not in seen:
                seen.add((host, "nvml"))
                text = f"{host} has an NVIDIA driver, but its GPUs can't be listed: {gpus['error']}"
                yield Finding("warning", text, "python -m pip install nvidia-ml-py", (address,))
            continue
        if not gpus["devices"]:
            continue
        refused = [found for name in for_gpus if (found := answer_about(facts, name).get("error"))]
        if not has(report.engine, "on_gpus") and len(refused) == len(for_gpus):
            if (host, "unused") not in seen:
                seen.add((host, "unused"))
                text = f"{host} has GPUs that are not used: {refused[-1]}"
                yield Finding("warning", text, install_line(facts), (address,))
            continue
        driver, built = int(str(gpus["cuda"]).partition(".")[0]), facts["cuda_major"]
        if built and driver < built and (host, "driver") not in seen:
            seen.add((host, "driver"))
            text = f"{host}: the driver {gpus['driver']} is for CUDA {gpus['cuda']}, the libraries are for CUDA {built}"
            yield Finding("error", text, install_line(facts), (address,))
        if (mine := device_of(facts)) is not None:
            owners[f"{host} {mine}"].append(address)
        without = gpus["without_peer_access"]
        if isinstance(without, list) and without and (host, "peers") not in seen:
            seen.add((host, "peers"))
            pairs = ", ".join(f"{i}-{j}" for i, j in without[:6]) + ", ..." * (len(without) > 6)
            text = (
                f"{host}: GPUs without peer access: {pairs}; what they exchange takes the way through the host's memory"
            )
            yield Finding("warning", text, "nvidia-smi topo -p2p r   # shows why", (address,))
        yield from _pool(address, facts)
        if report.address and not facts.get("nanny", True):
            text = "a GPU worker without a nanny stays gone after another rank has died in a collective call"
            yield Finding("warning", text, f"dask cuda worker {report.address} --preload dask_distmm", (address,))
    for device, addresses in owners.items():
        if len(addresses) > 1:
            text = f"{len(addresses)} workers share one GPU ({device}); a rank needs one of its own"
            remedy = f"dask cuda worker {report.address} --preload dask_distmm   # starts one worker a GPU"
            yield Finding("error", text, remedy, tuple(addresses))


def _pool(address: str, facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a finding for a pool of device memory that CuPy takes no memory from."""
    rmm = facts["rmm"]
    if rmm and "error" not in rmm and "Pool" in rmm["resource"] and not rmm["used_by_cupy"]:
        size = f" ({format_bytes(rmm['pool_bytes'])})" if rmm["pool_bytes"] else ""
        text = f"the RMM pool{size} is not used by CuPy: its memory is lost to multiplies"
        yield Finding("warning", text, "dask cuda worker ... --rmm-allocator-external-lib-list cupy", (address,))


def _machines(report: Report) -> Iterator[Finding]:
    """Yield findings unless threads and memory of the workers fit their machines."""
    on_cpus = report.engine is not None and not has(report.engine, "on_gpus")
    for address, facts in report.answering.items():
        if isinstance(facts["blas"], list) and not facts["blas"] and on_cpus:
            text = "no BLAS that threadpoolctl knows: the engine can't set its threads, NumPy may be slow"
            yield Finding("warning", text, "python -m pip install --force-reinstall numpy", (address,))
    if not report.address:
        return
    hosts: dict[str, list[str]] = collections.defaultdict(list)
    for address, facts in report.answering.items():
        hosts[facts["host"]].append(address)
    for host, addresses in hosts.items():
        workers = [report.answering[address] for address in addresses]
        threads, cores = _sum(worker["threads"] for worker in workers), max(worker["cores"] for worker in workers)
        if on_cpus and threads > cores:
            text = f"{host}: {threads} threads of {len(workers)} workers on {cores} cores; BLAS gets slower by that"
            fewer = max(1, cores // len(workers))
            remedy = f"dask worker {report.address} --nworkers {min(len(workers), cores)} --nthreads {fewer}"
            yield Finding("warning", text, remedy, tuple(addresses))
        limits = [worker["memory_limit"] for worker in workers]
        there = workers[0]["memory"]
        if isinstance(there, int) and all(limits) and _sum(limits) > 1.02 * there:
            text = f"{host}: the workers' memory limits add up to {format_bytes(_sum(limits))} of {format_bytes(there)}"
            remedy = f"dask worker {report.address} --nworkers {len(workers)} --memory-limit auto"
            yield Finding("warning", text, remedy, tuple(addresses))
        if on_cpus and not all(limits):
            unlimited = tuple(a for a in addresses if not report.answering[a]["memory_limit"])
            text = "no memory limit: a multiply that needs too much is not refused before it starts"
            yield Finding("note", text, f"dask worker {report.address} --memory-limit auto", unlimited)
    if report.scheduler is not None and not report.scheduler["plugin"]:
        yield Finding("note", "the plugin is not on the scheduler yet: the first multiply puts it in place")


def _why_not(report: Report, engine: str) -> str:
    # Workers that can't even import the package say nothing about an engine.
    asked = sorted(report.answering.values(), key=lambda facts: "error" in facts["engines"])
    reasons = [answer_about(facts, engine).get("error") for facts in asked]
    separate = apart([facts for facts, error in zip(asked, reasons, strict=True) if not error])
    return next((str(reason) for reason in reasons if reason), separate or "no worker could be asked")


def _sum(values: Iterable[Any]) -> int:
    return sum(int(value) for value in values)


# As text


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
        return "No problems found."
    text = "\n".join(_finding(found, report) for found in findings)
    return text if report.status else f"{text}\nNo problems found."


def _finding(found: Finding, report: Report) -> str:
    where = "" if not found.where or not report.address else f"   ({short(found.where)})"
    lines = [_wrapped(f"{_MARKS[found.level]:<9}", found.text + where)]
    if found.remedy:
        lines.append(f"{'':9}fix: {found.remedy}")
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
