"""The inner loops of block coordinate descent, compiled with numba; everything here is plain arrays and numbers.

Groups are numbered ``j``; group ``j`` is the column ``z_j: (d,)`` of token ``token[j]``, gate ``gate[j]`` and output
``output[j]``. Its features are ``X[token[j]]: (N, d)``, of which the gate keeps ``rows[first[gate] : first[gate + 1]]``.
``R: (c, N)`` holds the residuals ``sqrt(w) (f - y)``; the rows of ``X`` carry the same ``sqrt(w)``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

try:
    from numba import njit
except ImportError:  # pragma: no cover  (the solver is then not offered, see ``available``)

    def njit(*args: Any, **options: Any) -> Any:  # type: ignore[no-redef]
        """Stand in for the compiler, so that the module can be imported."""
        return args[0] if args else lambda function: function

    available = False
else:
    available = True

NEWTON_STEPS = 50
GATHERED_ROWS = 4096  # rows gathered at a time


@njit(cache=True, nogil=True)
def load(source: Any, tokens: Any, root: Any, X: Any) -> None:
    """``X[k] = root * source[:, k]`` for each of the tokens, sample by sample: the source is read in its own order."""
    for n in range(source.shape[0]):
        for k in tokens:
            for a in range(source.shape[2]):
                X[k, n, a] = source[n, k, a] * root[n]


@njit(cache=True, fastmath=True, nogil=True)
def _gradient(X: Any, rows: Any, r: Any, g: Any) -> None:
    """``g = X[rows]^T r[rows]``, two rows at a time: the fastest of the unrollings tried, near memory bandwidth."""
    d = g.shape[0]
    for a in range(d):
        g[a] = 0.0
    pairs = rows.shape[0] // 2 * 2
    for i in range(0, pairs, 2):
        n0, n1 = rows[i], rows[i + 1]
        r0, r1 = r[n0], r[n1]
        for a in range(d):
            g[a] += X[n0, a] * r0 + X[n1, a] * r1
    for i in range(pairs, rows.shape[0]):
        n = rows[i]
        for a in range(d):
            g[a] += X[n, a] * r[n]


@njit(cache=True, fastmath=True, nogil=True)
def _move(X: Any, rows: Any, step: Any, r: Any, root: Any, total: float) -> None:
    """``r += X step`` on the gate's rows; with an intercept (``total > 0``) its best value follows."""
    shift = 0.0
    for n in rows:
        t = 0.0
        for a in range(step.shape[0]):
            t += X[n, a] * step[a]
        r[n] += t
        shift += root[n] * t
    if total > 0.0:
        shift /= total
        for n in range(r.shape[0]):
            r[n] -= root[n] * shift


@njit(cache=True, fastmath=True, nogil=True)
def _target(U: Any, values: Any, g: Any, z: Any, q: Any) -> float:
    """``q = U^T (Gram z - g)``, in the eigenbasis ``U``; return its squared norm."""
    d = q.shape[0]
    turned = np.zeros(d)
    for a in range(d):
        q[a] = 0.0
    for e in range(d):
        ge, ze = g[e], z[e]
        for a in range(d):
            q[a] -= U[e, a] * ge
            turned[a] += U[e, a] * ze
    square = 0.0
    for a in range(d):
        q[a] += values[a] * turned[a]
        square += q[a] * q[a]
    return square


@njit(cache=True, fastmath=True, nogil=True)
def _turn_back(U: Any, q: Any, z: Any) -> None:
    """``z = U q``."""
    for a in range(z.shape[0]):
        t = 0.0
        for e in range(q.shape[0]):
            t += U[a, e] * q[e]
        z[a] = t


@njit(cache=True, nogil=True)
def _length(q: Any, values: Any, beta: float, start: float) -> float:
    """Return ``nu = |z|`` of the block minimiser: the root of ``sum q_a^2 / (lambda_a nu + beta)^2 = 1``.

    Newton's method on ``1/sqrt(sum) - 1``, which is nearly linear in ``nu``; it rises to the root from the left.
    """
    nu = start
    for _ in range(NEWTON_STEPS):
        total, slope = 0.0, 0.0
        for a in range(q.shape[0]):
            e = 1.0 / (values[a] * nu + beta)
            t = q[a] * q[a] * e * e
            total += t
            slope += t * values[a] * e
        if slope <= 0.0:
            break
        # phi = total^(-1/2) - 1 rises with derivative slope * total^(-3/2)
        move = total * (np.sqrt(total) - 1.0) / slope
        nu = max(nu + move, 0.0)
        if abs(move) <= 1e-13 * nu:
            break
    return nu


@njit(cache=True, fastmath=True, nogil=True)
def _add_gram(X: Any, rows: Any, gram: Any) -> None:
    """``gram += X[rows]^T X[rows]``."""
    d = gram.shape[0]
    for n in rows:
        for a in range(d):
            for b in range(d):
                gram[a, b] += X[n, a] * X[n, b]


@njit(cache=True, nogil=True)
def prepare(X: Any, rows: Any, root: Any, total: float, values: Any, vectors: Any) -> None:
    """Eigenvalues and vectors of the Gram matrix of one gated token, centred where there is an intercept."""
    d = X.shape[1]
    mean, gram = np.zeros(d), np.zeros((d, d))
    for n in rows:
        for a in range(d):
            mean[a] += root[n] * X[n, a]
    if rows.shape[0] * d * d <= 1 << 20:  # too little for a BLAS, whose buffers would outweigh the tokens
        _add_gram(X, rows, gram)
    else:
        for start in range(0, rows.shape[0], GATHERED_ROWS):
            whole = rows.shape[0] == X.shape[0]  # then rows are in order, and nothing need be gathered
            own = X[start : start + GATHERED_ROWS] if whole else X[rows[start : start + GATHERED_ROWS]]
            gram += np.dot(own.T, own)
    if total > 0.0:
        for a in range(d):
            for b in range(d):
                gram[a, b] -= mean[a] * mean[b] / total
    lam, U = np.linalg.eigh(gram)
    for a in range(d):
        values[a] = max(lam[a], 0.0)
        for b in range(d):
            vectors[a, b] = U[a, b]


@njit(cache=True, nogil=True)
def _minimise(g: Any, z: Any, beta: float, U: Any, values: Any, scale: float, step: Any) -> float:
    """Set ``z`` to the minimiser over its block, ``step`` to the change; return the squared length of the change.

    The block's curvature is taken as ``scale`` times its Gram matrix ``U diag(values) U^T``.
    """
    d = z.shape[0]
    q, curvatures = np.empty(d), scale * values
    square = _target(U, curvatures, g, z, q)
    if square <= beta * beta:
        for a in range(d):
            step[a] = 0.0
    else:
        top = curvatures[d - 1]
        nu = _length(q, curvatures, beta, (np.sqrt(square) - beta) / top if top > 0.0 else 0.0)
        for a in range(d):
            q[a] *= nu / (curvatures[a] * nu + beta)
        _turn_back(U, q, step)
    change = 0.0
    for a in range(d):
        t = step[a]
        step[a] -= z[a]
        z[a] = t
        change += step[a] * step[a]
    return change


@njit(cache=True, fastmath=True, nogil=True)
def _at_rest(g: Any, correction: Any, z: Any, beta: float) -> bool:
    """Add the correction to the gradient; tell whether the group is zero and stays so."""
    norm_z, norm_g = 0.0, 0.0
    for a in range(g.shape[0]):
        g[a] += correction[a]
        norm_z += z[a] * z[a]
        norm_g += g[a] * g[a]
    return norm_z == 0.0 and norm_g <= beta * beta


@njit(cache=True, nogil=True)
def _visit(
    j: int,
    index: Any,
    data: Any,
    spectra: Any,
    beta: float,
    scale: float,
    z: Any,
    correction: Any,
    R: Any,
    step: Any,
) -> bool:
    """Minimise in group ``j``: ``z`` and ``step`` are set, nothing else; tell whether anything changed."""
    token, gate, output = index
    X, rows, first, root, total = data
    values, vectors, ready = spectra
    k, u = token[j], gate[j]
    own = rows[first[u] : first[u + 1]]
    g = np.empty(z.shape[0])
    _gradient(X[k], own, R[output[j]], g)
    if _at_rest(g, correction, z, beta):
        return False
    b = u * X.shape[0] + k
    if not ready[b]:
        prepare(X[k], own, root, total, values[b], vectors[b])
        ready[b] = True
    return _minimise(g, z, beta, vectors[b], values[b], scale, step) > 0.0


@njit(cache=True, nogil=True)
def sweep(groups: Any, index: Any, data: Any, spectra: Any, beta: float, Z: Any, correction: Any, R: Any) -> None:
    """Squared loss: minimise the objective exactly in each of the groups in turn.

    ``correction`` is added to each group's gradient: what float32 features leave out of the float64 gradient.
    """
    token, gate, output = index
    X, rows, first, root, total = data
    step = np.empty(Z.shape[1])
    for j in groups:
        if _visit(j, index, data, spectra, beta, 1.0, Z[j], correction[j], R, step):
            own = rows[first[gate[j]] : first[gate[j] + 1]]
            _move(X[token[j]], own, step, R[output[j]], root, total)


@njit(cache=True, fastmath=True, nogil=True)
def _model_move(
    X: Any, rows: Any, step: Any, l: int, R: Any, H: Any, softmax: bool, root: Any, mass: float, D: Any
) -> float:
    """Move output ``l`` by ``X step`` in the quadratic model of the loss; return the mean curvature met on the way.

    ``H: (c, N)`` holds the second derivatives, or (``softmax``) the probabilities ``q`` of a softmax, whose Hessian
    ``diag(q) - q q^T`` moves the gradients of all outputs. With an intercept (``mass > 0``) its best value follows.
    """
    N = R.shape[1]
    u = np.zeros(N)
    shift = 0.0
    for n in rows:
        t = 0.0
        for a in range(step.shape[0]):
            t += X[n, a] * step[a]
        u[n] = t
        h = H[l, n] * (1.0 - H[l, n]) if softmax else H[l, n]
        shift += root[n] * h * t
    if mass > 0.0:
        for n in range(N):
            u[n] -= root[n] * shift / mass
    bent, square = 0.0, 0.0
    for n in range(N):
        D[l, n] += u[n]
        h = H[l, n]
        square += u[n] * u[n]
        bent += (h * (1.0 - h) if softmax else h) * u[n] * u[n]
        u[n] *= h
        R[l, n] += u[n]
    if softmax:
        for m in range(R.shape[0]):
            for n in range(N):
                R[m, n] -= H[m, n] * u[n]
    return bent / square if square > 0.0 else 0.0


@njit(cache=True, nogil=True)
def prox_newton_sweep(
    groups: Any,
    index: Any,
    data: Any,
    spectra: Any,
    beta: float,
    Z: Any,
    correction: Any,
    R: Any,
    H: Any,
    softmax: bool,
    mass: Any,
    scales: Any,
    D: Any,
) -> None:
    """Any loss: minimise its quadratic model in each of the groups in turn; ``D: (c, N)`` gathers the change of outputs.

    A block's curvature is its Gram matrix times ``scales[j]``, which grows where more curvature is met; the block's
    fixed point does not depend on it.
    """
    token, gate, output = index
    X, rows, first, root, _ = data
    step = np.empty(Z.shape[1])
    for j in groups:
        if _visit(j, index, data, spectra, beta, scales[j], Z[j], correction[j], R, step):
            own, l = rows[first[gate[j]] : first[gate[j] + 1]], output[j]
            met = _model_move(X[token[j]], own, step, l, R, H, softmax, root, mass[l], D)
            scales[j] = max(scales[j], met)


@njit(cache=True, nogil=True)
def gradients(groups: Any, index: Any, data: Any, R: Any, G: Any) -> None:
    """``G[j]``: the gradient of each of the groups."""
    token, gate, output = index
    X, rows, first = data[:3]
    for j in groups:
        own = rows[first[gate[j]] : first[gate[j] + 1]]
        _gradient(X[token[j]], own, R[output[j]], G[j])
