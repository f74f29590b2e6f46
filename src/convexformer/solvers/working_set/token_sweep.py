"""Sweeps over whole token slices: all outputs of a slice move at once, by matrix products, compiled with numba.

With many outputs a visit of one column reads the features of its token for a single output, and a softmax then moves the
gradients of all outputs. Here a slice's gradients ``X_k^T R`` and moves ``X_k P`` are one product each, and the coupling is
paid once a slice. Moving all outputs together is safe: the Hessian of a softmax ``H = diag(q) - q q^T`` is diagonally
dominant, so ``H <= 2 diag(H)``, and what is met of that factor is measured.

Arrays and numbers are those of :mod:`~convexformer.solvers.working_set.compiled`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from convexformer.solvers.working_set.compiled import (
    CURVATURE_SLACK,
    LARGER_SCALE,
    RETRIES,
    at_rest,
    centre,
    minimise,
    njit,
)
from convexformer.solvers.working_set.spectra import first_visit


@njit(cache=True, fastmath=True, nogil=True)
def _gather(columns: Any, output: Any, R: Any, gate: Any, gated: bool, out: Any) -> None:
    """``out = R[output[columns]]`` in float32, zero where the gate is closed."""
    for i in range(columns.shape[0]):
        l = output[columns[i]]
        if gated:
            for n in range(R.shape[1]):
                out[i, n] = R[l, n] * gate[n]
        else:
            for n in range(R.shape[1]):
                out[i, n] = R[l, n]


@njit(cache=True, fastmath=True, nogil=True)
def _shift(u: Any, h: Any, gate: Any, gated: bool, root: Any, total: float, shift: float) -> tuple[float, float]:
    """Close the gate and let the intercept follow by ``-shift``; return the curvature that ``u`` meets and its square."""
    square, bent = 0.0, 0.0
    for n in range(u.shape[0]):
        t = u[n] * gate[n] if gated else u[n]
        square += t * t
        t -= root[n] * shift
        u[n] = t
        bent += h[n] * t * t
    return bent, max(square - shift * shift * total, 0.0)


@njit(cache=True, fastmath=True, nogil=True)
def _coupled(columns: Any, output: Any, U: Any, H: Any, along: Any) -> float:
    """Set ``along = sum_l q_l u_l``; return ``sum_n <u_n, (diag(q_n) - q_n q_n^T) u_n>`` over these columns."""
    along[:] = 0.0
    bent = 0.0
    for i in range(columns.shape[0]):
        l = output[columns[i]]
        for n in range(U.shape[1]):
            t = H[l, n] * U[i, n]
            along[n] += t
            bent += t * U[i, n]
    for n in range(U.shape[1]):
        bent -= along[n] * along[n]
    return bent


@njit(cache=True, fastmath=True, nogil=True)
def _follow(columns: Any, output: Any, U: Any, R: Any, H: Any, softmax: bool, along: Any, D: Any) -> None:
    """Move the outputs by ``U`` in the quadratic model of the loss."""
    for i in range(columns.shape[0]):
        l = output[columns[i]]
        for n in range(U.shape[1]):
            D[l, n] += U[i, n]
            R[l, n] += H[l, n] * U[i, n]
    if softmax:
        for m in range(R.shape[0]):
            for n in range(U.shape[1]):
                R[m, n] -= H[m, n] * along[n]


@njit(cache=True, nogil=True)
def token_gradients(groups: Any, starts: Any, index: Any, X: Any, gates: Any, gated: bool, R: Any, G: Any) -> None:
    """``G[j] = X_k^T (gate_j * R[output_j])`` for groups that are sorted by slice, which begin at ``starts``, in float32."""
    token, gate, output = index
    for i in range(starts.shape[0] - 1):
        columns = groups[starts[i] : starts[i + 1]]
        V = np.empty((columns.shape[0], R.shape[1]), np.float32)
        _gather(columns, output, R, gates[gate[columns[0]]], gated, V)
        own = np.dot(V, X[token[columns[0]]])
        for m in range(columns.shape[0]):
            G[columns[m]] = own[m]


@njit(cache=True, nogil=True)
def token_sweep(
    groups: Any,
    starts: Any,
    index: Any,
    data: Any,
    gates: Any,
    gated: bool,
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
    """Minimise the quadratic model of the loss in each slice in turn; ``D: (c, N)`` gathers the change of outputs.

    ``groups`` are sorted by slice, which begin at ``starts``; ``gates: (g, N)``, all open unless ``gated``.
    ``largest`` bounds the loss's curvature, and so the scales.
    """
    token, gate, output = index
    X, _, _, root, total = data
    values, vectors, means, ready, rotated, _ = spectra
    N, d = R.shape[1], Z.shape[1]
    along = np.empty(N)
    for i in range(starts.shape[0] - 1):
        columns = groups[starts[i] : starts[i + 1]]
        k, u = token[columns[0]], gate[columns[0]]
        switch = gates[u]
        V = np.empty((columns.shape[0], N), np.float32)
        _gather(columns, output, R, switch, gated, V)
        G = np.dot(V, X[k]).astype(np.float64)  # (columns, d)
        moving = np.empty(columns.shape[0], np.bool_)
        for m in range(columns.shape[0]):
            moving[m] = not at_rest(G[m], correction[columns[m]], Z[columns[m]], beta)
        if not moving.any():
            continue
        columns, G = columns[moving], G[moving]
        b = u * X.shape[0] + k
        if not ready[b]:
            first_visit(b, data, spectra, G, correction, R.shape[0])
        for m in range(columns.shape[0]):
            centre(G[m], means[b], R[output[columns[m]]], root)
        P, U = np.zeros((columns.shape[0], d)), np.zeros((columns.shape[0], N), np.float32)
        for _ in range(RETRIES):
            for m in range(columns.shape[0]):
                minimise(G[m], Z[columns[m]], beta, vectors[b], values[b], rotated, scales[columns[m]], P[m])
            U = np.dot(P.astype(np.float32), X[k].T)
            allowed, again = 0.0, False
            for m in range(columns.shape[0]):
                l, j = output[columns[m]], columns[m]
                bent, square = _shift(U[m], own[l], switch, gated, root, total, np.dot(means[b], P[m]))
                if bent > CURVATURE_SLACK * scales[j] * square and square > 0.0 and scales[j] < largest:
                    scales[j], again = min(max(LARGER_SCALE * scales[j], bent / square), largest), True
                allowed += scales[j] * square
            if again:
                continue
            met = _coupled(columns, output, U, H, along) if softmax else 0.0
            if met <= CURVATURE_SLACK * allowed or allowed <= 0.0 or scales[columns].min() >= largest:
                break
            for j in columns:
                scales[j] = min(scales[j] * met / allowed, largest)
        if softmax:
            _coupled(columns, output, U, H, along)
        for m in range(columns.shape[0]):
            Z[columns[m]] += P[m]
        _follow(columns, output, U, R, H, softmax, along, D)
