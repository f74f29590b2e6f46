"""The result of a gradient flow: its records, and the quantities computed from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import final

import numpy as np
import torch
from torch import Tensor

from convexformer.certificates import Certificate
from convexformer.margin.certificate import margin_certificate
from convexformer.margin.data import Sequences
from convexformer.margin.kkt import Residuals, approximate_kkt, misalignment
from convexformer.margin.norms import norm_of
from convexformer.margin.pull import log_excess
from convexformer.margin.svm import AttentionSVM


@final
@dataclass(frozen=True)
class Flow:
    """Records of a flow, each a NumPy array whose first axis is the record, then ``R`` if a batch was run.

    - ``times``: normalised time tau; ``log_time``: the natural logarithm of physical time (minus infinity at the start)
    - ``W: (T, d, d)`` and ``factors``, the trained weights by name
    - ``loss``, ``log_excess_loss`` (``log(L - L*)``), ``margin`` (definition 4.1), ``margins: (T, n, L-1)``
    - ``direction = W / margin``, NaN while the margin is not positive
    - ``nuclear_norm``, ``frobenius_norm``, ``singular_values``, ``misalignment`` (definition 5.1), ``kkt`` (C1 to C3)
    """

    data: Sequences = field(repr=False)
    parametrization: str
    norm: str
    exponential: bool
    n_steps: int
    _tau: Tensor = field(repr=False)
    _log_time: Tensor = field(repr=False)
    _W: Tensor = field(repr=False)
    _impulse: Tensor = field(repr=False)
    _factors: dict[str, Tensor] = field(repr=False)

    # ------------------------------------------------------------------ records

    @property
    def times(self) -> np.ndarray:
        """Normalised time ``tau``, ``dtau = sum|c| dt``."""
        return self._tau.numpy()

    @property
    def log_time(self) -> np.ndarray:
        """Natural logarithm of physical time."""
        return self._log_time.numpy()

    @property
    def W(self) -> np.ndarray:
        """``(T, d, d)`` the combined attention matrix."""
        return self._W.numpy()

    @property
    def factors(self) -> dict[str, np.ndarray]:
        """Return the trained weights by name: K and Q, W, k and q, or plus and minus."""
        return {name: value.numpy() for name, value in self._factors.items()}

    @cached_property
    def margins(self) -> np.ndarray:
        """``(T, n, L-1)``: ``(x_opt - x_l)^T W z``."""
        return self._margins.numpy()

    @cached_property
    def margin(self) -> np.ndarray:
        """``(T,)`` the smallest margin ``mu(W)`` (definition 4.1)."""
        return self._margins.flatten(-2).amin(-1).numpy()

    @cached_property
    def direction(self) -> np.ndarray:
        """``(T, d, d)``: ``W / mu(W)`` (definition 4.1); NaN while some optimal token is not first."""
        mu = torch.from_numpy(self.margin)
        mu = torch.where(mu > 0, mu, torch.full_like(mu, torch.nan))
        return (self._W / mu[..., None, None]).numpy()

    @cached_property
    def log_excess_loss(self) -> np.ndarray:
        """``log(L - L*)``, finite also where ``L`` and ``L*`` agree in float64."""
        return log_excess(self.data, self._margins).numpy()

    @cached_property
    def loss(self) -> np.ndarray:
        """``L = 1/n sum_i exp(-gamma_i^T sigma_i)``."""
        return self.data.infimum + np.exp(self.log_excess_loss)

    @cached_property
    def singular_values(self) -> np.ndarray:
        """``(T, d)`` of ``W``, largest first."""
        return torch.linalg.svdvals(self._W).numpy()

    @cached_property
    def nuclear_norm(self) -> np.ndarray:
        """``||W||_*``."""
        return self.singular_values.sum(-1)

    @cached_property
    def frobenius_norm(self) -> np.ndarray:
        """``||W||_F``."""
        return torch.linalg.vector_norm(self._W, dim=(-2, -1)).numpy()

    @cached_property
    def misalignment(self) -> np.ndarray:
        """How far K and Q are from definition 5.1: the sine of the largest angle, zero when aligned."""
        if "K" not in self._factors:
            raise AttributeError('alignment is a property of keys and queries; use parametrization="separate".')
        return misalignment(self.data, self._factors["K"], self._factors["Q"]).numpy()

    @cached_property
    def multipliers(self) -> np.ndarray:
        """``(T, n, L-1)`` the paper's dual variables: ``2/ln(mu) int c dt`` for factors, ``1/mu int c dt`` for ``W``."""
        return self._multipliers.numpy()

    @cached_property
    def kkt(self) -> Residuals:
        """Approximate KKT residuals of the margin-normalised direction, C1 to C3 of appendix A.5, as series."""
        return approximate_kkt(self.norm, self.data, torch.from_numpy(self.direction), self._multipliers)

    @cached_property
    def recent_kkt(self) -> Residuals:
        """The same with multipliers since the last record only, which the start of the flow influences far less."""
        mu, impulse = torch.from_numpy(self.margin), self._impulse
        height = torch.where(mu > 0, mu, torch.full_like(mu, torch.nan)).log() if self.exponential else mu
        scale = (2.0 if self.exponential else 1.0) / height.diff(dim=0)
        lam = impulse.diff(dim=0) * scale[..., None, None]
        lam = torch.cat([torch.full_like(lam[:1], torch.nan), lam])
        return approximate_kkt(self.norm, self.data, torch.from_numpy(self.direction), lam)

    @property
    def selected_tokens(self) -> np.ndarray:
        """``(n,)`` the token that each sequence's attention ends at; compare with ``optimal_tokens``."""
        last = self._margins[-1]
        worst = last.argmin(-1, keepdim=True)
        wrong = last.gather(-1, worst)[..., 0] < 0
        other = self.data.others.expand(*last.shape).gather(-1, worst)[..., 0]
        return torch.where(wrong, other, self.data.optimal).numpy()

    @property
    def optimal_tokens(self) -> np.ndarray:
        """``(n,)`` the tokens of highest score."""
        return self.data.optimal.numpy()

    # ------------------------------------------------------------------ comparisons

    def distance_to(self, svm: AttentionSVM, *, along: bool = False) -> float | np.ndarray:
        """``||direction - W_svm||_F / ||W_svm||_F`` at the end, or at every record with ``along=True``.

        One number, or one for each start of a batch. NaN where the flow does not separate.
        """
        distance = np.linalg.norm(self.direction - svm.W_, axis=(-2, -1)) / np.linalg.norm(svm.W_)
        return distance if along else _last(distance)

    def suboptimality(self, svm: AttentionSVM, *, along: bool = False) -> float | np.ndarray:
        """``g(W) / mu(W) / g(W_svm) - 1`` in the SVM's own norm: zero iff the direction is optimal, unique or not."""
        gauge = norm_of(svm.norm).gauge
        directions = torch.from_numpy(self.direction)
        flat = directions.reshape(-1, *directions.shape[-2:])
        values = [float(gauge.value(W)) if bool(torch.isfinite(W).all()) else np.nan for W in flat]
        excess = np.array(values).reshape(self.margin.shape) / svm.objective_ - 1
        return excess if along else _last(excess)

    def rate(self, share: float = 0.3) -> float | np.ndarray:
        """``d ln(mu)/d tau`` (factors) or ``d mu/d tau`` (combined), over the last ``share`` of the recorded range.

        Theory: ``2 / ||W*||_*`` (separate), ``2 / |b*|_1`` (diagonal), ``1 / ||W_F||_F^2`` (combined).
        """
        with np.errstate(invalid="ignore", divide="ignore"):
            height = np.log(self.margin) if self.exponential else self.margin
        first = min(int((1 - share) * len(height)), len(height) - 2)
        return _last((height[first:] - height[first]) / (self.times[first:] - self.times[first] + 1e-300))

    def expected_rate(self, svm: AttentionSVM) -> float:
        """Return the rate that the theory predicts from the margin of the SVM."""
        return 2 * svm.margin_ if self.exponential else svm.margin_**2

    def certificate(self, index: int = -1) -> Certificate:
        """Certify the direction at a record against its SVM, with the flow's own pulls since the last record as dual point.

        No SVM is solved: any nonnegative multipliers bound the optimum, and the accumulated pulls of the flow are good ones.
        """
        if self._W.ndim != 3:
            raise ValueError("the flow has a batch axis; certify one start at a time, without n_init.")
        norm = norm_of(self.norm)
        operator, index = norm.operator(self.data), range(len(self._W))[index]
        recent = self._impulse[index] - (self._impulse[index - 1] if index > 0 else 0)
        weights = norm.weights(self._W[index])
        proofs = [
            margin_certificate(operator, norm.gauge, weights, lam.reshape(operator.output_shape))
            for lam in (recent, self._impulse[index])
        ]
        return max(proofs, key=lambda proof: proof.dual)

    # ------------------------------------------------------------------ parts

    @cached_property
    def _margins(self) -> Tensor:
        return self.data.operator().apply(self._W)

    @cached_property
    def _multipliers(self) -> Tensor:
        mu = torch.from_numpy(self.margin)
        scale = 2 / mu.log() if self.exponential else 1 / mu
        usable = mu > 1 if self.exponential else mu > 0
        scale = torch.where(usable, scale, torch.full_like(scale, torch.nan))
        return self._impulse * scale[..., None, None]


def _last(series: np.ndarray) -> float | np.ndarray:
    return float(series[-1]) if series.ndim == 1 else series[-1]
