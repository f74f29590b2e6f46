"""What a solver is, and what it needs of whoever watches it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import ClassVar, Generic, Protocol, TypeVar, final
from weakref import WeakKeyDictionary

from torch import Tensor

from convexformer.jit import Kernels
from convexformer.objective import Evaluation, Objective
from convexformer.operators import Operator
from convexformer.solvers.monitor import STALL_CHECKS, Monitor
from convexformer.weights import Operand, Weights

T = TypeVar("T")


class Solver(ABC):
    """A method for some objectives. It knows the interfaces of operator, loss and penalty, and no concrete one."""

    name: ClassVar[str]
    works_on: ClassVar[str]
    """What it serves, in a few words, for the table of :func:`convexformer.solvers.explain`."""
    uses_factors: ClassVar[bool] = False
    """Whether its weights are low-rank factors rather than one tensor."""
    patience: ClassVar[int] = STALL_CHECKS
    """Gap checks in a row without progress after which it has stalled; fewer where much is done between two checks."""

    @abstractmethod
    def requires(self, objective: Objective) -> str | None:
        """Return None where the solver serves the objective, else a sentence that says what is missing."""

    def prepare(self, objective: Objective) -> Objective:
        """Return the same objective in the form that suits the solver: compressed, or with a factored operator."""
        return objective

    def kernels(self, objective: Objective) -> Kernels:
        """Return what must be compiled before the solver runs; nothing by default."""
        return {}

    @abstractmethod
    def solve(self, objective: Objective, start: Weights, monitor: Monitor) -> None:
        """Minimise from ``start``, which has the solver's form, until the monitor says to stop; it keeps the best point."""


class Watcher(Protocol):
    """What an iteration needs of whoever watches it: when to go on, when to show a point, and to whom."""

    def __iter__(self) -> Iterator[int]: ...

    @property
    def iteration(self) -> int:
        """The number of the current iteration."""

    @property
    def done(self) -> bool:
        """Whether to go on no further."""

    @property
    def late(self) -> bool:
        """Whether the time is up."""

    @property
    def due(self) -> bool:
        """Whether it is time for a gap check."""

    def hold(self, Z: Operand, outputs: Tensor | None, intercept: Tensor | None) -> None:
        """Take note of the point at hand, in case the time is up before it is checked."""

    def check(self, Z: Operand, at: Evaluation) -> object:
        """Check the gap of the point ``Z``, whose loss is ``at``."""


@final
class Workspace(Generic[T]):
    """What a solver keeps for an operator as long as the operator lives: copies of features, graph pools.

    Objectives that differ in beta alone share their operator, so a path builds such things once.
    """

    def __init__(self) -> None:
        self._kept: WeakKeyDictionary[Operator, tuple[tuple[object, ...], T]] = WeakKeyDictionary()

    def get(self, operator: Operator, make: Callable[[], T], *depends_on: object) -> T:
        """Return what was made for this operator and these very objects, or make it."""
        found = self._kept.get(operator)
        if found is not None and all(map(_same, found[0], depends_on)):
            return found[1]
        made = make()
        self._kept[operator] = (depends_on, made)
        return made


def _same(a: object, b: object) -> bool:
    """Tell whether two things are the same object, or equal plain values; tensors are not compared by their numbers."""
    return a is b or (not isinstance(a, Tensor) and a == b)
