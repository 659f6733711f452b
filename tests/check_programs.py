"""A check of the programs of a factorization without any numbers: their steps are taken by imagined ranks."""

from __future__ import annotations

import collections
import itertools

from dask_distmm.planning.factor.plan import FactorPlan, Phase, launch_order
from dask_distmm.planning.factor.steps import (
    Apply,
    Ask,
    Check,
    Diagonalize,
    Drop,
    Factor,
    Get,
    Key,
    NormalizePhases,
    Publish,
    Step,
    Tridiagonalize,
)

# Parts of panels from others that a rank holds at most at the same time: one in use and one that arrives.
_HELD = 2


def check_programs(plan: FactorPlan) -> int:
    """Run all ranks' programs without numbers; every rule that makes their result right is checked.

    The ranks are run in several orders, and take their steps in the order of the plan or in `launch_order`. In each

    - no rank waits for ever, or for itself;
    - each block column gets each panel of each phase once, in the order of the phase, on its own rank;
    - a panel is factorized when all panels before it have been applied to it, and never changes afterwards;
    - all that a rank applies is here and complete; nothing is asked for twice, or left behind;
    - a rank holds at most two panels of others at a time;
    - what ranks do together, each of them does once, and in this order: the reduction, the eigenvalues of its result;
      vectors are given their factors when they are complete;
    - a right-hand side that is carried is changed by the rank alone that has it, and comes home;
    - the next panel is published before its owner updates other blocks.

    Returns
    -------
    int
        Number of parts of panels that travel.

    Raises
    ------
    AssertionError
        A program breaks a rule.
    """
    ways = itertools.product((False, True), ("in turn", "first", "last"))
    travelled = {_Ranks(plan, launched=launched).run(order) for launched, order in ways}
    assert len(travelled) == 1
    for rank in range(plan.ranks):
        _check_lookahead(plan, rank)
    return travelled.pop()


class _Ranks:
    """Imagined ranks, and what they have done."""

    def __init__(self, plan: FactorPlan, *, launched: bool) -> None:
        self.plan, self.columns = plan, plan.columns
        steps = [plan.steps(rank) for rank in range(plan.ranks)]
        self.todo = [collections.deque(launch_order(one) if launched else one) for one in steps]
        self.published: set[tuple[int, Key]] = set()
        # The rank that each key was asked of.
        self.asked: list[dict[Key, int]] = [{} for _ in self.todo]
        self.holder = self.columns.owner(self.columns.first(1))
        self.here: list[set[Key]] = [set() for _ in self.todo]
        self.pivots: list[set[int]] = [set() for _ in self.todo]
        self.made: set[int] = set()
        # For each block column, the panels that it has got in each phase.
        self.got: dict[int, list[tuple[int, int]]] = collections.defaultdict(list)
        self.travelled = 0
        # What each rank has done together with all others, and whether it has oriented vectors.
        self.together: list[list[type]] = [[] for _ in self.todo]
        self.oriented: set[int] = set()
        if plan.phases and not plan.phases[0].factors and not plan.shared:
            self.made |= set(plan.phases[0].panels)

    def run(self, order: str) -> int:
        """Take all steps: one of each rank in turn, or all that are possible of the first or of the last one."""
        ranks = range(self.plan.ranks)
        while any(self.todo):
            moved = False
            for rank in ranks if order != "last" else ranks[::-1]:
                while self.todo[rank] and self.possible(rank, self.todo[rank][0]):
                    self.take(rank, self.todo[rank].popleft())
                    moved = True
                    if order == "in turn":
                        break
            assert moved, f"ranks wait for ever: {[steps[0] if steps else None for steps in self.todo]}"
        self.check_end()
        return self.travelled

    def possible(self, rank: int, step: Step) -> bool:
        """Whether a rank need not wait."""
        if not isinstance(step, Get):
            return True
        assert step.key in self.asked[rank], f"rank {rank} waits for {step.key}, for which it has not asked"
        return (self.asked[rank][step.key], step.key) in self.published

    def take(self, rank: int, step: Step) -> None:
        """Check a step and do it."""
        match step:
            case Tridiagonalize() | Diagonalize():
                self.together[rank].append(type(step))
                assert self.together[rank] == [Tridiagonalize, Diagonalize][: len(self.together[rank])]
                if self.plan.phases:
                    self.made |= set(self.columns.owned(rank, 0, len(self.plan.phases[0].panels)))
            case NormalizePhases():
                assert rank not in self.oriented, f"rank {rank} orients its vectors twice"
                self.oriented.add(rank)
            case Factor(_, panel):
                self.check_own(rank, panel)
                assert panel not in self.made, f"panel {panel} is factorized twice"
                assert self.got[panel] == [(0, before) for before in range(panel)], f"panel {panel} comes too early"
                self.made.add(panel)
            case Check(panel, _):
                self.check_own(rank, panel)
                assert panel in self.made
            case Publish(key) if key.part == "carried":
                assert rank == self.holder, f"rank {rank} hands on {key}, which rank {self.holder} has"
                self.published.add((rank, key))
            case Publish(key):
                self.check_own(rank, key.panel)
                assert key.panel in self.made, f"{key} is published before it is made"
                assert (rank, key) not in self.published, f"{key} is published twice"
                self.published.add((rank, key))
            case Ask(key, owner):
                carried = key.part == "carried"
                right = self.columns.owner(key.panel) == (rank if carried else owner)
                assert right, f"rank {rank} asks {owner} for {key}"
                assert owner != rank, f"rank {rank} asks itself for {key}"
                assert key not in self.asked[rank].keys() | self.here[rank], f"rank {rank} asks twice for {key}"
                self.asked[rank][key] = owner
                self.travelled += not carried
                whole = [one for one in self.asked[rank].keys() | self.here[rank] if one.part in ("lower", "upper")]
                assert len(whole) <= _HELD, f"rank {rank} holds {whole}"
            case Get(key):
                if self.asked[rank].pop(key) == self.holder and key.part == "carried":
                    self.holder = rank
                self.here[rank].add(key)
                if key.part in ("lower", "pivots"):
                    # Pivots come with the lower part of a panel of LU, and stay.
                    self.pivots[rank].add(key.panel)
            case Drop(key):
                self.here[rank].remove(key)
            case Apply():
                self.apply(rank, step)

    def check_own(self, rank: int, panel: int) -> None:
        assert self.columns.owner(panel) == rank, f"rank {rank} has no panel {panel}"

    def apply(self, rank: int, step: Apply) -> None:
        key = step.key
        own = self.columns.owner(key.panel) == rank
        assert own or key in self.here[rank], f"rank {rank} applies {key}, which is not there"
        assert not own or key.panel in self.made, f"rank {rank} applies its panel {key.panel} before it is made"
        number = self.phase_of(step)
        assert rank not in self.oriented, f"rank {rank} changes vectors that have their factors"
        assert not self.plan.shared or len(self.together[rank]) == 2, f"rank {rank} applies {key} to no vectors"
        assert self.plan.phases[number].part == key.part
        blocks = self.columns.owned(rank, step.first, step.stop)
        if self.plan.phases[number].carried:
            assert rank == self.holder, f"rank {rank} applies {key} to what rank {self.holder} has"
            blocks = range(step.first, step.stop)
        assert blocks, f"rank {rank} applies {key} to nothing"
        for block in blocks:
            assert block not in self.made, f"panel {block} is changed after it was made"
            self.got[block].append((number, key.panel))

    def phase_of(self, step: Apply) -> int:
        found = [at for at, phase in enumerate(self.plan.phases) if phase.operation == step.operation]
        assert len(found) == 1, f"{step.operation} is in {len(found)} phases"
        return found[0]

    def check_end(self) -> None:
        """Check that every block column has got all that the phases say, in their order, and that nothing is left."""
        expected: dict[int, list[tuple[int, int]]] = collections.defaultdict(list)
        for number, phase in enumerate(self.plan.phases):
            for panel, targets in zip(phase.panels, phase.targets, strict=True):
                for block in range(*targets):
                    expected[block].append((number, panel))
        for block in range(self.columns.count):
            assert self.got[block] == expected[block], f"block {block} got {self.got[block]}, not {expected[block]}"
        home = self.columns.owner(self.columns.first(1))
        assert self.holder == home, f"rank {self.holder} keeps the right-hand side of rank {home}"
        for rank, (asked, here) in enumerate(zip(self.asked, self.here, strict=True)):
            assert not asked, f"rank {rank} asked for {asked} and never got it"
            left = {key for key in here if key.part in ("lower", "upper")}
            assert not left, f"rank {rank} keeps {left}"
            if self.plan.shared:
                assert len(self.together[rank]) == 2, f"rank {rank} has no eigenvalues"
                assert (rank in self.oriented) == self.plan.problem.vectors
            elif rank in self.plan.holders:
                needed = {p for p in self.plan.phases[0].panels if self.columns.owner(p) != rank}
                assert self.pivots[rank] == needed, f"rank {rank} lacks pivots"


def _check_lookahead(plan: FactorPlan, rank: int) -> None:
    """Check that a rank makes and publishes its panel before it applies the panel before it to any other block."""
    steps = plan.steps(rank)
    for phase in (phase for phase in plan.phases if phase.factors):
        for before, panel in zip(phase.panels, phase.panels[1:], strict=False):
            if plan.columns.owner(panel) != rank:
                continue
            made = steps.index(Factor(phase.operation, panel))
            published = [at for at, step in enumerate(steps) if step == Publish(Key(phase.part, panel))]
            applied = _applications(steps, phase, before)
            assert [steps[at].stop - steps[at].first for at in applied[:1]] == [1], "the next panel is not the first"  # type: ignore[union-attr]
            late = published[0] if published else made
            assert applied[0] < made <= late, f"panel {panel} is made before panel {before} is applied to it"
            assert all(at > late for at in applied[1:]), f"panel {panel} has to wait for other blocks"


def _applications(steps: tuple[Step, ...], phase: Phase, panel: int) -> list[int]:
    return [
        at
        for at, step in enumerate(steps)
        if isinstance(step, Apply) and step.operation == phase.operation and step.key.panel == panel
    ]
