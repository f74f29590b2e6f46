"""Principal axes of the slices of a working set, compiled with numba: spectra, and turning tokens to their axes.

Arrays and numbers are those of :mod:`~convexformer.solvers.working_set.compiled`. ``spectra`` are
``(values, vectors, means, ready, rotated, single)``: ``values: (B, d)`` and ``vectors: (B, d, d)`` of the Gram matrices of
slices, ``means: (B, d)`` of their rows, and which are ``ready``; whether tokens are turned (``rotated``) and spectra
computed in float32 (``single``).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from convexformer.jit import njit

GATHERED_ROWS = 4096  # rows gathered at a time
FLOOR = 2e-6  # of the largest eigenvalue: more than float32 gets wrong, so that curvature is not underestimated
FEW_ROWS = 0.6  # times the channels: up to so many samples that have a token its axes are found among them


@njit(cache=True, fastmath=True, nogil=True)
def _add_gram(X: Any, rows: Any, gram: Any) -> None:
    """``gram += X[rows]^T X[rows]``."""
    d = gram.shape[0]
    for n in rows:
        for a in range(d):
            for b in range(d):
                gram[a, b] += X[n, a] * X[n, b]


@njit(cache=True, nogil=True)
def _axes(gram: Any, floor: float, values: Any, vectors: Any) -> None:
    """Eigenvalues, of at least ``floor`` times the largest, and vectors of a Gram matrix, in its precision."""
    lam, U = np.linalg.eigh(gram)
    values[:], vectors[:] = np.maximum(lam, floor * max(lam[-1], 0.0)), U


@njit(cache=True, nogil=True)
def _thin_axes(B: Any, floor: float, values: Any, vectors: Any) -> None:
    """The same of ``B^T B`` for ``B: (m, d)`` of few rows; the ``d - m`` axes in which nothing varies are set to zero.

    By ``B^T = Q R`` and the eigenvectors of ``R R^T``: axes of small eigenvalues are orthogonal to the others, too.
    """
    m, d = B.shape
    Q, R = np.linalg.qr(np.ascontiguousarray(B.T))
    Q, R = np.ascontiguousarray(Q), np.ascontiguousarray(R)
    small, W = np.empty(m), np.empty((m, m), B.dtype)
    _axes(np.dot(R, R.T), floor, small, W)
    values[: d - m], vectors[:, : d - m] = 0.0, 0.0
    values[d - m :], vectors[:, d - m :] = small, np.dot(Q, W)


@njit(cache=True, nogil=True)
def _few_rows(X: Any, root: Any, total: float) -> Any:
    """``B`` with ``B^T B = X^T X`` less the mean's part, of the rows of ``X`` that are not zero; none where they are many.

    ``B = (I - a q q^T) X`` is a square root, ``q`` being ``root / sqrt(total)`` of those rows.
    """
    used = np.zeros(X.shape[0], np.bool_)
    for n in range(X.shape[0]):
        for a in range(X.shape[1]):
            if X[n, a] != 0.0:
                used[n] = True
                break
    m = used.sum()
    if m == 0 or m > FEW_ROWS * X.shape[1]:
        return np.empty((0, X.shape[1]), np.float32)
    B = X[used]
    if total > 0.0:
        q = (root[used] / np.sqrt(total)).astype(np.float32)
        square = min(np.sum(q * q), 1.0)
        part = np.dot(q, B)
        scale = (1.0 - np.sqrt(1.0 - square)) / square
        for i in range(m):
            for a in range(B.shape[1]):
                B[i, a] -= scale * q[i] * part[a]
    return B


@njit(cache=True, nogil=True)
def prepare(
    X: Any, rows: Any, root: Any, total: float, thin: bool, single: bool, values: Any, vectors: Any, mean: Any
) -> None:
    """Mean, and eigenvalues and vectors of the Gram matrix, of one gated token; centred where there is an intercept.

    Without one (``total = 0``) the mean is set to zero. ``single``: in float32, whose vectors are orthogonal to six digits.
    ``thin``: axes in which nothing varies may be left out, as zeros.
    """
    d = X.shape[1]
    mean[:] = 0.0
    for n in rows:
        for a in range(d):
            mean[a] += root[n] * X[n, a]
    mean *= 1.0 / total if total > 0.0 else 0.0
    if thin:
        B = _few_rows(X, root, total)
        if B.shape[0] > 0:
            if single:
                _thin_axes(B, FLOOR, values, vectors)
            else:
                _thin_axes(B.astype(np.float64), 0.0, values, vectors)
            return
    gram = np.zeros((d, d))
    if rows.shape[0] * d * d <= 1 << 20:  # too little for a BLAS, whose buffers would outweigh the tokens
        _add_gram(X, rows, gram)
    else:
        for start in range(0, rows.shape[0], GATHERED_ROWS):
            whole = rows.shape[0] == X.shape[0]  # then rows are in order, and nothing need be gathered
            own = X[start : start + GATHERED_ROWS] if whole else X[rows[start : start + GATHERED_ROWS]]
            gram += np.dot(own.T, own)
    for a in range(d):
        for b in range(d):
            gram[a, b] -= mean[a] * mean[b] * total
    if single:
        _axes(gram.astype(np.float32), FLOOR, values, vectors)
    else:
        _axes(gram, 0.0, values, vectors)


@njit(cache=True, nogil=True)
def prepare_slices(slices: Any, data: Any, spectra: Any) -> None:
    """Compute spectra of these slices, where they are not known yet; where ``rotated`` turn their tokens to those axes."""
    X, rows, first, root, total = data
    values, vectors, means, ready, rotated, single = spectra
    for b in slices:
        if ready[b]:
            continue
        k, u = b % X.shape[0], b // X.shape[0]
        prepare(X[k], rows[first[u] : first[u + 1]], root, total, rotated, single, values[b], vectors[b], means[b])
        ready[b] = True
        if rotated:
            axes, features = vectors[b].astype(np.float32), X[k]
            for start in range(0, len(features), GATHERED_ROWS):
                features[start : start + GATHERED_ROWS] = np.dot(features[start : start + GATHERED_ROWS], axes)
            means[b] = np.dot(means[b], vectors[b])


@njit(cache=True, nogil=True)
def first_visit(b: int, data: Any, spectra: Any, G: Any, correction: Any, n_outputs: int) -> None:
    """Prepare slice ``b``, whose weights are zero; its gradients ``G: (m, d)`` and corrections follow the channels."""
    prepare_slices(np.full(1, b), data, spectra)
    vectors, rotated = spectra[1], spectra[4]
    if rotated:
        G[:] = np.dot(G, vectors[b])
        first, end = b * n_outputs, (b + 1) * n_outputs
        correction[first:end] = np.dot(correction[first:end], vectors[b])
