"""``dask distmm check``: the engine that multiplies here or on a cluster, and the commands that fix what is wrong.

`facts` collects, on every worker, and imports nothing of this package: it is sent to workers that lack it. From the
facts come findings, of three weights: an *error* makes multiplies fail; a *warning* makes them slow, or can make them
fail; a *note* is worth knowing.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import cloudpickle
from dask.utils import format_bytes
from distributed import Client
from packaging.version import Version

from dask_distmm._version import TESTED_DASK
from dask_distmm.compat import install_command
from dask_distmm.config import setting
from dask_distmm.planning import ENGINES
from dask_distmm.tools import facts as questions
from dask_distmm.tools.local import connected

# The name of the only "worker" where no cluster was asked.
HERE = "this machine"
_LEVELS = ("note", "warning", "error")
# Dask's libraries speak with each other, and functions travel from one Python to another.
_SAME_EVERYWHERE = ("python", "dask", "distributed", "numpy")
_KINDS = {
    kind: tuple(name for name, x in ENGINES.items() if kind in x.computes) for kind in ("product", "factorization")
}

# Loading the libraries for GPUs takes seconds.
_SECONDS = 120


_WIDTH = 100

_MARKS = {"error": "ERROR", "warning": "WARNING", "note": "note"}

# What one process, or one library in it, has said.
Facts = Mapping[str, Any]


def examine(scheduler: str | None = None) -> Report:
    """Return the facts of this machine, or of every worker of a cluster."""
    client, wanted = {"versions": questions.versions()}, str(setting("engine"))
    if scheduler is None:
        return Report({HERE: _of_this_machine()}, client, None, "", wanted)
    with connected(scheduler, None, "check") as connection:
        workers, answer = _of_cluster(connection)
        return Report(workers, client, answer, scheduler, wanted)


def _of_this_machine() -> dict[str, Any]:
    """Ask a process of its own: a library that it loads may end it, and goes with it."""
    process = "a process that loads the engines' libraries"
    try:
        done = subprocess.run(
            [sys.executable, "-m", questions.__name__], capture_output=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"{process} did not end within {_SECONDS} s"}
    if done.returncode:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        return {"error": f"{process} ended with status {done.returncode}: {last}"}
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


def _of_cluster(client: Client) -> tuple[dict[str, Facts], Facts]:
    """Ask all workers at the same time, and the scheduler. They need not have this package."""
    cloudpickle.register_pickle_by_value(questions)
    try:
        answers = client.run(questions.of_worker, on_error="return")
        scheduler: Facts = client.run_on_scheduler(questions.of_scheduler)
    finally:
        cloudpickle.unregister_pickle_by_value(questions)
    workers = {
        address: answer if isinstance(answer, Mapping) else {"error": f"{type(answer).__name__}: {answer}"[:300]}
        for address, answer in answers.items()
    }
    return workers, scheduler


# Parts of the facts


def answer_about(facts: Facts, name: str) -> Facts:
    """Return a worker's answer about an engine."""
    engines: Facts = facts["engines"]
    return engines if "error" in engines else engines.get(name, {"error": f"its dask_distmm has no engine {name!r}"})


def has(engine: str | None, ability: str) -> bool:
    """Return whether an engine that this process knows has an ability; no other engine has any."""
    return bool(getattr(ENGINES.get(engine or ""), ability, False))


def apart(workers: Sequence[Facts]) -> str:
    """Say why the GPUs of workers can't read each other's memory; empty if they can."""
    hosts = {str(facts["host"]) for facts in workers}
    if len(hosts) > 1:
        return f"its GPUs are on {len(hosts)} hosts"
    return "not all GPUs have peer access" if any(facts["gpus"].get("without_peer_access") for facts in workers) else ""


def install_line(facts: Facts) -> str:
    """Return the command that installs the libraries for GPUs, for the CUDA of the driver."""
    driver = str(facts["gpus"].get("cuda", "13"))
    return install_command("cu12" if driver.startswith("12") else "cu13", elsewhere=True)


def device_of(facts: Facts) -> str | None:
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
    groups: dict[str, list[str]] = collections.defaultdict(list)
    for who, value in values.items():
        groups["none" if value is None else str(value)].append(who)
    return dict(sorted(groups.items(), key=lambda pair: -len(pair[1])))


def _listed(groups: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{value or 'unknown'} on {short(who)}" for value, who in groups.items())


def _shared(values: Mapping[str, Any], most: int = 3) -> str:
    """Return the value that all workers have, or each value with the workers that have it."""
    groups = differing(values)
    return "; ".join(f"{value} ({short(who, most)})" if len(groups) > 1 else value for value, who in groups.items())


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
    workers: Mapping[str, Facts]
    # Facts of this process: its versions.
    client: Facts
    # Facts of the scheduler; None where there is none.
    scheduler: Facts | None
    # Of the scheduler; empty where there is none.
    address: str
    # The engine that is asked for, by the config ``distmm.engine``; ``"auto"`` for none.
    wanted: str

    @property
    def answering(self) -> dict[str, Facts]:
        """The workers that could be asked."""
        return {address: facts for address, facts in self.workers.items() if "error" not in facts}

    def able(self, engine: str) -> list[str]:
        """Return the addresses of the workers that have an engine, and can use it together."""
        able = [address for address, facts in self.answering.items() if "error" not in answer_about(facts, engine)]
        return [] if has(engine, "reads_peers") and apart([self.answering[address] for address in able]) else able

    def why_not(self, engine: str) -> str:
        """Return why an engine can't run."""
        # Workers that can't even import the package say nothing about an engine.
        answers = sorted(self.answering.values(), key=lambda facts: "error" in facts["engines"])
        reasons = [answer_about(facts, engine).get("error") for facts in answers]
        separate = apart([facts for facts, error in zip(answers, reasons, strict=True) if not error])
        return next((str(reason) for reason in reasons if reason), separate or "no worker could be asked")

    @property
    def engine(self) -> str | None:
        """The engine that would multiply NumPy arrays here; None if there is none."""
        names = _KINDS["product"] if self.wanted == "auto" else (self.wanted,)
        return next((name for name in names if self.able(name)), None)

    @property
    def reason(self) -> str:
        """Why it is this engine."""
        name, named = self.engine, self.wanted != "auto"
        if name is None:
            return f"no worker has {self.wanted!r}, as asked for" if named else "no worker has an engine"
        if named:
            return f"the configuration asks for it: distmm.engine is {self.wanted!r}"
        causes: dict[str, list[str]] = {}
        for engine in _KINDS["product"][: _KINDS["product"].index(name)]:
            cause = self.why_not(engine).removeprefix("EngineError: ").removeprefix(f"engine {engine!r} ")
            causes.setdefault(cause.removeprefix("can't be imported: "), []).append(engine)
        texts = [f"{' and '.join(engines)} can't run: {cause}" for cause, engines in causes.items()]
        return "; ".join(texts) or "the first choice, and it can run"

    @property
    def findings(self) -> list[Finding]:
        """All findings, the worst first; what is found of several workers is one."""
        merged = collections.defaultdict[tuple[str, str, str], list[str]](list)
        for finding in judge(self):
            merged[finding.level, finding.text, finding.remedy] += finding.where
        return sorted((Finding(*key, tuple(x)) for key, x in merged.items()), key=lambda f: -_LEVELS.index(f.level))

    @property
    def status(self) -> int:
        """Exit status of the command: 2 with an error, 1 with a warning, else 0."""
        return max((_LEVELS.index(finding.level) for finding in self.findings), default=0)

    def to_json(self) -> dict[str, Any]:
        """As plain types."""
        names = "status", "engine", "reason", "findings", "address", "client", "scheduler", "workers"
        fields = {name: getattr(self, name) for name in names}
        return fields | {"findings": [dataclasses.asdict(finding) for finding in self.findings]}


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
    yield from _versions(report)
    yield from _gpus(report)
    yield from _machines(report)


def _package(report: Report) -> Iterator[Finding]:
    """Yield findings unless dask_distmm is everywhere, in one version, and can be imported."""
    here, install = report.client["versions"]["dask_distmm"], install_command(elsewhere=True)
    for address, facts in report.answering.items():
        version = facts["versions"]["dask_distmm"]
        if not version:
            yield Finding(
                "error", "dask_distmm is not installed", f"{install}   # there, then start them again", (address,)
            )
        elif version != here:
            text = f"dask_distmm {version} is imported there, from {facts['folder']}, {here} here"
            yield Finding("error", text, f"{install}   # there", (address,))
        if version and "error" in (broken := facts["engines"]):
            text = f"dask_distmm can't be imported: {broken['error']}"
            yield Finding("error", text, f"{install}   # there, then start it again", (address,))
    if report.scheduler is None:
        return
    version, package = report.scheduler["versions"]["dask_distmm"], report.scheduler.get("package")
    if version != here:
        source = report.scheduler["folder"]
        state = f"has dask_distmm {version}, from {source}, this client {here}" if version else "lacks dask_distmm"
        yield Finding("error", f"the scheduler {state}", f"{install}   # there, then start it again")
    elif isinstance(package, Mapping):
        yield Finding("error", f"the scheduler can't import dask_distmm: {package['error']}", f"{install}   # there")


def _engines(report: Report) -> Iterator[Finding]:
    """Yield findings unless the engine that multiplies is on all workers, with the same libraries."""
    name, answering = report.engine, report.answering
    # Of those that lack the package or can't import it something else is said.
    answers = {address: facts for address, facts in answering.items() if "error" not in facts["engines"]}
    if name is None:
        if answers:
            why = "; ".join(f"{x}: {report.why_not(x)}" for x in _KINDS["product"])
            remedy = f"{install_command('cu13', elsewhere=True)}   # or cu12" if has(report.wanted, "on_gpus") else ""
            yield Finding("error", f"{report.reason}. {why}", remedy)
        return
    able, on_gpus = report.able(name), has(name, "on_gpus")
    for address, facts in answers.items():
        if address not in able:
            text = f"only {len(able)} of {len(answering)} workers have engine {name!r}, the others don't multiply: "
            text += str(answer_about(facts, name).get("error", "it is missing"))
            yield Finding("warning", text, install_line(facts) if on_gpus else "", (address,))
    versions = {address: sorted(answer_about(answering[address], name).items()) for address in able}
    groups = differing({address: ", ".join(f"{k} {v}" for k, v in each) for address, each in versions.items()})
    if len(groups) > 1:
        text = f"workers have different libraries of engine {name!r}: {_listed(groups)}"
        yield Finding("error", text, install_line(answering[able[0]]) if on_gpus else install_command(elsewhere=True))
    names = [x for x in _KINDS["factorization"] if has(x, "on_gpus")]
    if on_gpus and not any(map(report.able, names)):
        why = "; ".join(f"{x}: {report.why_not(x)}" for x in names)
        remedy = install_line(next(iter(answering.values())))
        yield Finding("note", f"no engine factorizes matrices on these GPUs: {why}", remedy)


def _versions(report: Report) -> Iterator[Finding]:
    """Yield which libraries are not the same for client, scheduler and workers, and a Dask that was not tested."""
    everybody = {"this client": report.client, **report.answering}
    if report.scheduler is not None:
        everybody["the scheduler"] = report.scheduler
    for name in _SAME_EVERYWHERE:
        versions = {who: facts["versions"].get(name) for who, facts in everybody.items()}
        if name == "numpy":  # the scheduler doesn't compute
            versions.pop("the scheduler", None)
        if name == "python":  # functions travel between releases that differ in the third number only
            versions = {who: version and ".".join(version.split(".")[:2]) for who, version in versions.items()}
        groups = differing(versions)
        if len(groups) > 1:
            common = next(iter(groups))
            remedy = f'python -m pip install "{name}=={common}"   # on the others'
            remedy = f"use Python {common} everywhere" if name == "python" else remedy
            yield Finding("warning", f"versions of {name} differ: {_listed(groups)}", remedy)
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
    for_gpus = [name for name in _KINDS["product"] if has(name, "on_gpus")]
    starts = f"dask cuda worker {report.address} --preload dask_distmm"
    for address, facts in report.answering.items():
        gpus, host = facts["gpus"], str(facts["host"])
        if "error" in gpus:
            if facts["driver_loaded"]:
                text = f"{host} has an NVIDIA driver, but its GPUs can't be listed: {gpus['error']}"
                yield Finding("warning", text, "python -m pip install nvidia-ml-py", (address,))
            continue
        if not gpus["devices"]:
            continue
        refused = [cause for name in for_gpus if (cause := answer_about(facts, name).get("error"))]
        if not has(report.engine, "on_gpus") and len(refused) == len(for_gpus):
            text = f"{host} has GPUs that are not used: {refused[-1]}"
            yield Finding("warning", text, install_line(facts), (address,))
            continue
        driver, built = int(str(gpus["cuda"]).partition(".")[0]), facts["cuda_major"]
        if built and driver < built:
            text = f"{host}: the driver {gpus['driver']} is for CUDA {gpus['cuda']}, the libraries are for CUDA {built}"
            yield Finding("error", text, install_line(facts), (address,))
        if (mine := device_of(facts)) is not None:
            owners[f"{host} {mine}"].append(address)
        without, rmm = gpus["without_peer_access"], facts["rmm"]
        if isinstance(without, list) and without:
            pairs = ", ".join(f"{i}-{j}" for i, j in without[:6]) + ", ..." * (len(without) > 6)
            text = (
                f"{host}: GPUs without peer access: {pairs}; what they exchange takes the way through the host's memory"
            )
            yield Finding("warning", text, "nvidia-smi topo -p2p r   # shows why", (address,))
        if rmm and "error" not in rmm and "Pool" in rmm["resource"] and not rmm["used_by_cupy"]:
            size = f" ({format_bytes(rmm['pool_bytes'])})" if rmm["pool_bytes"] else ""
            text = f"the RMM pool{size} is not used by CuPy: its memory is lost to multiplies"
            yield Finding("warning", text, "dask cuda worker ... --rmm-allocator-external-lib-list cupy", (address,))
        if report.address and not facts.get("nanny", True):
            text = "a GPU worker without a nanny stays gone after another rank has died in a collective call"
            yield Finding("warning", text, starts, (address,))
    for device, addresses in owners.items():
        if len(addresses) > 1:
            text = f"{len(addresses)} workers share one GPU ({device}); a rank needs one of its own"
            yield Finding("error", text, f"{starts}   # starts one worker a GPU", tuple(addresses))


def _machines(report: Report) -> Iterator[Finding]:
    """Yield findings unless threads and memory of the workers fit their machines."""
    on_cpus = report.engine is not None and not has(report.engine, "on_gpus")
    hosts: dict[str, dict[str, Facts]] = collections.defaultdict(dict)
    for address, facts in report.answering.items():
        hosts[facts["host"]][address] = facts
        if isinstance(facts["blas"], list) and not facts["blas"] and on_cpus:
            text = "no BLAS that threadpoolctl knows: the engine can't set its threads, NumPy may be slow"
            yield Finding("warning", text, "python -m pip install --force-reinstall numpy", (address,))
        if report.address and on_cpus and not facts["memory_limit"]:
            text = "no memory limit: a multiply that needs too much is not refused before it starts"
            yield Finding("note", text, f"dask worker {report.address} --memory-limit auto", (address,))
    for host, workers in hosts.items() if report.address else ():
        threads, cores = sum(w["threads"] for w in workers.values()), max(w["cores"] for w in workers.values())
        count, limits = len(workers), [worker["memory_limit"] for worker in workers.values()]
        if on_cpus and threads > cores:
            text = f"{host}: {threads} threads of {count} workers on {cores} cores; BLAS gets slower by that"
            shared = f"--nworkers {min(count, cores)} --nthreads {max(1, cores // count)}"
            yield Finding("warning", text, f"dask worker {report.address} {shared}", tuple(workers))
        there = next(iter(workers.values()))["memory"]
        if isinstance(there, int) and all(limits) and sum(limits) > 1.02 * there:
            text = f"{host}: the workers' memory limits add up to {format_bytes(sum(limits))} of {format_bytes(there)}"
            remedy = f"dask worker {report.address} --nworkers {count} --memory-limit auto"
            yield Finding("warning", text, remedy, tuple(workers))
    if report.scheduler is not None and not report.scheduler["plugin"]:
        yield Finding("note", "the plugin is not on the scheduler yet: the first multiply puts it in place")


# As text


def report_text(report: Report) -> str:
    """Return the text that ``dask distmm check`` prints."""
    verdict = "\n".join(_finding(finding, report) for finding in report.findings)
    verdict += "\n" * bool(verdict) + "No problems found." if not report.status else ""
    return "\n\n".join(filter(None, (_head(report), _worker_tables(report), _library_table(report), verdict)))


def _head(report: Report) -> str:
    count, engine = len(report.workers), report.engine
    places = len({facts["host"] for facts in report.answering.values()})
    what = f"cluster {report.address}, {count} worker{'s' * (count != 1)} on {places} host{'s' * (places != 1)}"
    share = f" on {len(report.able(engine))} of {count} workers" if engine and report.address else ""
    why = _wrapped("engine     ", f"{engine or 'none'}{share}: {report.reason}")
    return f"dask_distmm check: {what if report.address else HERE}\n{why}"


def _worker_tables(report: Report) -> str:
    """Return the workers' facts: a line for each worker, then a line for each fact that most have in common."""
    lines, with_gpus = [], any("error" not in facts["gpus"] for facts in report.answering.values())
    rows = [["worker", "host", "threads", "memory limit", "protocol", "engines"]]
    described: dict[str, dict[str, str]] = collections.defaultdict(dict)
    for address, facts in report.answering.items():
        engines = ", ".join(name for name, x in facts["engines"].items() if name != "error" and "error" not in x)
        cells = {"BLAS": _blas(facts["blas"]), "GPU": _gpu(facts)}
        if with_gpus:
            cells |= {"peers": _peers(facts), "RMM pool": _rmm(facts["rmm"])}
        if report.address:
            limit = format_bytes(facts["memory_limit"]) if facts["memory_limit"] else "none"
            threads = f"{facts['threads']} of {facts['cores']}"
            rows.append([address, facts["host"], threads, limit, facts["protocol"], engines or "none"])
        else:
            memory = format_bytes(facts["memory"]) if isinstance(facts["memory"], int) else "unknown"
            cells = {"cores": str(facts["cores"]), "memory": memory, "engines": engines or "none", **cells}
        for title, value in cells.items():
            described[title][address] = value
    if len(rows) > 1:
        lines += [_table(rows), ""]
    return "\n".join(lines + [_wrapped(f"{title:<11}", _shared(values)) for title, values in described.items()])


def _blas(pools: Any) -> str:
    if not isinstance(pools, list) or not pools:
        return "unknown"
    names = {(f"{x['internal_api']} {x['version'] or ''}".strip(), x["num_threads"]) for x in pools}
    return "; ".join(sorted(f"{name}, {threads} threads" for name, threads in names))


def _gpu(facts: Facts) -> str:
    gpus = facts["gpus"]
    if "error" in gpus:
        return "none"
    names = [f"{device['name']} ({format_bytes(device['memory'])})" for device in gpus["devices"]]
    models = ", ".join(f"{count} x {name}" for name, count in collections.Counter(names).most_common())
    return f"{models or 'none'}, driver {gpus['driver']}, CUDA {gpus['cuda']}"


def _peers(facts: Facts) -> str:
    gpus = facts["gpus"]
    if "error" in gpus or len(gpus["devices"]) < 2:
        return "-"
    apart = gpus["without_peer_access"]
    if not isinstance(apart, list):
        return "unknown"
    return f"{len(apart)} pairs without access" if apart else "all reach each other"


def _rmm(rmm: Any) -> str:
    if not rmm or "error" in rmm:
        return "unknown" if rmm else "none"
    size = f", {format_bytes(rmm['pool_bytes'])}" if rmm["pool_bytes"] else ""
    return f"{rmm['resource']}{size}" + ", used by CuPy" * bool(rmm["used_by_cupy"])


def _library_table(report: Report) -> str:
    """Return the versions: one line a library, one column for each of client, scheduler and workers."""
    columns: dict[str, Mapping[str, Facts]] = {}
    if report.address:
        columns["client"] = {"this client": report.client}
        if report.scheduler is not None:
            columns["scheduler"] = {"the scheduler": report.scheduler}
    columns["workers" if report.address else "version"] = report.answering
    rows, missing = [["library", *columns]], []
    for name, (title, *_) in questions.LIBRARIES.items():
        cells = [_shared({who: x["versions"].get(name) for who, x in group.items()}, 1) for group in columns.values()]
        cells = ["-" if cell in ("", "none") else cell for cell in cells]
        if set(cells) == {"-"}:
            missing.append(title)
        else:
            rows.append([title, *cells])
    return _table(rows) + ("\n" + _wrapped("not installed: ", ", ".join(missing)) if missing else "")


def _finding(finding: Finding, report: Report) -> str:
    where = f"   ({short(finding.where)})" if finding.where and report.address else ""
    text = _wrapped(f"{_MARKS[finding.level]:<9}", finding.text + where)
    return f"{text}\n{'':9}fix: {finding.remedy}" if finding.remedy else text


def _wrapped(title: str, value: str) -> str:
    fill = functools.partial(textwrap.fill, break_long_words=False, break_on_hyphens=False)
    return fill(value, _WIDTH, initial_indent=title, subsequent_indent=" " * len(title))


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows = [rows[0], ["-" * width for width in widths], *rows[1:]]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
