"""The same programs, written down a second time: NumPy loops from the definitions, CVXPY for the optimum.

Nothing here uses the library's operators, gauges or losses. A program is a list of blocks: with features
``phi: (R, B, d)`` the outputs are ``f_r = sum_b phi[r, b]^T Z_b + intercept`` with ``Z: (B, d, c)``; a block is a token
(attention), a gate (MLP) or both.
"""

from dataclasses import dataclass
from typing import Any

import cvxpy as cp
import numpy as np

DELTA = 1.0  # of the Huber loss


@dataclass(frozen=True)
class Program:
    """``min_{Z, b} sum_r w_r L(f_r, y_r) + beta g(Z)``."""

    phi: np.ndarray
    Y: np.ndarray
    w: np.ndarray
    loss: str
    penalty: str
    beta: float
    intercept: bool
    delta: float = DELTA

    def objective(self, Z: np.ndarray, b: np.ndarray | None = None) -> float:
        """The primal value, term by term."""
        R, B, _ = self.phi.shape
        total = 0.0
        for r in range(R):
            f = sum(self.phi[r, k] @ Z[k] for k in range(B))
            f = f if b is None else f + b
            total += self.w[r] * sample_loss(self.loss, f, self.Y[r], self.delta)
        return total + self.beta * penalty_value(self.penalty, Z)

    def optimum(self) -> float:
        """The optimal value by an interior-point method; anything but a clean ``optimal`` is an error."""
        (R, B, d), c = self.phi.shape, self.Y.shape[1]
        Z = [cp.Variable((d, c)) for _ in range(B)]
        F = sum(self.phi[:, k] @ Z[k] for k in range(B))
        if self.intercept:
            F = F + np.ones((R, 1)) @ cp.Variable((1, c))
        problem = cp.Problem(cp.Minimize(self._loss(F) + self.beta * sum(self._penalty(z) for z in Z)))
        value = problem.solve(solver=cp.CLARABEL, tol_gap_abs=1e-9, tol_gap_rel=1e-9, tol_feas=1e-9)
        if problem.status != cp.OPTIMAL:
            raise RuntimeError(f"CVXPY ended with status {problem.status!r}: no reference")
        return float(value)

    def _loss(self, F: cp.Expression) -> cp.Expression:
        rows = {
            "squared": lambda: 0.5 * cp.sum(cp.square(F - self.Y), axis=1),
            "huber": lambda: 0.5 * cp.sum(cp.huber(F - self.Y, self.delta), axis=1),
            "logistic": lambda: cp.sum(cp.logistic(-cp.multiply(self.Y, F)), axis=1),
            "squared_hinge": lambda: 0.5 * cp.sum(cp.square(cp.pos(1 - cp.multiply(self.Y, F))), axis=1),
            "cross_entropy": lambda: cp.log_sum_exp(F, axis=1) - cp.sum(cp.multiply(self.Y, F), axis=1),
        }
        return self.w @ rows[self.loss]()

    def _penalty(self, Z: cp.Variable) -> cp.Expression:
        if self.penalty == "group":
            return cp.sum(cp.norm(Z, 2, axis=0))
        return cp.normNuc(Z) if self.penalty == "nuclear" else 0.5 * cp.sum_squares(Z)


def sample_loss(loss: str, f: np.ndarray, y: np.ndarray, delta: float = DELTA) -> float:
    """The loss of one row."""
    if loss == "squared":
        return 0.5 * float(np.sum((f - y) ** 2))
    if loss == "huber":
        r = np.abs(f - y)
        return float(np.sum(np.where(r <= delta, 0.5 * r**2, delta * r - 0.5 * delta**2)))
    if loss == "logistic":
        return float(np.sum(np.logaddexp(0.0, -y * f)))
    if loss == "squared_hinge":
        return 0.5 * float(np.sum(np.maximum(0.0, 1.0 - y * f) ** 2))
    if loss == "cross_entropy":
        return float(np.logaddexp.reduce(f) - y @ f)
    raise KeyError(loss)


def penalty_value(penalty: str, Z: np.ndarray) -> float:
    """``g(Z)`` for ``Z: (B, d, c)``, block by block."""
    if penalty == "group":
        return float(sum(np.linalg.norm(z[:, l]) for z in Z for l in range(Z.shape[2])))
    if penalty == "nuclear":
        return float(sum(np.linalg.norm(z, "nuc") for z in Z))
    return 0.5 * float(np.sum(Z**2))


def features(model: str, X: np.ndarray, mask: np.ndarray, gates: Any, per_token: bool) -> np.ndarray:
    """``phi: (R, B, d)`` by loops over samples, gates and real tokens."""
    N, s, d = X.shape
    rows = []
    for i in range(N):
        real = [t for t in range(s) if mask[i, t]]
        if model == "attention":
            rows.append(attention_blocks(X[i], real, gates))
        elif per_token:
            rows.extend(gate_blocks(X[i, t], gates) for t in real)
        else:
            rows.append(sum(gate_blocks(X[i, t], gates) for t in real) / len(real))
    return np.array(rows)


def attention_blocks(x: np.ndarray, real: list[int], gates: Any) -> np.ndarray:
    """``1{u1^T X u2 >= 0} x_k`` for every gate and token: ``(g * s, d)``."""
    tokens = np.zeros_like(x)
    for t in real:
        tokens[t] = x[t]
    if gates is None:
        return tokens
    u1, u2 = gates
    return np.concatenate([(float(a @ tokens @ b) >= 0) * tokens for a, b in zip(u1, u2, strict=True)])


def gate_blocks(token: np.ndarray, gates: Any) -> np.ndarray:
    """``1{h^T x >= 0} x`` for every gate: ``(g, d)``."""
    if gates is None:
        return token[None]
    return np.array([(float(h @ token) >= 0) * token for h in gates])


def targets(Y: np.ndarray, loss: str, mask: np.ndarray, per_token: bool) -> np.ndarray:
    """Rows ``(R, c)``: one-hot or probability rows for cross-entropy, real numbers otherwise."""
    rows = np.array([Y[i, t] for i in range(len(Y)) for t in range(mask.shape[1]) if mask[i, t]]) if per_token else Y
    if loss == "cross_entropy" and rows.ndim == 1:
        return np.eye(int(np.max(rows)) + 1)[rows]
    return rows.reshape(len(rows), -1).astype(float)


def program(
    model: str,
    penalty: str,
    X: np.ndarray,
    Y: np.ndarray,
    loss: str,
    beta: float,
    *,
    mask: np.ndarray | None = None,
    sample_weight: np.ndarray | None = None,
    intercept: bool = False,
    gates: Any = None,
    per_token: bool = False,
    delta: float = DELTA,
) -> Program:
    """Write a problem down as blocks."""
    N, s, _ = X.shape
    mask = np.ones((N, s), dtype=bool) if mask is None else mask
    w = np.ones(N) if sample_weight is None else np.asarray(sample_weight, dtype=float)
    if per_token:
        w = np.array([w[i] for i in range(N) for t in range(s) if mask[i, t]])
    phi = features(model, X, mask, gates, per_token)
    return Program(phi, targets(Y, loss, mask, per_token), w, loss, penalty, beta, intercept, delta)


def program_of(case: Any, data: Any, beta: float) -> Program:
    """The program of a ``cases.HeadCase`` on ``cases.Data``."""
    options = {key: value for key, value in data.options.items() if key != "loss"}
    loss = data.options["loss"]
    delta = loss.delta if loss.name == "huber" else DELTA
    return program(
        case.model,
        case.penalty,
        data.X,
        data.Y,
        loss.name,
        beta,
        gates=data.gates,
        per_token=case.per_token,
        delta=delta,
        **options,
    )


def blocks(weights: Any) -> tuple[np.ndarray, np.ndarray | None]:
    """``Z: (B, d, c)`` and the intercept of the library's weights."""
    Z = weights.Z.detach().double().cpu().numpy()
    b = None if weights.intercept is None else weights.intercept.detach().double().cpu().numpy()
    return Z.reshape(-1, *Z.shape[-2:]), b
