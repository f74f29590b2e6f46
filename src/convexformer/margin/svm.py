"""The attention SVM: the matrix of least norm that puts every optimal token first by a margin of one."""

from __future__ import annotations

import math
import numbers
import time
import warnings
from typing import Any, final

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from convexformer.certificates import Certificate
from convexformer.margin.certificate import NotSeparableError, margin_certificate
from convexformer.margin.data import Sequences, check_queries, check_tokens
from convexformer.margin.farkas import residual, shortened
from convexformer.margin.norms import MarginNorm, norm_of
from convexformer.margin.progress import Answer, Limits
from convexformer.solvers.status import Status
from convexformer.threads import few_threads

SUPPORT_SHARE = 1e-6  # multipliers above this fraction of the largest count as support
NO_MARGIN = 1e-9  # margins below this, for rows and weights of norm one, count as rounding errors


@final
class AttentionSVM(BaseEstimator):
    """``min g(W)`` subject to ``(x_i,opt - x_il)^T W z_i >= 1`` for every sequence ``i`` and other token ``l``.

    ``norm="nuclear"``: where training keys and queries separately ends up (Sheen et al. 2024, theorem 5.1, W_*-SVM);
    ``norm="frobenius"``: where training the combined matrix ends up (Tarzanagh et al. 2023, W_F-SVM);
    ``norm="diagonal"``: ``W = diag(b)`` of least ``|b|_1``, for diagonal keys and queries (theorem 4.1, l1-SVM).

    ``tolerance`` is the relative duality gap to certify, in float64. ``device`` is where the solve runs; by default
    where the data is.

    Fitted attributes (NumPy, float64):

    - ``W_: (d, d)``, scaled to a smallest margin of exactly one; ``rank_``; ``objective_ = g(W_)``
    - ``margin_ = 1 / objective_``: the largest margin that weights of norm one can have; the flow's rates are
      ``2 margin_`` (separate, diagonal) and ``margin_^2`` (combined)
    - ``dual_coef_: (n, L)`` the multipliers, scaled to ``polar(A^T lam) = 1`` so that they sum to the dual value
    - ``support_: (k, 2)`` pairs (sequence, token) with a positive multiplier
    - ``optimal_tokens_: (n,)``, ``ties_`` (a dict sequence -> tokens of equal highest score), ``margins_: (n, L)``
    - ``certificate_``: primal ``g(W)/min margin``, dual ``sum(lam)/polar(A^T lam)``; ``n_iter_``, ``seconds_``, ``status_``

    Parameters
    ----------
    norm : {"nuclear", "frobenius", "diagonal"}
        Which ``g``, as above.
    tolerance : float
        The relative duality gap to certify.
    max_iter : int
        Iterations after which the best point so far is kept, with its certificate.
    max_time : float, optional
        Seconds, likewise.
    device : str or torch.device, optional
        Where the solve runs; by default where the data is.
    """

    def __init__(
        self,
        norm: str = "nuclear",
        *,
        tolerance: float = 1e-6,
        max_iter: int = 20_000,
        max_time: float | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        self.norm = norm
        self.tolerance = tolerance
        self.max_iter = max_iter
        self.max_time = max_time
        self.device = device

    W_: np.ndarray
    certificate_: Certificate

    def fit(self, X: Any, z: Any, y: Any, v: Any) -> AttentionSVM:
        """Fit to tokens ``X: (n, L, d)``, queries ``z: (n, d)``, labels ``y: (n,)`` of -1 and +1, head ``v: (d,)``.

        Raises :class:`NotSeparableError`, with a proof, when no matrix puts every optimal token first.
        """
        norm, limits = norm_of(self.norm), self._limits()
        data = Sequences.of(X, z, y, v, device=self.device)
        data.warn_of_ties()
        started = time.perf_counter()
        with torch.no_grad(), few_threads(data.X):
            answer = _solve(norm, data, limits)
            self._keep(norm, data, answer)
        self.seconds_ = time.perf_counter() - started
        if not self.certificate_.meets(limits.tolerance):
            warnings.warn(
                f"the relative gap is {self.certificate_.relative_gap:.2e}, the tolerance {limits.tolerance:.2e} "
                f"({answer.status.name.lower()} after {self.n_iter_} iterations); raise max_iter, max_time or tolerance.",
                ConvergenceWarning,
                stacklevel=2,
            )
        return self

    def attention(self, X: Any, z: Any, *, sharpness: float = 1.0) -> np.ndarray:
        """``(n, L)`` attention probabilities ``softmax(sharpness X W_ z)``; infinite sharpness is the limit of training."""
        tokens, logits = self._logits(X, z)
        if not sharpness > 0:
            raise ValueError(f"sharpness={sharpness} was given; expected a positive number, or math.inf.")
        if math.isinf(sharpness):
            best = (logits == logits.max(1, keepdim=True).values).to(tokens.dtype)
            return (best / best.sum(1, keepdim=True)).numpy()
        return torch.softmax(sharpness * logits, 1).numpy()

    def decision_function(self, X: Any, z: Any, *, sharpness: float = 1.0) -> np.ndarray:
        """``(n,)``: ``v^T X^T softmax(sharpness X W_ z)``; its sign is the predicted label."""
        weights = torch.from_numpy(self.attention(X, z, sharpness=sharpness))
        scores = check_tokens(X, "cpu") @ torch.from_numpy(self.v_)
        return (weights * scores).sum(1).numpy()

    def predict(self, X: Any, z: Any, *, sharpness: float = math.inf) -> np.ndarray:
        """``(n,)`` labels -1 and +1, by hard attention unless told otherwise."""
        return np.where(self.decision_function(X, z, sharpness=sharpness) >= 0, 1, -1)

    def selected_tokens(self, X: Any, z: Any) -> np.ndarray:
        """``(n,)`` the token of highest attention."""
        return self._logits(X, z)[1].argmax(1).numpy()

    # ------------------------------------------------------------------ parts

    def _limits(self) -> Limits:
        if not isinstance(self.tolerance, numbers.Real) or not 0 < float(self.tolerance) < 1:
            raise ValueError(f"tolerance={self.tolerance} was given; expected a relative duality gap such as 1e-6.")
        if not isinstance(self.max_iter, numbers.Integral) or self.max_iter < 1:
            raise ValueError(f"max_iter={self.max_iter} was given; expected a positive whole number.")
        if self.max_time is not None and not self.max_time > 0:
            raise ValueError(f"max_time={self.max_time} was given; expected positive seconds or None.")
        return Limits(float(self.tolerance), int(self.max_iter), math.inf if self.max_time is None else self.max_time)

    def _keep(self, norm: MarginNorm, data: Sequences, answer: Answer) -> None:
        """Scale to a margin of one, certify from the result alone, and keep it as NumPy arrays."""
        operator = norm.operator(data)
        weights = _truncated(norm, data, answer.W, float(self.tolerance))
        weights = weights / operator.apply(weights).min()
        lam = answer.multipliers.clamp_min(0)
        lam = lam / norm.gauge.polar(operator.adjoint(lam)).value
        self.certificate_ = margin_certificate(operator, norm.gauge, weights, lam)
        W = norm.matrix(weights)
        singular = torch.linalg.svdvals(W)
        self.W_ = W.cpu().numpy()
        self.rank_ = int((singular > 1e-9 * singular[0]).sum())
        self.objective_ = float(norm.gauge.value(weights))
        self.margin_ = 1 / self.objective_
        n, L, _ = data.shape
        full = torch.zeros((n, L), dtype=W.dtype, device=W.device)
        self.dual_coef_ = full.scatter(1, data.others, lam.reshape(n, L - 1)).cpu().numpy()
        self.margins_ = full.scatter(1, data.others, operator.apply(weights).reshape(n, L - 1)).cpu().numpy()
        self.support_ = np.argwhere(self.dual_coef_ > SUPPORT_SHARE * self.dual_coef_.max())
        self.optimal_tokens_ = data.optimal.cpu().numpy()
        self.ties_ = data.ties
        self.v_ = data.v.cpu().numpy()
        self.status_ = answer.status
        self.n_iter_ = answer.history[-1].iteration

    def _logits(self, X: Any, z: Any) -> tuple[Tensor, Tensor]:
        check_is_fitted(self, "W_")
        tokens = check_tokens(X, "cpu")
        d = self.W_.shape[0]
        if tokens.shape[2] != d:
            raise ValueError(f"X has tokens of size d={tokens.shape[2]}; this SVM was fitted with d={d}.")
        queries = check_queries(z, tokens)
        return tokens, (tokens @ (queries @ torch.from_numpy(self.W_).mT)[..., None])[..., 0]


def _solve(norm: MarginNorm, data: Sequences, limits: Limits) -> Answer:
    """Solve; if that fails, look for a proof that nothing separates; if there is none, solve with ``solve_again``."""
    answer = norm.solve(data, limits)
    operator, started = norm.operator(data), time.perf_counter()
    if answer.status is Status.CONVERGED and not _inseparable(norm, data, answer):
        return answer
    spent = answer.history[-1].seconds
    proof = norm.prove(data, Limits(1e-3, limits.max_iter, limits.max_time))
    proven = float(operator.apply(proof.W).min())
    if _inseparable(norm, data, proof):
        raise _not_separable(norm, data, proof)
    if not proven > 0:
        bound = residual(operator, norm.gauge, proof.multipliers.clamp_min(0))
        raise RuntimeError(
            f"no separating matrix was found, and no proof that there is none: weights of norm one have a margin of at most "
            f"{bound:.1e}, about the rounding of the data. Remove near-duplicate sequences, or raise max_iter or max_time."
        )
    spent += time.perf_counter() - started
    if norm.solve_again is None or spent >= limits.max_time:
        return answer
    left = Limits(limits.tolerance, limits.max_iter, limits.max_time - spent)
    again = norm.solve_again(data, left, float(torch.linalg.vector_norm(proof.W)) / proven)
    return _better(norm, data, answer, again)


def _better(norm: MarginNorm, data: Sequences, one: Answer, other: Answer) -> Answer:
    """Return the better weights with the better multipliers of two answers."""
    operator = norm.operator(data)
    proofs = [(margin_certificate(operator, norm.gauge, a.W, a.multipliers), a) for a in (one, other)]
    W = min(proofs, key=lambda pair: pair[0].primal)[1].W
    lam = max(proofs, key=lambda pair: pair[0].dual)[1].multipliers
    return Answer(W, lam, other.status, (*one.history, *other.history))


def _no_margin(data: Sequences) -> float:
    """Return the margin that rounding of the constraints may produce."""
    return NO_MARGIN * float((data.differences.norm(dim=2) * data.z.norm(dim=1, keepdim=True)).max())


def _inseparable(norm: MarginNorm, data: Sequences, answer: Answer) -> bool:
    """Tell whether the multipliers prove that no margin exceeds rounding errors, relative to the constraint rows."""
    return residual(norm.operator(data), norm.gauge, answer.multipliers.clamp_min(0)) <= _no_margin(data)


def _not_separable(norm: MarginNorm, data: Sequences, proof: Answer) -> NotSeparableError:
    n, L, _ = data.shape
    operator, lam = norm.operator(data), proof.multipliers.clamp_min(0)
    lam = shortened(operator, norm.gauge, lam, allowed=max(_no_margin(data), residual(operator, norm.gauge, lam)))
    lam = lam / lam.sum()
    left = residual(operator, norm.gauge, lam)
    lam = lam.reshape(n, L - 1)
    share = lam.sum(1)
    sequences = tuple(int(i) for i in (share > 1e-9 * share.max()).nonzero().flatten())
    farkas = torch.zeros((n, L), dtype=lam.dtype, device=lam.device).scatter(1, data.others, lam)
    kind = "diagonal attention matrix" if norm.diagonal else "attention matrix"
    shown = ", ".join(str(i) for i in sequences[:8]) + (", ..." if len(sequences) > 8 else "")
    tied = f" Sequences {sorted(data.ties)[:8]} have tied optimal tokens." if data.ties else ""
    advice = 'norm="nuclear" has d times as many weights' if norm.diagonal else "wider tokens separate more easily"
    message = (
        f"no {kind} puts every optimal token first: the constraints of sequences {shown} contradict each other. The "
        f"nonnegative combination of their constraints in .farkas sums to one and vanishes up to {left:.1e}, so no "
        f"margin above that is possible.{tied} Drop one of these sequences, or change v or the tokens ({advice})."
    )
    return NotSeparableError(message, farkas.cpu().numpy(), sequences, left)


def _truncated(norm: MarginNorm, data: Sequences, weights: Tensor, tolerance: float) -> Tensor:
    """Drop singular values that are solver noise: the lowest rank that costs at most a hundredth of the tolerance."""
    if norm.diagonal:
        return weights
    operator = norm.operator(data)
    U, sizes, Vh = torch.linalg.svd(weights)
    allowed = float(norm.gauge.value(weights) / operator.apply(weights).min()) * (1 + 0.01 * tolerance)
    for rank in range(1, int((sizes > 1e-3 * tolerance * sizes[0]).sum()) + 1):
        if float(sizes[rank - 1]) > 1e2 * tolerance * float(sizes[0]) and rank < len(sizes):
            continue  # this singular value is far above the noise
        low = (U[:, :rank] * sizes[:rank]) @ Vh[:rank]
        least = float(operator.apply(low).min())
        if least > 0 and float(norm.gauge.value(low)) / least <= allowed:
            return low
    return weights
