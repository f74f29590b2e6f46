"""Conjugate gradients for a Newton step on the groups in use, compiled with numba.

The system is ``A^T F'' A + beta / |z_j| (I - u_j u_j^T)``, with ``u_j = z_j / |z_j|``, for groups ``P: (J, d)`` and an
intercept ``b: (c,)``; see :mod:`~convexformer.solvers.working_set.newton`. On small problems a step is microseconds of work,
and calls of numpy would cost ten times as much.

``features`` are those of :class:`~convexformer.solvers.working_set.support.TokenSupport`. ``system`` is
``(H, softmax, unit, bend, inverse, along, rank_one, inverse_mass)``: ``H: (c, N)`` second derivatives of the loss, or
(``softmax``) the probabilities ``q`` of a Hessian ``diag(q) - q q^T``, in float32; ``unit, inverse, along: (J, d)``;
``bend, rank_one: (J,)``; ``inverse_mass: (c,)``. ``live: (J,)`` is zero for groups that are held at zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from convexformer.jit import njit


@njit(cache=True, fastmath=True, nogil=True)
def apply(P: Any, features: Any, U: Any) -> None:
    """``U[output_j] += gate_j * (X_k p_j)`` for all groups, token by token, in float32."""
    X, starts, _, index, gates, gated, _, _ = features
    token, gate, output = index
    for i in range(starts.shape[0] - 1):
        a, b = starts[i], starts[i + 1]
        moved = np.dot(P[a:b].astype(np.float32), X[token[a]].T)  # (columns, N)
        for j in range(a, b):
            row = U[output[j]]
            if gated:
                switch = gates[gate[j]]
                for n in range(row.shape[0]):
                    row[n] += moved[j - a, n] * switch[n]
            else:
                for n in range(row.shape[0]):
                    row[n] += moved[j - a, n]


@njit(cache=True, fastmath=True, nogil=True)
def adjoint(V: Any, features: Any, G: Any) -> None:
    """``G_j = X_k^T (gate_j * V[output_j])`` for all groups, token by token."""
    X, starts, _, index, gates, gated, _, _ = features
    token, gate, output = index
    for i in range(starts.shape[0] - 1):
        a, b = starts[i], starts[i + 1]
        own = np.empty((b - a, V.shape[1]), np.float32)
        for j in range(a, b):
            row = V[output[j]]
            if gated:
                switch = gates[gate[j]]
                for n in range(row.shape[0]):
                    own[j - a, n] = row[n] * switch[n]
            else:
                own[j - a] = row
        G[a:b] = np.dot(own, X[token[a]])


@njit(cache=True, nogil=True)
def turn(P: Any, features: Any, back: bool, out: Any) -> None:
    """``out_j = U^T p_j`` for all groups of each slice, or (``back``) ``U p_j``; a copy where no axes are given."""
    _, _, starts, _, _, _, axes, _ = features
    if axes.shape[0] == 0:
        out[:] = P
        return
    for i in range(starts.shape[0] - 1):
        a, b = starts[i], starts[i + 1]
        own = P[a:b].astype(np.float32)
        out[a:b] = np.dot(own, axes[i].T) if back else np.dot(own, axes[i])


@njit(cache=True, fastmath=True, nogil=True)
def _bend(H: Any, softmax: bool, U: Any) -> None:
    """``U <- F'' U``, sample by sample."""
    for l in range(U.shape[0]):
        for n in range(U.shape[1]):
            U[l, n] *= H[l, n]
    if softmax:
        along = np.zeros(U.shape[1], np.float32)
        for l in range(U.shape[0]):
            for n in range(U.shape[1]):
                along[n] += U[l, n]
        for l in range(U.shape[0]):
            for n in range(U.shape[1]):
                U[l, n] -= H[l, n] * along[n]


@njit(cache=True, nogil=True)
def product(P: Any, b: Any, live: Any, features: Any, system: Any, HP: Any, Hb: Any) -> None:
    """Set ``HP: (J, d)`` and ``Hb: (c,)`` to the Hessian times a direction."""
    H, softmax, unit, bend = system[:4]
    root = features[7]
    U = np.empty(H.shape, np.float32)
    for l in range(U.shape[0]):
        for n in range(U.shape[1]):
            U[l, n] = b[l] * root[n]
    apply(P, features, U)
    _bend(H, softmax, U)
    adjoint(U, features, HP)
    for l in range(U.shape[0]):
        total = 0.0
        for n in range(U.shape[1]):
            total += U[l, n] * root[n]
        Hb[l] = total
    for j in range(P.shape[0]):
        inner = 0.0
        for a in range(P.shape[1]):
            inner += unit[j, a] * P[j, a]
        for a in range(P.shape[1]):
            HP[j, a] = live[j] * (HP[j, a] + bend[j] * (P[j, a] - inner * unit[j, a]))


@njit(cache=True, nogil=True)
def precondition(R: Any, rb: Any, live: Any, features: Any, system: Any, Y: Any, yb: Any) -> float:
    """Set ``Y, yb`` to the inverse of the blocks times a residual ``R, rb``; return the product of both."""
    _, _, _, _, inverse, along, rank_one, inverse_mass = system
    turned = np.empty(R.shape)
    turn(R, features, False, turned)
    for j in range(R.shape[0]):
        inner = 0.0
        for a in range(R.shape[1]):
            inner += along[j, a] * turned[j, a]
        for a in range(R.shape[1]):
            turned[j, a] = inverse[j, a] * turned[j, a] + along[j, a] * rank_one[j] * inner
    turn(turned, features, True, Y)
    energy = 0.0
    for j in range(R.shape[0]):
        for a in range(R.shape[1]):
            Y[j, a] *= live[j]
            energy += R[j, a] * Y[j, a]
    for l in range(rb.shape[0]):
        yb[l] = inverse_mass[l] * rb[l]
        energy += rb[l] * yb[l]
    return energy


@njit(cache=True, nogil=True)
def iterate(
    x: Any,
    b: Any,
    r: Any,
    rb: Any,
    p: Any,
    pb: Any,
    energy: float,
    live: Any,
    features: Any,
    system: Any,
    stop: float,
    steps: int,
) -> float:
    """Take so many steps, all in place, or fewer until the energy of the residual is ``stop``; return that energy.

    The point is ``x, b``, its residual ``r, rb``, the direction ``p, pb``. A direction without curvature ends it: minus
    the energy is returned.
    """
    HP, y = np.empty(x.shape), np.empty(x.shape)
    Hb, yb = np.empty(b.shape), np.empty(b.shape)
    for _ in range(steps):
        if energy <= stop:
            break
        product(p, pb, live, features, system, HP, Hb)
        curvature = np.sum(p * HP) + np.sum(pb * Hb)
        if not curvature > 1e-12 * energy:
            return -energy
        t = energy / curvature
        x += t * p
        b += t * pb
        r -= t * HP
        rb -= t * Hb
        before = energy
        energy = precondition(r, rb, live, features, system, y, yb)
        p[:] = y + energy / before * p
        pb[:] = yb + energy / before * pb
    return energy
