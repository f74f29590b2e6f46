"""Block norms, ridges and their sums: which blocks to use, and how much of each, as one convex program.

    min_Z  F(sum_b A_b Z_b) + beta sum_b s_b |Z_b|     (and ridges beta s_b / 2 |Z_b|^2 beside them)

By the representer theorem all blocks share one coefficient matrix, ``Z_b = k_b A_b^T alpha``. With
``|z| = min_eta (|z|^2 / eta + eta) / 2`` this is ``min_eta J(eta) + beta^2 / 2 sum_b eta_b`` (Bach, Lanckriet and Jordan
2004; Rakotomamonjy et al. 2008, SimpleMKL), where ``J(eta)`` is a ridge problem with the kernel ``sum_b k_b K_b``: a few
unknowns outside, solved by Newton's method on ``1 / polar_b(eta) = 1 / beta``, which is nearly linear in ``eta``, and inside
L-BFGS in the outputs with a Cholesky metric.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import final

import numpy as np
import torch
from scipy.optimize import lsq_linear
from torch import Tensor

from convexformer.certificates import dual_value
from convexformer.objective import Evaluation, Objective
from convexformer.operators import LowRank, Neurons
from convexformer.operators.base import times
from convexformer.solvers.base import Solver
from convexformer.solvers.block_newton.blocks import Blocks, missing
from convexformer.solvers.block_newton.metric import Metric, Ridge, descend
from convexformer.solvers.block_newton.options import BlockNewtonOptions
from convexformer.solvers.monitor import Monitor
from convexformer.weights import Weights


@final
@dataclass(frozen=True)
class _Look:
    """What is known at a point: losses, norms and polars, all over ``s_b``."""

    at: Evaluation
    images: dict[int, Tensor]
    """``K_b alpha`` of the blocks in use, of those about to enter, and of those that have just left."""
    own: np.ndarray
    """``(B,)`` ``tr(alpha^T K_b alpha)`` of those blocks; zero for others."""
    polars: np.ndarray
    """``(B,)``."""
    primal: float
    gap: float
    """Relative."""


@final
class BlockNewton(Solver):
    """Newton's method over block weights around ridge problems in output space; forms ``N x N`` matrices."""

    name = "block_newton"
    works_on = "sums of Hilbert norms and ridges, on features or kernels of some thousand rows"

    def __init__(self, options: BlockNewtonOptions = BlockNewtonOptions()) -> None:  # noqa: B008  (frozen)
        self.options = options

    def requires(self, objective: Objective) -> str | None:
        """Hilbert norms or ridges, one feature vector a row, rows that fit."""
        return missing(objective, self.options.max_rows)

    def solve(self, objective: Objective, start: Weights, monitor: Monitor) -> None:
        """Minimise from ``start`` until the monitor says to stop."""
        _Run(self.options, Blocks(objective), objective, monitor).go(start)


@final
class _Run:
    """One solve."""

    def __init__(self, options: BlockNewtonOptions, blocks: Blocks, objective: Objective, monitor: Monitor) -> None:
        self.options, self.blocks, self.objective, self.monitor = options, blocks, objective, monitor
        exact = monitor.tolerance < options.single
        self.dtype = objective.like.dtype if exact else torch.float32
        self.ridge = blocks.ridge.numpy()
        self.trust = options.trust
        self.secant: tuple[np.ndarray, np.ndarray, frozenset[int]] | None = None

    # ------------------------------------------------------------------ the outer loop

    def go(self, start: Weights) -> None:
        """Begin at the start's dual point, pass through larger betas where the start is zero, and iterate."""
        options, objective, monitor = self.options, self.objective, self.monitor
        Z = start.Z
        assert not isinstance(Z, (LowRank, Neurons))
        at = objective.evaluate(objective.apply(Z), start=start.intercept)
        point, eta, stages = self._begin(Z, at)
        beta, tolerance = stages.pop(0)
        inner, best, lowest, waited = options.inner_tolerance * tolerance, math.inf, math.inf, 0
        K, (point,) = self._consistent(eta, beta, point)
        for _ in monitor:
            metric = Metric(objective, K, point.outputs)
            steps = {"steps": options.inner_steps, "memory": options.memory}
            point = descend(objective, metric, point, tolerance=inner, **steps)
            look = self._look(point, eta, beta)
            if objective.guard is not None:  # for features this is a product
                value = look.primal if beta == objective.beta else None
                monitor.hold(self.blocks.weights(point.alpha, eta, beta), None, look.at.intercept, value)
            point = Ridge(point.alpha, self._b(look.at), look.at.outputs)
            last = monitor.late or monitor.iteration == monitor.max_iter
            if stages and (look.gap <= tolerance or last):
                previous, (beta, tolerance) = beta, stages[-1] if last else stages.pop(0)
                point, eta = self._predicted(point, eta, previous / beta)
                K, (point,) = self._consistent(eta, beta, point)
                inner, best, lowest, waited = options.inner_tolerance * tolerance, math.inf, math.inf, 0
                self.secant, self.trust = None, options.trust
                if not last:
                    continue
                look = self._look(point, eta, beta)
            waited = 0 if look.gap < 0.9 * best else waited + 1
            best = min(best, look.gap)
            if look.gap <= tolerance or waited >= options.patience or last:
                in_dtype = replace(look.at, V=look.at.V.to(objective.like))
                Z = self.blocks.weights(point.alpha, eta, beta)
                monitor.hold(Z, None, look.at.intercept, look.primal)
                monitor.check(Z, in_dtype)
                inner = max(inner / 10, 1e-15)  # the certificate may want more digits than the estimate
            if monitor.done:
                return
            if waited >= options.patience:
                if self.dtype == objective.like.dtype:
                    monitor.stall()
                    return
                self.dtype, waited = objective.like.dtype, 0
            if look.primal > lowest * (1 + 1e-4):
                self.trust = max(1.2, self.trust**0.6)
            lowest = min(lowest, look.primal)
            if self._inner_dominates(look, beta):
                inner = max(inner / 10, 1e-15)
            eta, step = self._newton(point, eta, look, metric, beta)
            moved = Ridge(point.alpha - step, point.b, point.outputs)
            K, both = self._consistent(eta, beta, point, moved)
            point = min(both, key=self._ridge_value)

    def _begin(self, Z: Tensor, at: Evaluation) -> tuple[Ridge, Tensor, list[tuple[float, float]]]:
        """Return where to begin, and the betas to pass through with the gap to reach at each."""
        options, blocks, objective = self.options, self.blocks, self.objective
        beta, V = objective.beta, at.V.double()
        norms = blocks.norms(Z).numpy()
        goal = (beta, self.monitor.tolerance)
        point = Ridge(-V, self._b(at), at.outputs)
        nothing = torch.zeros(len(norms), dtype=torch.float64)
        if self.ridge.all():
            return point, nothing, [goal]
        if beta * norms.sum() > options.nothing * abs(float(at.value)):  # the solution of a beta near top
            alpha = blocks.shared(Z, V)
            used = ~self.ridge & (norms > 0)
            # near beta for a block in use; where one vanishes it must not count infinitely
            own = self._polars(alpha, used)
            top = float(own.max(initial=0.0))
            if top > 0:
                eta = torch.from_numpy(np.where(self.ridge, 0.0, norms / np.maximum(own, 1e-6 * top)))
                stages = self._stages(top, goal)[1:] or [goal]
                start = Ridge(alpha, point.b, point.outputs)
                return (*self._predicted(start, eta, max(top / stages[0][0], 1.0)), stages)
        polars = self._polars(V)
        top = float(polars[~self.ridge].max())
        if top == 0.0:  # no norm sees a gradient (constant targets or tokens): their blocks stay zero
            return point, nothing, [goal]
        stages = self._stages(max(beta, options.first * top), goal)
        first = stages[0][0]
        start_weights = (
            options.start * (polars / top) ** 4 * max(top / first - 1, 0.0) / blocks.mean_diagonals().numpy()
        )
        eta = torch.from_numpy(np.where(self.ridge, 0.0, start_weights))
        return Ridge(-V * min(1.0, first / top), point.b, point.outputs), eta, stages

    def _stages(self, first: float, goal: tuple[float, float]) -> list[tuple[float, float]]:
        """Return the betas from ``first`` to the goal, ``stride`` apart at most, with the gap to reach at each."""
        options, (beta, _) = self.options, goal
        if first <= beta:
            return [goal]
        count = math.ceil(math.log(first / beta) / math.log(options.stride))
        return [(float(b), options.passing) for b in np.geomspace(first, beta, count + 1)[:-1]] + [goal]

    def _predicted(self, point: Ridge, eta: Tensor, ratio: float) -> tuple[Ridge, Tensor]:
        """Move to a beta ``ratio`` times smaller: outputs hardly change, coefficients shrink as weights grow."""
        return Ridge(point.alpha / ratio, point.b, point.outputs), eta * ratio**self.options.growth

    def _consistent(self, eta: Tensor, beta: float, *points: Ridge) -> tuple[Tensor, list[Ridge]]:
        """Return the kernel at these block weights, and the points with the outputs that they have there."""
        K = self.blocks.combined(eta, beta, self.dtype)
        return K, [Ridge(at.alpha, at.b, times(K, at.alpha.to(K)).double() + at.b) for at in points]

    def _look(self, point: Ridge, eta: Tensor, beta: float) -> _Look:
        """Evaluate losses, norms and polars exactly, and estimate the gap."""
        objective, blocks = self.objective, self.blocks
        k = blocks.coefficients(eta, beta)
        images = {b: blocks.product(b, point.alpha) for b in range(len(k)) if k[b] > 0}
        outputs = sum((k[b] * image for b, image in images.items()), torch.zeros_like(point.outputs))
        at = objective.evaluate(outputs, start=point.b)
        V = at.V.double()
        polars = self._polars(V)
        own = np.zeros(len(k))
        for b, image in images.items():
            own[b] = blocks.squared(b, point.alpha, image)
        weights = eta.numpy()
        norms = float((weights * np.sqrt(own))[~self.ridge].sum())
        # of a ridge: beta s k^2 <alpha, K alpha> / 2 with k = 1 / (beta s), and its conjugate <V, K V> / (2 beta s)
        scale = blocks.scale.numpy()
        half = float((own * scale)[self.ridge].sum()) / (2 * beta)
        primal = float(at.value) + beta * norms + half
        top = polars[~self.ridge].max() if not self.ridge.all() else 0.0
        limit = min(1.0, beta / top) if top > 0 else 1.0
        if self.ridge.any():
            cost = float((polars**2 * scale)[self.ridge].sum()) / (2 * beta)
            dual = objective.offset - float(
                objective.rows.dot(objective.sample_weight, objective.loss.conjugate(limit * at.U, objective.targets))
            )
            dual -= limit**2 * cost
        else:
            dual, _ = dual_value(objective, at, beta / top if top > 0 else math.inf)
        entering = max(0.999 * beta, 0.97 * top)
        used = self.secant[0] > 0 if self.secant is not None else np.zeros(len(k), dtype=bool)
        for b in range(len(k)):  # a block that has just left still counts in the change of the gradient
            if k[b] <= 0 and (polars[b] > entering or used[b]):
                images[b] = blocks.product(b, point.alpha)
                own[b] = blocks.squared(b, point.alpha, images[b])
        gap = (primal - dual) / max(abs(primal), 1e-300)
        return _Look(at, images, own, polars, primal, gap if math.isfinite(gap) else math.inf)

    def _polars(self, V: Tensor, which: np.ndarray | None = None) -> np.ndarray:
        """``(B,)``, zero for blocks that are not asked for."""
        blocks = self.blocks
        asked = range(len(blocks.grams)) if which is None else np.flatnonzero(which).tolist()
        found = np.zeros(len(blocks.grams))
        for b in asked:
            found[b] = math.sqrt(blocks.squared(b, V, blocks.product(b, V)))
        return found

    def _inner_dominates(self, look: _Look, beta: float) -> bool:
        """Tell whether the coefficients' own norms are near beta while the gradient's polars are not."""
        if self.ridge.all():
            return True
        own = math.sqrt(look.own[~self.ridge].max())
        return abs(own / beta - 1) < abs(look.polars[~self.ridge].max() / beta - 1) / 2

    # ------------------------------------------------------------------ the block weights

    def _newton(self, point: Ridge, eta: Tensor, look: _Look, metric: Metric, beta: float) -> tuple[Tensor, Tensor]:
        """Return block weights after a projected Newton step, and how coefficients will change: ``alpha - step``.

        ``H_ab = <K_a alpha, (D^-1 + K)^-1 K_b alpha>`` is about the Hessian of ``J``, corrected by the last secant pair;
        the equation solved is ``1 / polar_b = 1 / beta``, in a box around the present weights.
        """
        active = np.array(sorted(b for b in look.images if not self.ridge[b]), dtype=int)
        if not len(active):
            return eta, torch.zeros_like(point.alpha)
        rows, scale = self.objective.rows, self.blocks.scale
        images = [look.images[b] / float(scale[b]) ** 2 for b in active]
        solved = metric.solve(torch.cat(images, 1))[0].split(images[0].shape[1], 1)
        H = np.array([[float(rows.dot(image, step)) for step in solved] for image in images])
        H = (H + H.T) / 2
        weights, own = eta.numpy(), np.maximum(look.own, 1e-300)
        gradient = 0.5 * (beta**2 - own)
        noise = 0.5 * np.abs(look.own - look.polars**2)  # at the optimum of the inner problem both are the same
        H = self._corrected(H, weights, gradient, noise, active)
        new = weights.copy()
        new[active] = self._boxed(H, weights[active], own[active], beta)
        self.secant = (weights, gradient, frozenset(active.tolist()))
        step = torch.zeros_like(point.alpha)
        for x, a in zip(new[active] - weights[active], solved, strict=True):
            step += float(x) * a
        return torch.from_numpy(new), step

    def _corrected(
        self, H: np.ndarray, eta: np.ndarray, gradient: np.ndarray, noise: np.ndarray, active: np.ndarray
    ) -> np.ndarray:
        """Correct the curvature by that of the last step, unless the error of the inner problem hides it."""
        if self.secant is None:
            return H
        before, slope, known = self.secant
        d, change = (eta - before)[active], (gradient - slope)[active]
        if np.linalg.norm(change) < self.options.signal * np.linalg.norm(noise[active]):
            return H
        q, curvature = float(d @ H @ d), float(d @ change)
        if not (q > 0 and curvature > 0.05 * q and known.issuperset(active.tolist())):
            return H
        H = H * np.clip(curvature / q, 0.1, 3.0)
        Hd = H @ d
        return H - np.outer(Hd, Hd) / (d @ Hd) + np.outer(change, change) / curvature

    def _boxed(self, H: np.ndarray, eta: np.ndarray, own: np.ndarray, beta: float) -> np.ndarray:
        """Solve the model in a box: a factor of ``trust`` either way, or from and to zero for small shares."""
        options = self.options
        norm = np.sqrt(own)
        H = H + (1e-6 * np.diag(np.diag(H)) + 1e-300 * np.eye(len(H)))
        share = eta * norm / max(float((eta * norm).sum()), 1e-300)
        small = share < options.small_share
        total = max(float(eta.sum()), 1e-12)
        low = np.where(small, 0.0, eta / self.trust)
        high = np.where(small, eta + 0.05 * self.trust * total, eta * self.trust) + 1e-12 * total
        try:
            L = np.linalg.cholesky(H)
        except np.linalg.LinAlgError:
            L = np.diag(np.sqrt(np.maximum(np.diag(H), 1e-300)))
        target = np.linalg.solve(L, H @ eta + own * (norm / beta - 1))
        found = lsq_linear(L.T, target, bounds=(low, high), method="bvls").x
        return np.where(found < 1e-7 * eta.max(initial=0.0), 0.0, found)

    def _ridge_value(self, point: Ridge) -> float:
        objective = self.objective
        values = objective.loss.value(point.outputs, objective.targets)
        own = objective.rows.dot(point.alpha, point.outputs - point.b)
        return float(objective.rows.dot(objective.sample_weight, values)) + 0.5 * float(own)

    def _b(self, at: Evaluation) -> Tensor:
        return at.outputs.new_zeros(at.outputs.shape[1]) if at.intercept is None else at.intercept
