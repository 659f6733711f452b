"""The internals of Dask and distributed that this package rests on: one list, and the check of a version by it.

They are not a public interface, and may change with any version. Where one is missing nothing of ours is attached: a
scheduler refuses the plugin, a worker says that it has no engine. Then `matmul` raises one error that names what is
missing, and products under `enable` go to Dask's own functions. So versions that are newer than those tested may be
installed. `runtime.direct` has the code that rests on most of these names.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import unquote, urlsplit

from dask_distmm._version import TESTED_DASK, __version__
from dask_distmm.errors import DistMMError

T = TypeVar("T")
V = TypeVar("V")


class cached_property(Generic[T, V]):  # noqa: N801 - as in functools
    """`functools.cached_property` as of Python 3.12: that of 3.11 has one lock for all objects of a class.

    Many workers in one process would wait for each other whenever they read a plan.
    """

    def __init__(self, function: Callable[[T], V]) -> None:
        self._function, self.__doc__ = function, function.__doc__

    def __set_name__(self, owner: type[T], name: str) -> None:
        self._name = name

    def __get__(self, instance: T, owner: type[T] | None = None) -> V:
        value = instance.__dict__[self._name] = self._function(instance)
        return value


def _used(text: str) -> dict[str, tuple[str, ...]]:
    """Return the names of a text, each with the parameters behind it."""
    return {name: tuple(re.findall(r"\w+", called)) for name, called in re.findall(r"(\w+)(\([^)]*\))?", text)}


# Methods that are called, with the parameters of the call, and attributes: of a scheduler and of a worker.
SCHEDULER = _used("""
    _create_taskstate_from_graph(dsk, keys, ordered) _add_to_memory(ts, ws, recommendations, client_msgs, type,
    typename) _transition(key, finish, stimulus_id) add_plugin(plugin, name, idempotent) log_event(topic, msg)
    new_task(key, spec, state) register_scheduler_plugin(plugin, name, idempotent) register_worker_plugin(comm,
    plugin, name, idempotent) remove_replica(ts, ws) request_acquire_replicas(addr, keys, stimulus_id)
    send_all(client_msgs, worker_msgs) set_restrictions(worker) stimulus_queue_slots_maybe_opened(stimulus_id)
    transitions(recommendations, stimulus_id) valid_workers(ts) worker_send(worker, msg) _ongoing_background_tasks
    clients extensions handlers no_workers_timeout plugins rpc security stream_handlers task_prefixes tasks
    transition_counter unrunnable validate workers
""")
WORKER = _used("""
    batched_send(msg) handle_stimulus(stims) update_data(data, stimulus_id) address data extensions handlers heartbeat
    loop monitor rpc status stream_handlers
""")


def _used_by_path(text: str) -> dict[str, dict[str, tuple[str, ...]]]:
    """Return what is used of classes or modules, by their paths."""
    listed = re.findall(r"^ {4}([\w.]+): ((?:.|\n {8})*)", text, re.M)
    return {path: _used(names) for path, names in listed}


# Of classes, by the modules that have them.
CLASSES = _used_by_path("""
    distributed.scheduler.TaskState: add_dependency annotations dependencies dependents exception_blame group
        host_restrictions key loose_restrictions nbytes priority processing_on resource_restrictions retries
        run_spec set_nbytes state type waiters waiting_on who_has who_wants worker_restrictions
    distributed.scheduler.WorkerState: address executing extra has_what memory memory_limit nthreads processing
        resources status
    distributed.scheduler.MemoryState: process unmanaged_old
    distributed.diagnostics.plugin.SchedulerPlugin: add_worker log_event remove_client remove_worker restart start
        transition update_graph valid_workers_downscaling
    distributed.diagnostics.plugin.WorkerPlugin: setup teardown
""")
TRANSITIONS = (("waiting", "no-worker"), ("no-worker", "released"), ("no-worker", "erred"), ("released", "erred"))
# Names in modules, with the parameters of calls.
MODULES = _used_by_path("""
    dask._task_spec: Alias DataNode DependenciesMapping GraphNode List Task TaskRef _execute_subgraph
        convert_legacy_graph
    dask.array._shuffle: _calculate_new_chunksizes(input_chunks, new_chunks, changeable_dimensions, maximum_chunk)
    dask.array.core: _HANDLED_FUNCTIONS
    dask.array.optimization: optimize(dsk, keys)
    dask.array.routines: matmul
    dask.blockwise: fuse_roots(graph, keys) optimize_blockwise(graph, keys)
    dask.core: flatten(seq)
    dask.highlevelgraph: HighLevelGraph Layer MaterializedLayer
    dask.order: order(dsk)
    dask.sizeof: sizeof
    distributed.core: error_message(e)
    distributed.metrics: monotonic time
    distributed.protocol: dask_serialize to_serialize
    distributed.protocol.pickle: dumps(x) loads(x)
    distributed.utils: sync(loop, func)
    distributed.worker_state_machine: FreeKeysEvent(keys, stimulus_id)
""")


def missing_on_scheduler(scheduler: Any) -> list[str]:
    """Return what this version of distributed lacks of what is used on a scheduler, in words; empty if it has all."""
    missing = _lacking("Scheduler", scheduler, SCHEDULER)
    for path, names in CLASSES.items():
        module, _, kind = path.rpartition(".")
        missing += _lacking(kind, getattr(importlib.import_module(module), kind, None), names)
    table = getattr(scheduler, "_TRANSITIONS_TABLE", {})
    return missing + [f"the scheduler's transition {pair}" for pair in TRANSITIONS if pair not in table]


def missing_on_worker(worker: Any) -> list[str]:
    """Return what this version of distributed lacks of what is used on a worker, in words; empty if it has all."""
    return _lacking("Worker", worker, WORKER)


def check_imports() -> None:
    """Raise `ImportError` if modules of Dask or distributed lack what is imported from them."""
    missing = [x for module, names in MODULES.items() for x in _lacking(module, _module(module), names)]
    if missing:
        raise ImportError(unsupported("here", missing))


def unsupported(where: str, missing: Iterable[str]) -> str:
    """Return the text that says what a version lacks, and what to do."""
    import distributed

    return (
        f"distributed {distributed.__version__} {where} is not supported: it lacks {', '.join(missing)}. Install one "
        f'that works, on all machines: python -m pip install "dask=={TESTED_DASK[-1]}" "distributed=={TESTED_DASK[-1]}"'
    )


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _lacking(name: str, thing: Any, used: Mapping[str, tuple[str, ...]]) -> list[str]:
    if thing is None:
        return [name]
    missing = []
    for each, parameters in used.items():
        if (attribute := getattr(thing, each, _ABSENT)) is _ABSENT:
            missing.append(f"{name}.{each}")
        elif parameters:
            has = inspect.signature(attribute).parameters if callable(attribute) else {}
            missing += [f"{name}.{each}({x})" for x in parameters if x not in has]
    return missing


_ABSENT = object()


# Commands that install this package, with its optional parts: from where it came, so that they work
_NAME = "dask_distmm"


def install_command(extra: str = "", *, elsewhere: bool = False) -> str:
    """Return the command that installs this version of the package, from where it came."""
    origin = _origin()
    if origin is not None and "dir_info" in origin and not Path(requirement(origin, __version__, "")).is_dir():
        # As in an image, where the folder has been removed.
        return f'python -m pip install ".{f"[{extra}]" if extra else ""}"   # in a clone of the repository'
    copied = "   # from a copy of that folder" if elsewhere and origin is not None and "dir_info" in origin else ""
    return f'python -m pip install "{requirement(origin, __version__, extra)}"{copied}'


def requirement(origin: Mapping[str, Any] | None, version: str, extra: str) -> str:
    """Return what pip is to install: a name and version of an index, a folder, a file, or a repository."""
    brackets = f"[{extra}]" if extra else ""
    if origin is None:
        return f"{_NAME}{brackets}=={version}"
    url = str(origin["url"])
    if "dir_info" in origin:
        return f"{unquote(urlsplit(url).path)}{brackets}"
    if (vcs := origin.get("vcs_info")) is not None:
        return f"{_NAME}{brackets} @ {vcs['vcs']}+{url}@{vcs['commit_id']}"
    return f"{_NAME}{brackets} @ {url}"


@functools.cache
def _origin() -> dict[str, Any] | None:
    """Return where this package was installed from; a folder that is imported without having been installed, too."""
    root = Path(__file__).parents[1]
    if (root / "pyproject.toml").is_file():
        return {"url": root.as_uri(), "dir_info": {}}
    try:
        text = importlib.metadata.distribution(_NAME).read_text("direct_url.json")
        origin: dict[str, Any] | None = json.loads(text) if text else None
    except (importlib.metadata.PackageNotFoundError, OSError, ValueError):
        return None
    return origin if origin is not None and "url" in origin else None


def library_of(extra: str, name: str, user: str, where: str = "") -> Any:
    """Return a module that an optional part brings."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DistMMError(
            f"{user} needs {name.partition('.')[0]}, which can't be imported ({error}): install it with the extra "
            f"'{extra}'{where}, by {install_command(extra)}"
        ) from error
