"""The same programs, written down a second time: NumPy loops from the definitions, CVXPY for the optimum.

Nothing here uses the library's operators, gauges or losses. A ``Program`` is a list of blocks: with features
``phi: (R, B, d)`` the outputs are ``f_r = sum_b phi[r, b]^T Z_b + intercept`` with ``Z: (B, d, c)``; a block is a token
(attention), a gate (MLP) or both. A ``Design`` is any head, by the outputs of its unit atoms; only its optimal value is
compared, so the order of rows and columns of ``Z`` does not matter.
"""

import warnings
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
        """The optimal value."""
        _, B, d = self.phi.shape
        Z = [cp.Variable((d, self.Y.shape[1])) for _ in range(B)]
        F = sum(self.phi[:, k] @ Z[k] for k in range(B))
        return minimum(self, F, [(self.penalty, z) for z in Z])


@dataclass(frozen=True)
class Design:
    """The same for any head: ``f_r[l] = sum_b <A_b[r, l], Z_b>`` with ``A_b: (R, c, p, q)``; each block has its penalty."""

    A: list[np.ndarray]
    penalties: list[str]
    Y: np.ndarray
    w: np.ndarray
    loss: str
    beta: float
    intercept: bool
    delta: float = DELTA

    def optimum(self) -> float:
        """The optimal value."""
        Z = [cp.Variable(a.shape[2:]) for a in self.A]
        R, c = self.Y.shape
        flat = sum(a.reshape(R * c, -1) @ cp.vec(z, order="C") for a, z in zip(self.A, Z, strict=True))
        F = cp.reshape(flat, (R, c), order="C")
        return minimum(self, F, list(zip(self.penalties, Z, strict=True)))


def minimum(program: Any, F: cp.Expression, parts: list[tuple[str, cp.Variable]]) -> float:
    """Minimise by an interior-point method; anything but a clean ``optimal`` is an error."""
    R, c = program.Y.shape
    if program.intercept:
        F = F + np.ones((R, 1)) @ cp.Variable((1, c))
    Y = program.Y
    rows = {
        "squared": lambda: 0.5 * cp.sum(cp.square(F - Y), axis=1),
        "huber": lambda: 0.5 * cp.sum(cp.huber(F - Y, program.delta), axis=1),
        "logistic": lambda: cp.sum(cp.logistic(-cp.multiply(Y, F)), axis=1),
        "squared_hinge": lambda: 0.5 * cp.sum(cp.square(cp.pos(1 - cp.multiply(Y, F))), axis=1),
        "cross_entropy": lambda: cp.log_sum_exp(F, axis=1) - cp.sum(cp.multiply(Y, F), axis=1),
    }
    gauge = {
        "group": lambda Z: cp.sum(cp.norm(Z, 2, axis=0)),
        "nuclear": cp.normNuc,
        "ridge": lambda Z: 0.5 * cp.sum_squares(Z),
    }
    penalty = sum(gauge[name](Z) for name, Z in parts)
    problem = cp.Problem(cp.Minimize(program.w @ rows[program.loss]() + program.beta * penalty))
    for tolerance in (1e-9, 1e-8):  # an interior-point method may miss its last digit; an inaccurate answer is none
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            options = {"tol_gap_abs": tolerance, "tol_gap_rel": tolerance, "tol_feas": tolerance}
            value = problem.solve(solver=cp.CLARABEL, **options)
        if problem.status == cp.OPTIMAL:
            break
    else:
        raise RuntimeError(f"CVXPY ended with status {problem.status!r}: no reference")
    return float(value)


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
    N, s, _ = X.shape
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


def program_of(case: Any, data: Any, beta: float) -> Program | Design:
    """The program of a ``cases.HeadCase`` on ``cases.Data``."""
    options = {key: value for key, value in data.options.items() if key != "loss"}
    loss = data.options["loss"]
    options |= {"gates": data.gates, "per_token": case.per_token}
    options["delta"] = loss.delta if loss.name == "huber" else DELTA
    if case.model in ("attention", "mlp", "linear"):
        return program(case.model, case.penalty, data.X, data.Y, loss.name, beta, **options)
    gates = options.pop("gates")
    plain = program("linear", "ridge", data.X, data.Y, loss.name, beta, **options)  # for its targets and weights
    outputs, mask = plain.Y.shape[1], data.options.get("mask")
    A, penalties = design(case.model, data.X, outputs, mask, case.per_token, gates, **case.extra)
    return Design(A, penalties, plain.Y, plain.w, loss.name, beta, plain.intercept, plain.delta)


# ---------------------------------------------------------------------- the other heads: outputs of unit atoms


def design(
    model: str, X: np.ndarray, c: int, mask: np.ndarray | None, per_token: bool, gates: Any = None, **extra: Any
) -> tuple[list[np.ndarray], list[str]]:
    """``A_b: (R, c, p, q)`` for every block, sample by sample from the definition of one atom."""
    mask = np.ones(X.shape[:2], dtype=bool) if mask is None else mask
    rows: list[list[np.ndarray]] = []
    for x, real in zip(X, mask, strict=True):
        clean = np.where(real[:, None], x, 0.0)
        blocks = ATOMS[model](clean, real, c, gates, **extra)  # each (s, c, p, q)
        rows.append([block[real] if per_token else block[real].mean(0, keepdims=True) for block in blocks])
    A = [np.concatenate(parts) for parts in zip(*rows, strict=True)]
    return A, ["group"] * X.shape[1] + ["nuclear"] if model == "sum" else ["nuclear"] * len(A)


def self_attention_atoms(x, real, c, gates):
    """``(D . (X W1 X^T)) X W2`` for ``W1 = e_a e_b^T``, ``W2 = e_k e_l^T``."""
    s, d = x.shape
    blocks = []
    for D in [np.ones((s, s))] if gates is None else [(x @ H @ x.T >= 0) for H in gates]:
        A = np.zeros((s, c, d * d, d * c))
        for a in range(d):
            for b in range(d):
                hidden = (D * np.outer(x[:, a], x[:, b])) @ x  # (s, d)
                for k in range(d):
                    for l in range(c):
                        A[:, l, a * d + b, k * c + l] = hidden[:, k]
        blocks.append(A)
    return blocks


def block_self_attention_atoms(x, real, c, gates, blocks=((1,), (0,))):
    """``(X W1 X^T) X W2`` for ``W1 = e_a e_b^T``, ``W2 = e_k e_l^T`` with ``b`` and ``k`` in the same block of channels."""
    (s, d), out = x.shape, []
    for block in blocks:
        A = np.zeros((s, c, len(block) * d, len(block) * c))
        for a in range(d):
            for i, b in enumerate(block):
                hidden = np.outer(x[:, a], x[:, b]) @ x  # (s, d)
                for j, k in enumerate(block):
                    for l in range(c):
                        A[:, l, i * d + a, j * c + l] = hidden[:, k]
        out.append(A)
    return out


def mixer_atoms(x, real, c, gates):
    """``(D . (W1 X)) W2`` for ``W1 = e_o e_t^T``, ``W2 = e_k e_l^T``."""
    s, d = x.shape
    blocks = []
    for D in [np.ones((s, d))] if gates is None else [(H @ x >= 0) for H in gates]:
        A = np.zeros((s, c, s * s, d * c))
        for o in range(s):
            for t in range(s):
                for k in range(d):
                    for l in range(c):
                        A[o, l, o * s + t, k * c + l] = D[o, k] * x[t, k]
        blocks.append(A)
    return blocks


def shifts(x, grid):
    """``roll(X, u)`` for every shift u, 2-D ones on a grid: ``(s, s, d)``, the shift first."""
    s, d = x.shape
    h, w = grid or (s, 1)
    field = x.reshape(h, w, d)
    return np.array([np.roll(field, (i, j), axis=(0, 1)).reshape(s, d) for i in range(h) for j in range(w)])


def fno_atoms(x, real, c, gates, grid=None):
    """``D . (circ(X) w1) w2^T`` for unit ``w1``, ``w2``."""
    return block_fno_atoms(x, real, c, None if gates is None else gates[None], blocks=1, grid=grid)


def block_fno_atoms(x, real, c, gates, blocks=2, grid=None):
    """The same on every block of channels, which writes its own block of outputs."""
    s, db, cb = len(x), x.shape[1] // blocks, c // blocks
    out = []
    for block in range(blocks):
        rolled = shifts(x[:, block * db : (block + 1) * db], grid)  # (u, o, a)
        circ = rolled.transpose(1, 0, 2).reshape(s, s * db)
        for D in [np.ones(s)] if gates is None else [(circ @ h.ravel() >= 0) for h in gates[block]]:
            A = np.zeros((s, c, s * db, cb))
            for l in range(cb):
                A[:, block * cb + l, :, l] = D[:, None] * circ
            out.append(A)
    return out


def token_atoms(h, c, gates):
    """``D . (h(X) w1) w2^T`` for unit ``w1``, ``w2``."""
    out = []
    for D in [np.ones(len(h))] if gates is None else [(h @ g >= 0) for g in gates]:
        A = np.zeros((len(h), c, h.shape[1], c))
        for l in range(c):
            A[:, l, :, l] = D[:, None] * h
        out.append(A)
    return out


def poolformer_atoms(x, real, c, gates, window=3, grid=None):
    """``h(X)_t``: the mean over the real tokens no further than ``window // 2`` from t, along each axis."""
    s = len(x)
    w = 1 if grid is None else grid[1]
    place = np.array([(t // w, t % w) for t in range(s)])
    mixed = np.zeros_like(x)
    for t in range(s):
        near = real & (np.abs(place - place[t]).max(1) <= window // 2)
        mixed[t] = x[near].mean(0) if near.any() else 0.0
    return token_atoms(mixed, c, gates)


def fnet_atoms(x, real, c, gates):
    """``h(X) = Re(F_s X F_d^T)``, matrices of the transform written out."""
    F_s, F_d = (np.exp(-2j * np.pi * np.outer(np.arange(n), np.arange(n)) / n) for n in x.shape)
    return token_atoms((F_s @ x @ F_d.T).real, c, gates)


def sum_atoms(x, real, c, gates):
    """Attention (a block a token) and an MLP on the mean token, added: the same output for every token."""
    s = len(x)
    mean = token_atoms(np.repeat(x[real].mean(0, keepdims=True), s, 0), c, None)
    return [token_atoms(np.repeat(x[k : k + 1], s, 0), c, None)[0] for k in range(s)] + mean


ATOMS = {
    "self_attention": self_attention_atoms,
    "mlp_mixer": mixer_atoms,
    "fno": fno_atoms,
    "block_fno": block_fno_atoms,
    "poolformer": poolformer_atoms,
    "fnet": fnet_atoms,
    "sum": sum_atoms,
    "block_self_attention": block_self_attention_atoms,
}


def blocks(weights: Any) -> tuple[np.ndarray, np.ndarray | None]:
    """``Z: (B, d, c)`` and the intercept of the library's weights."""
    Z = weights.dense().detach().double().cpu().numpy()
    b = None if weights.intercept is None else weights.intercept.detach().double().cpu().numpy()
    return Z.reshape(-1, *Z.shape[-2:]), b
