"""The inner loops of block coordinate descent, compiled with numba; everything here is plain arrays and numbers.

Groups are numbered ``j``; group ``j`` is the column ``z_j: (d,)`` of token ``token[j]``, gate ``gate[j]`` and output
``output[j]``. Its features are ``X[token[j]]: (N, d)``, of which the gate keeps ``rows[first[gate] : first[gate + 1]]``.
``R: (c, N)`` holds the residuals ``sqrt(w) (f - y)``; the rows of ``X`` carry the same ``sqrt(w)``.

Where the spectra say ``rotated`` the channels of a token are its principal axes from its first move on
(:func:`~convexformer.solvers.working_set.spectra.first_visit`): blocks are then diagonal, and nothing need be turned.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from convexformer.jit import available as available
from convexformer.jit import njit
from convexformer.solvers.working_set.spectra import first_visit

NEWTON_STEPS = 50
RETRIES = 8  # of a step that meets more curvature than its block was given
CURVATURE_SLACK, LARGER_SCALE = 1.05, 1.3  # a step may meet so much more; a block's scale then grows by this at least


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
def _target(U: Any, values: Any, g: Any, z: Any, rotated: bool, q: Any) -> float:
    """``q = U^T (Gram z - g)``, in the eigenbasis ``U``, that of ``g`` and ``z`` if ``rotated``; return its squared norm."""
    d = q.shape[0]
    if rotated:
        size = 0.0
        for a in range(d):
            q[a] = values[a] * z[a] - g[a]
            size += q[a] * q[a]
        return size
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


@njit(cache=True, nogil=True)
def minimise(g: Any, z: Any, beta: float, U: Any, values: Any, rotated: bool, scale: float, step: Any) -> float:
    """Set ``step`` to the way from ``z`` to the minimiser over its block; return the squared length of the step.

    The block's curvature is taken as ``scale`` times its Gram matrix ``U diag(values) U^T``, or ``diag(values)`` where
    the channels are ``rotated`` to its axes.
    """
    d = z.shape[0]
    q, curvatures = np.empty(d), scale * values
    square = _target(U, curvatures, g, z, rotated, q)
    if square <= beta * beta:
        for a in range(d):
            step[a] = 0.0
    else:
        top = curvatures[d - 1]
        nu = _length(q, curvatures, beta, (np.sqrt(square) - beta) / top if top > 0.0 else 0.0)
        for a in range(d):
            q[a] *= nu / (curvatures[a] * nu + beta)
            step[a] = q[a]
        if not rotated:
            _turn_back(U, q, step)
    change = 0.0
    for a in range(d):
        step[a] -= z[a]
        change += step[a] * step[a]
    return change


@njit(cache=True, fastmath=True, nogil=True)
def at_rest(g: Any, correction: Any, z: Any, beta: float) -> bool:
    """Add the correction to the gradient; tell whether the group is zero and stays so."""
    norm_z, norm_g = 0.0, 0.0
    for a in range(g.shape[0]):
        g[a] += correction[a]
        norm_z += z[a] * z[a]
        norm_g += g[a] * g[a]
    return norm_z == 0.0 and norm_g <= beta * beta


@njit(cache=True, nogil=True)
def sweep(groups: Any, index: Any, data: Any, spectra: Any, beta: float, Z: Any, correction: Any, R: Any) -> None:
    """Squared loss: minimise the objective exactly in each of the groups in turn.

    ``correction`` is added to each group's gradient: what float32 features leave out of the float64 gradient.
    """
    token, gate, output = index
    X, rows, first, root, total = data
    values, vectors, _, ready, rotated, _ = spectra
    G, step = np.empty((1, Z.shape[1])), np.empty(Z.shape[1])
    g = G[0]
    for j in groups:
        own = rows[first[gate[j]] : first[gate[j] + 1]]
        _gradient(X[token[j]], own, R[output[j]], g)
        if at_rest(g, correction[j], Z[j], beta):
            continue
        b = gate[j] * X.shape[0] + token[j]
        if not ready[b]:
            first_visit(b, data, spectra, G, correction, R.shape[0])
        if minimise(g, Z[j], beta, vectors[b], values[b], rotated, 1.0, step) > 0.0:
            Z[j] += step
            _move(X[token[j]], own, step, R[output[j]], root, total)


@njit(cache=True, fastmath=True, nogil=True)
def centre(g: Any, mean: Any, R: Any, root: Any) -> None:
    """Subtract what a constant output, which the intercept takes, has of the gradient: ``g -= mean sum_n root_n R_n``.

    The model's intercept is exact at the start of a sweep only, and a token may have directions along which it is
    constant: their curvature is zero, and so must be the gradient.
    """
    imbalance = 0.0
    for n in range(R.shape[0]):
        imbalance += root[n] * R[n]
    for a in range(g.shape[0]):
        g[a] -= mean[a] * imbalance


@njit(cache=True, fastmath=True, nogil=True)
def _outputs(X: Any, rows: Any, mean: Any, step: Any, h: Any, root: Any, total: float, u: Any) -> float:
    """Set ``u = X step`` on the gate's rows; return the curvature that it meets, as a multiple of its Gram matrix.

    ``h: (N,)`` is the curvature of each row. Gram matrix, ``u`` and the square that the curvature is divided by are centred
    with the same mean: where the curvature is that of few rows, a mean weighted by it would be far from the plain one.
    """
    for n in range(u.shape[0]):
        u[n] = 0.0
    square, shift = 0.0, 0.0
    for a in range(step.shape[0]):
        shift += mean[a] * step[a]
    for n in rows:
        t = 0.0
        for a in range(step.shape[0]):
            t += X[n, a] * step[a]
        u[n] = t
        square += t * t
    square -= shift * shift * total
    bent = 0.0
    for n in range(u.shape[0]):
        u[n] -= root[n] * shift
        bent += h[n] * u[n] * u[n]
    return bent / square if square > 0.0 else 0.0


@njit(cache=True, fastmath=True, nogil=True)
def _follow(l: int, u: Any, R: Any, H: Any, softmax: bool, D: Any) -> None:
    """Move output ``l`` by ``u`` in the quadratic model of the loss; ``u`` is overwritten.

    ``H: (c, N)`` holds the second derivatives, or (``softmax``) the probabilities ``q`` of a softmax, whose Hessian
    ``diag(q) - q q^T`` moves the gradients of all outputs.
    """
    for n in range(u.shape[0]):
        D[l, n] += u[n]
        u[n] *= H[l, n]
        R[l, n] += u[n]
    if softmax:
        for m in range(R.shape[0]):
            for n in range(u.shape[0]):
                R[m, n] -= H[m, n] * u[n]


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
    own: Any,
    softmax: bool,
    scales: Any,
    largest: float,
    D: Any,
) -> None:
    """Any loss: minimise its quadratic model in each of the groups in turn; ``D: (c, N)`` gathers the change of outputs.

    A block's curvature is its Gram matrix times ``scales[j]``. A step that meets more than that is taken again with a
    larger scale, up to ``largest``, a bound on the loss's curvature; the block's fixed point does not depend on it.
    ``own: (c, N)`` is the diagonal of the Hessian.
    """
    token, gate, output = index
    X, rows, first, root, total = data
    values, vectors, means, ready, rotated, _ = spectra
    G, step, u = np.empty((1, Z.shape[1])), np.empty(Z.shape[1]), np.empty(R.shape[1])
    g = G[0]
    for j in groups:
        k, l = token[j], output[j]
        open_rows = rows[first[gate[j]] : first[gate[j] + 1]]
        _gradient(X[k], open_rows, R[l], g)
        if at_rest(g, correction[j], Z[j], beta):
            continue
        b = gate[j] * X.shape[0] + k
        if not ready[b]:
            first_visit(b, data, spectra, G, correction, R.shape[0])
        centre(g, means[b], R[l], root)
        for _ in range(RETRIES):
            if minimise(g, Z[j], beta, vectors[b], values[b], rotated, scales[j], step) == 0.0:
                break
            met = _outputs(X[k], open_rows, means[b], step, own[l], root, total, u)
            if met <= CURVATURE_SLACK * scales[j] or scales[j] >= largest:
                break
            scales[j] = min(max(LARGER_SCALE * scales[j], met), largest)
        if step.any():
            Z[j] += step
            _follow(l, u, R, H, softmax, D)


@njit(cache=True, nogil=True)
def gradients(groups: Any, index: Any, data: Any, R: Any, G: Any) -> None:
    """``G[j]``: the gradient of each of the groups."""
    token, gate, output = index
    X, rows, first = data[:3]
    for j in groups:
        own = rows[first[gate[j]] : first[gate[j] + 1]]
        _gradient(X[token[j]], own, R[output[j]], G[j])
