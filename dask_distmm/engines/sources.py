"""Chunks that a rank makes itself, from their source, when it needs them: some ahead, each once, none kept."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from dask_distmm.engines.base import log, wait_checked
from dask_distmm.errors import in_words


class ChunkTasks:
    """The tasks that make an operand's chunks, in the place of the chunks among a barrier's inputs."""

    def __init__(self, tasks: Sequence[Any]) -> None:
        self.tasks = list(tasks)


class Source:
    """The source of a chunk: a call that reads or makes it, up to `retries` times again if it fails."""

    __slots__ = ("_call", "_retries", "wanted")

    def __init__(self, call: Callable[[], Any], retries: int = 0) -> None:
        self._call, self._retries, self.wanted = call, retries, True

    def make(self) -> Any:
        """Run the call, with its retries."""
        while True:
            try:
                return self._call()
            except BaseException as error:
                if self._retries <= 0 or not self.wanted:
                    raise
                log.info("a chunk is made again, %d retries are left: %s", self._retries, in_words(error))
            self._retries -= 1


class SourceChunk:
    """A chunk of an operand that is still to be made; it stands in the place of an array."""

    __slots__ = ("source", "view")

    def __init__(self, source: Source, view: Callable[[Any], Any]) -> None:
        self.source, self.view = source, view

    def again(self) -> SourceChunk:
        """Return the same chunk, to be made once more."""
        return SourceChunk(copy.copy(self.source), self.view)


class TaskCall(NamedTuple):
    """A task of a region, which stands in the place of a chunk that a rank makes."""

    # Its name without a token, and what calls it with the values that it reads.
    name: str
    call: Callable[[Sequence[Any]], Any]


class ChunkLoader:
    """Makes chunks in threads, in the order in which they are used."""

    def __init__(
        self,
        uses: Sequence[SourceChunk],
        threads: int,
        ahead: int,
        make: Callable[[Source, Sequence[SourceChunk]], Mapping[SourceChunk, Any]] | None = None,
        begin: Callable[[], None] | None = None,
    ) -> None:
        self._uses = collections.Counter(chunk.source for chunk in uses)
        self._chunks: dict[Source, list[SourceChunk]] = {}
        for chunk in dict.fromkeys(uses):
            self._chunks.setdefault(chunk.source, []).append(chunk)
        self._todo = collections.deque(self._chunks)
        self._made: dict[Source, Future[Mapping[SourceChunk, Any]]] = {}
        # Those that wait for their first use.
        self._new: set[Source] = set()
        self._ahead, self._make = ahead, make or _views
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="distmm-load", initializer=begin)
        self._begin()

    def take(self, chunk: SourceChunk, check: Callable[[], None]) -> Any:
        """Wait for a chunk; `check` raises if the run is aborted meanwhile."""
        chunks = wait_checked(self._made[chunk.source], check)
        if chunk.source in self._new:
            self._new.discard(chunk.source)
            self._begin()
        self._uses[chunk.source] -= 1
        if not self._uses[chunk.source]:
            del self._made[chunk.source]
        return chunks[chunk]

    def close(self) -> None:
        """Drop all chunks, and stop loading."""
        for source in self._uses:
            source.wanted = False
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._made.clear()

    def _begin(self) -> None:
        while self._todo and len(self._new) < self._ahead:
            source = self._todo.popleft()
            self._new.add(source)
            self._made[source] = self._threads.submit(self._make, source, self._chunks.pop(source))


def _views(source: Source, chunks: Sequence[SourceChunk]) -> dict[SourceChunk, Any]:
    """Run a source; return its chunks as views of the result."""
    loaded = source.make()
    return {chunk: chunk.view(loaded) for chunk in chunks}
