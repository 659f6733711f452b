"""The steps of one rank, from the phases: with one panel of lookahead.

A panel can be factorized as soon as all panels before it have been applied to its own block column. So the owner of the
next panel applies this one to that block column first, factorizes it, publishes it, and only then updates its other
blocks. Meanwhile the other ranks update theirs, and the next panel travels::

    rank 0   F0 |  A0 to its blocks               | A1 to 2 | F2 | A1 to the rest
    rank 1      | A0 to 1 | F1 | A0 to the rest   |    A1 to its blocks
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from dask_distmm.planning.factor.columns import Columns
from dask_distmm.planning.factor.phases import Phase
from dask_distmm.planning.factor.steps import Apply, Ask, Check, Drop, Factor, Get, Key, Publish, Step


def steps_of(
    rank: int, phases: Sequence[Phase], columns: Columns, *, check: str = "", pivots_on: Sequence[int] = ()
) -> tuple[Step, ...]:
    """Return the steps of a rank in their order."""
    return tuple(_Builder(rank, phases, columns, check, frozenset(pivots_on)).build())


def launch_order(steps: Iterable[Step], is_short: Callable[[Apply], bool] = lambda step: False) -> Iterator[Step]:
    """Yield the steps of a rank in an order for devices that only put them on streams, and panels that are waited for.

    What a panel is applied to besides the next one comes before that is factorized, so that the device has it to do
    while the thread waits.
    """
    later: list[Step] = []
    ahead: Apply | None = None
    for step in steps:
        if ahead and isinstance(step, Factor | Check | Publish):
            later.append(step)
            continue
        rest = ahead is not None and isinstance(step, Apply) and step[:2] == ahead[:2] and not is_short(step)
        if rest:
            yield step
        yield from later
        if not rest:
            yield step
        later, ahead = [], step if isinstance(step, Apply) and step.ahead else None
    yield from later


class _Builder:
    def __init__(
        self, rank: int, phases: Sequence[Phase], columns: Columns, check: str, pivots_on: frozenset[int]
    ) -> None:
        self.rank, self.phases, self.columns = rank, phases, columns
        self.check, self.pivots_on = check, pivots_on

    def build(self) -> Iterator[Step]:
        if self.phases and not self.phases[0].factors:
            for panel in self.phases[0].panels:
                if self.mine(panel):
                    yield from self.complete(panel)
        for phase in self.phases:
            yield from self.phase(phase)
        if self.rank in self.pivots_on:
            # Pivots come with the panels that are applied here.
            applied = {
                panel
                for panel, targets in zip(self.phases[0].panels, self.phases[0].targets, strict=True)
                if self.columns.owned(self.rank, *targets)
            }
            missing = [panel for panel in self.phases[0].panels if not self.mine(panel) and panel not in applied]
            keys = [(Key("pivots", panel), self.columns.owner(panel)) for panel in missing]
            yield from (Ask(key, owner) for key, owner in keys)
            yield from (Get(key) for key, _ in keys)

    def mine(self, block: int) -> bool:
        return self.columns.owner(block) == self.rank

    def phase(self, phase: Phase) -> Iterator[Step]:
        if phase.carried:
            yield from self.carry(phase)
            return
        todo = list(zip(phase.panels, phase.targets, strict=True))
        if todo:
            yield from self.begin(phase, *todo[0])
        for at, (panel, (begin, stop)) in enumerate(todo):
            first, key = begin, Key(phase.part, panel)
            remote = bool(self.columns.owned(self.rank, first, stop)) and not self.mine(panel)
            if remote:
                yield Get(key)
            if at + 1 < len(todo):
                following, targets = todo[at + 1]
                ahead = phase.factors and self.mine(following)
                if ahead:
                    yield Apply(phase.operation, key, following, following + 1, ahead=True)
                    first = following + 1
                yield from self.begin(phase, following, targets)
            if self.columns.owned(self.rank, first, stop):
                yield Apply(phase.operation, key, first, stop)
            if remote:
                yield Drop(key)

    def carry(self, phase: Phase) -> Iterator[Step]:
        """Apply the rank's own panels to the right-hand side when it comes, and hand it on."""
        home = self.columns.first(1)
        holder = self.columns.owner(home)
        for panel in (*phase.panels, home):
            key, owner = Key("carried", panel), self.columns.owner(panel)
            if owner != holder and self.rank == holder:
                yield Publish(key)
            elif owner != holder and self.rank == owner:
                yield Ask(key, holder)
                yield Get(key)
            if panel != home and self.rank == owner:
                yield Apply(phase.operation, Key(phase.part, panel), home, home + 1)
            holder = owner

    def begin(self, phase: Phase, panel: int, targets: tuple[int, int]) -> Iterator[Step]:
        """Make a panel, or ask for it."""
        if not self.mine(panel):
            if self.columns.owned(self.rank, *targets):
                yield Ask(Key(phase.part, panel), self.columns.owner(panel))
        elif phase.factors:
            yield Factor(phase.operation, panel)
            yield from self.complete(panel)

    def complete(self, panel: int) -> Iterator[Step]:
        """Check and publish a panel of this rank that does not change any more."""
        if self.check:
            yield Check(panel, self.check == "rank")
        parts = {phase.part for phase in self.phases if not phase.carried}
        for part in ("lower", "upper"):
            if part in parts and self.columns.ranks > 1:
                yield Publish(Key(part, panel))
        if self.pivots_on - {self.rank}:
            yield Publish(Key("pivots", panel))
