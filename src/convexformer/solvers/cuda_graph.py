"""An iteration as a function of its state, recorded once on a GPU and replayed without the host's launches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar, final

import torch

from convexformer.objective import Objective
from convexformer.solvers.base import Workspace

GRAPH_DATA = 1 << 27
"""Token entries up to which launching kernels costs more than running them (benchmarks/gpu_resident.py)."""


@final
class GraphMemory:
    """The memory pool of all graphs of an operator; the last graph keeps it alive for the next."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.last: torch.cuda.CUDAGraph | None = None


GRAPHS: Workspace[GraphMemory] = Workspace()
State = TypeVar("State", bound=tuple[Any, ...])


@final
class CudaGraphLoop(Generic[State]):
    """``state <- advance(state)`` for a named tuple of tensors (or None).

    On a GPU an iteration is some two hundred small kernels, and launching them takes several times as long as running
    them. Where nothing in it is decided on the host it is recorded as a CUDA graph at the second call: the state then
    lives in the same tensors throughout, so whoever keeps one must copy it.
    """

    def __init__(self, objective: Objective, advance: Callable[[State], State], state: State, *, record: bool) -> None:
        self.objective, self.advance = objective, advance
        like = objective.operator.like
        self.record = record and like.is_cuda and objective.operator.data_size <= GRAPH_DATA
        self.state = _copy(state) if self.record else state
        self._graph: torch.cuda.CUDAGraph | None = None
        self._warm = False

    def __call__(self) -> None:
        """Go one iteration on."""
        if not self.record:
            self.state = self.advance(self.state)
        elif self._graph is not None:
            self._graph.replay()
        elif not self._warm:
            _aside(self._in_place)
            self._warm = True
        else:
            self._capture()
            self()

    def set(self, state: State) -> None:
        """Go on from another state."""
        if not self.record:
            self.state = state
            return
        _overwrite(self.state, state)

    def _in_place(self) -> None:
        _overwrite(self.state, self.advance(self.state))

    def _capture(self) -> None:
        """Record an iteration; where something in it cannot be recorded, go on without."""
        memory = GRAPHS.get(self.objective.operator, GraphMemory)
        graph = torch.cuda.CUDAGraph()

        def capture() -> None:
            graph.capture_begin(pool=memory.pool, capture_error_mode="thread_local")
            try:
                self._in_place()
            finally:
                graph.capture_end()

        try:
            _aside(capture)
        except RuntimeError:
            self.record = False
            return
        self._graph = memory.last = graph


def _aside(work: Callable[[], None]) -> None:
    """Run on a stream of its own, between what came before and what comes after."""
    here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
    aside.wait_stream(here)
    try:
        with torch.cuda.stream(aside):
            work()
    finally:
        here.wait_stream(aside)


def select(taken: torch.Tensor, new: State, old: State) -> State:
    """Return ``new`` where the step to it is taken, else ``old``, decided on the device."""
    return _like(new, (a if a is None else torch.where(taken, a, b) for a, b in zip(new, old, strict=True)))


def _copy(state: State) -> State:
    return _like(state, (None if part is None else part.clone() for part in state))


def _like(state: State, parts: Iterable[Any]) -> State:
    """The same kind of tuple."""
    return type(state)(*parts)


def _overwrite(state: State, other: State) -> None:
    for old, new in zip(state, other, strict=True):
        if old is not None:
            old.copy_(new)
