"""The order of the measurements: round robin over everything measured. Knows no engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.harness.protocol import Case, Contender, Sample


@dataclass
class Measured:
    """The outcome of one peer at one case."""

    peer: str
    case: Case
    samples: list[Sample] = field(default_factory=list)
    warmup: Sample | None = None
    failure: str | None = None


def fresh_seed(*path: int) -> int:
    """Return a seed that differs for every path, so that no two measurements share inputs or keys."""
    return int(np.random.SeedSequence(path).generate_state(1, np.uint64)[0] >> np.uint64(1))


def measure_all(
    peers: Sequence[Contender],
    sizes: Sequence[int],
    *,
    dtype: str,
    repeat: int,
    seed: int,
    progress: Callable[[str], None],
    seconds: float = float("inf"),
    into: list[Measured] | None = None,
) -> list[Measured]:
    """Measure every peer at every size and grid; a case that fails or is wrong ends, the rest goes on.

    Within a size each round visits every case once, so that a machine that drifts does so for all of
    them. Rounds start at different cases, so that no peer always follows the same neighbour's leftovers.

    No round is begun that would probably end after `seconds`, and no size of which not even one round would count;
    the first round of the first size always is. Measurements are also put `into` a list, as they come:
    an interrupt leaves what is there.
    """
    everything = [] if into is None else into
    began, last = time.monotonic(), 0.0
    for number, size in enumerate(sizes):
        if number:
            # Small products cost what their tasks cost, large ones what their operations do; two rounds are the least.
            last *= (size / sizes[number - 1]) ** 2.5
            if time.monotonic() - began + 2 * last > seconds:
                progress(f"N={size}: left out, it would take about {2 * last:.0f} s")
                continue
        entries = [(peer, Measured(peer.name, Case(size, dtype, grid))) for peer in peers for grid in peer.grids()]
        everything += [measured for _, measured in entries]
        for turn in range(repeat + 1):
            if turn > 1 and time.monotonic() - began + last > seconds:
                progress(f"N={size}: {turn - 1} of {repeat} rounds, as the time is up")
                break
            started = time.monotonic()
            progress(f"N={size}: " + (f"round {turn} of {repeat}" if turn else "warm-up"))
            order = [(turn + step) % len(entries) for step in range(len(entries))]
            for index in order:
                peer, measured = entries[index]
                if measured.failure is not None:
                    continue
                failure = _once(peer, measured, fresh_seed(seed, size, turn, index), warmup=turn == 0)
                if failure is not None:
                    measured.failure = failure
                    progress(f"  {measured.peer} {measured.case}: {failure}")
            last = time.monotonic() - started
    return everything


def _once(peer: Contender, measured: Measured, seed: int, *, warmup: bool) -> str | None:
    """Take one sample; whatever goes wrong is returned, as a benchmark of peers must survive one."""
    try:
        sample = peer.measure(measured.case, seed, warmup=warmup)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:500]
    # A NaN is not at most 1 either.
    if not sample.error <= 1:
        return f"wrong result: {sample.error:.3g} times the rounding error that is possible"
    if warmup:
        measured.warmup = sample
    else:
        measured.samples.append(sample)
    return None
