"""Contract checks: run them on an operator, a loss, a penalty or a head of your own.

Every check raises ``AssertionError`` with the numbers that disagree, and returns nothing when all is well::

    from convexformer.testing import check_gauge
    check_gauge(MyGauge(), shape=(4, 3, 2))

The checks are exact statements (adjoints, Fenchel-Young, optimality of a prox), tried at random points.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from convexformer.certificates import Certificate, certificate
from convexformer.data.tokens import as_tensor
from convexformer.gauges import Atomic, Gauge, Penalty, PolarKind, Proximal, Sliced
from convexformer.heads.base import Head, Layout
from convexformer.losses import Loss, QuadraticConjugateLoss
from convexformer.networks.base import Network
from convexformer.operators import BilinearOperator, LowRank, Operator, TokenFeatures
from convexformer.problem import Problem
from convexformer.solution import Solution
from convexformer.solvers.status import Record
from convexformer.solving import certify, solve
from convexformer.weights import Weights

MakeNetwork = Callable[[Layout, int], Network]
DENSE_LIMIT = 1 << 16  # operators with no more entries than this are also compared as matrices


def check_operator(operator: Operator, seed: int = 0) -> None:
    """Shapes, linearity, ``<V, A Z> = <A^T V, Z>`` in any memory layout, and ``norm_squared()`` from below ``||A||^2``."""
    draw = _normals(seed, operator.like)
    slack = 1e3 * torch.finfo(operator.like.dtype).eps
    Z, Z2, V = draw(operator.weight_shape), draw(operator.weight_shape), draw(operator.output_shape)
    AZ, AtV = operator.apply(Z), operator.adjoint(V)
    _same_shape("apply(Z)", AZ, operator.output_shape)
    _same_shape("adjoint(V)", AtV, operator.weight_shape)
    _same_shape("zeros()", operator.zeros(), operator.weight_shape)
    size = float(V.norm() * AZ.norm() + AtV.norm() * Z.norm())
    _equal("<V, A Z> and <A^T V, Z>", _inner(V, AZ), _inner(AtV, Z), slack * size)
    mixed, apart = operator.apply(2.0 * Z - 0.5 * Z2), 2.0 * AZ - 0.5 * operator.apply(Z2)
    _equal("A(2 Z - Z'/2) and 2 A Z - A Z'/2", mixed, apart, slack * float(1 + apart.abs().max()))
    _equal(
        "A Z for another layout of Z in memory", operator.apply(_reordered(Z)), AZ, slack * float(1 + AZ.abs().max())
    )
    other = operator.adjoint(_reordered(V))
    _equal("A^T V for another layout of V in memory", other, AtV, slack * float(1 + AtV.abs().max()))
    if isinstance(operator, BilinearOperator):
        _check_factors(operator, Z, AZ, V, AtV, slack)
    if (parts := operator.token_features()) is not None:
        _check_slices(operator, parts, Z, V, AtV, slack)
    p, r = math.prod(operator.weight_shape), math.prod(operator.output_shape)
    if p * r > DENSE_LIMIT:
        return
    columns = torch.eye(p, dtype=Z.dtype, device=Z.device).reshape(p, *operator.weight_shape)
    rows = torch.eye(r, dtype=Z.dtype, device=Z.device).reshape(r, *operator.output_shape)
    A = torch.stack([operator.apply(e).flatten() for e in columns], 1).to(torch.float64)
    At = torch.stack([operator.adjoint(e).flatten() for e in rows], 1).to(torch.float64)
    _equal("the matrices of adjoint and of apply, transposed", At, A.T, slack * float(A.abs().max()))
    exact, estimate = float(torch.linalg.matrix_norm(A, 2)) ** 2, operator.norm_squared()
    _at_most("norm_squared() against ||A||^2", estimate, exact, slack * exact)
    _at_most("half of ||A||^2 against norm_squared()", 0.5 * exact, estimate, slack * exact)


def _check_slices(operator: Operator, parts: TokenFeatures, Z: Tensor, V: Tensor, AtV: Tensor, slack: float) -> None:
    """The parts make up the operator; on some tokens alone it is what it is with the others at zero."""
    X, gates = parts.features, parts.gates
    one = Z if gates is not None else Z[None]
    D = X.new_ones(len(X), 1) if gates is None else gates
    whole = torch.einsum("ru,rka,ukac->rc", D, X, one)
    _equal("A Z and the sum over token features", operator.apply(Z), whole, slack * float(1 + whole.abs().max()))
    some = torch.arange(0, X.shape[1], 2, device=Z.device)
    alone = torch.zeros_like(Z).index_copy(-3, some, Z.index_select(-3, some))
    part = operator.restricted(some)
    scale = slack * float(1 + whole.abs().max())
    _equal(
        "A on some tokens and A with the others zero",
        part.apply(Z.index_select(-3, some)),
        operator.apply(alone),
        scale,
    )
    _equal(
        "A^T on some tokens and its slices", part.adjoint(V), AtV.index_select(-3, some), slack * float(1 + AtV.norm())
    )


def check_loss(loss: Loss, Y: Any, seed: int = 0) -> None:
    """Gradient, Hessian products, Fenchel-Young, dual scaling, exact intercept and balanced dual points of a loss.

    ``Y`` holds targets as a user gives them, every class among them; a dozen rows are plenty.
    """
    encoded = loss.encode(as_tensor(Y, "Y"))
    draw = _normals(seed, encoded)
    R, c = encoded.shape
    w = 0.1 + draw((R,)).abs()
    for scale in (0.1, 1.0, 20.0):
        F, G, D = (scale * draw((R, c)) for _ in range(3))
        value, U, U2 = loss.value(F, encoded), loss.gradient(F, encoded), loss.gradient(G, encoded)
        _same_shape("value", value, (R,))
        _same_shape("gradient", U, (R, c))
        _same_shape("conjugate", loss.conjugate(U, encoded), (R,))
        size = 1 + float(value.abs().max()) + float((U * F).abs().max())
        h = 1e-6 / scale
        slope = (loss.value(F + h * D, encoded) - loss.value(F - h * D, encoded)) / (2 * h)
        _equal("finite differences of value and <gradient, D>", slope, (U * D).sum(1), 1e-5 * size)
        rise, run = (U - U2).norm(dim=1), (F - G).norm(dim=1)
        _at_most("|gradient(F) - gradient(G)| against curvature |F - G|", rise, loss.curvature * run, 1e-9 * size)
        _check_hessian(loss, F, D, encoded, h, size)
        equality = value + loss.conjugate(U, encoded)
        _equal("L(f) + L*(u) and <u, f> at u = gradient(f)", equality, (U * F).sum(1), 1e-9 * size)
        for V in (0 * U, U2, 0.3 * U2, 0.6 * U + 0.4 * U2):
            other = loss.conjugate(V, encoded)
            _require(bool(torch.isfinite(other).all()), "the conjugate is infinite between two gradients, or at zero")
            _at_most("<u, f> against L(f) + L*(u)", (V * F).sum(1), value + other, 1e-9 * size)
        _check_dual_scale(loss, U, encoded, w)
        for start in (torch.zeros_like(F[0]), scale * draw((c,))):
            b = loss.best_intercept(F, encoded, w, start)
            left = (w[:, None] * loss.gradient(F + b, encoded)).sum(0)
            _equal("sum_i w_i gradient_i at the best intercept, and zero,", left, 0 * left, 1e-9 * float(w.sum()))
            for point in (loss.gradient(F + b, encoded), U, 0.3 * U2):
                _check_balance(loss, point, encoded, w)


def _check_hessian(loss: Loss, F: Tensor, D: Tensor, Y: Tensor, h: float, size: float) -> None:
    """Finite differences of the gradient and ``hessian_product``, away from kinks; symmetry and its diagonal."""
    product = loss.hessian_product(F, Y, D)
    _same_shape("hessian_product", product, tuple(F.shape))
    change = (loss.gradient(F + h * D, Y) - loss.gradient(F - h * D, Y)) / (2 * h)
    jump = loss.hessian_product(F + h * D, Y, D) - loss.hessian_product(F - h * D, Y, D)
    calm = jump.abs().amax(1) < 0.1 * D.abs().amax(1)
    _require(bool(calm.float().mean() > 0.5), "hessian_product jumps nearly everywhere")
    _equal("finite differences of gradient and hessian_product", change[calm], product[calm], 1e-4 * size)
    _at_most("zero against <D, hessian_product(D)>", torch.zeros(len(F)), (D * product).sum(1), 1e-6 * size)
    if (known := loss.hessian(F, Y)) is not None:
        unit = torch.eye(F.shape[1], dtype=F.dtype, device=F.device)
        diagonal = torch.stack([known.product(e.expand_as(F))[:, k] for k, e in enumerate(unit)], 1)
        _equal("diagonal of the Hessian and its products with unit vectors", known.diagonal(), diagonal, 1e-9)


def _check_balance(loss: Loss, U: Tensor, Y: Tensor, w: Tensor) -> None:
    """A balanced dual point sums to zero, stays in the domain, and stays where it is if it was balanced."""
    found = loss.balance(U, Y, w)
    _require(bool(torch.isfinite(loss.conjugate(found, Y)).all()), "balance leaves the domain of the conjugate")
    left, size = (w[:, None] * found).sum(0), float((w[:, None] * U).abs().sum()) + float(w.sum())
    _equal("sum_i w_i u_i of a balanced dual point, and zero,", left, 0 * left, 1e-12 * size)
    again = loss.balance(found, Y, w)
    _equal("a balanced dual point and itself balanced again", again, found, 1e-9)


def check_penalty(penalty: Penalty, shape: tuple[int, ...], seed: int = 0) -> None:
    """Convexity, Fenchel-Young for the conjugate, and a prox that is optimal and nonexpansive."""
    draw = _normals(seed)
    Z, W, M, beta = draw(shape), draw(shape), draw(shape), 0.7
    zero = torch.zeros(shape, dtype=torch.float64)
    _equal("g(0) and zero", penalty.value(zero), 0.0, 1e-12)
    middle, ends = penalty.value((Z + W) / 2), (penalty.value(Z) + penalty.value(W)) / 2
    _at_most("g in the middle against the mean of its ends", middle, ends, 1e-12 * float(ends))
    limit, polar = penalty.max_dual_scale(M, beta)
    if polar.kind.certifies:
        for scale in (0.0, 0.5, 1.0, -1.0):
            N = scale * (limit if math.isfinite(limit) else 1.0) * M
            own = penalty.conjugate(N, beta)
            _require(own == 0 or not penalty.indicator_conjugate, f"the conjugate is {own}, and it is said to be zero")
            bound = beta * penalty.value(Z) + own
            _at_most("<M, Z> against beta g(Z) + (beta g)*(M)", _inner(N, Z), bound, 1e-10 * (1 + float(bound)))
    if not isinstance(penalty, Proximal):
        return
    _equal("prox with step 0 and Z", penalty.prox(Z, 0.0), Z, 1e-12)
    for step in (0.05, 0.5, 2.0, 50.0):
        P, Q = penalty.prox(Z, step), penalty.prox(W, step)
        _same_shape("prox", P, shape)
        _at_most("|prox(Z) - prox(W)| against |Z - W|", (P - Q).norm(), (Z - W).norm(), 1e-10)
        _check_prox(penalty, Z, P, step, draw)


def check_gauge(gauge: Gauge, shape: tuple[int, ...], seed: int = 0) -> None:
    """All of :func:`check_penalty`, and what makes it a gauge: homogeneity, the polar and its atom."""
    check_penalty(gauge, shape, seed)
    draw = _normals(seed + 1)
    Z, W, M = draw(shape), draw(shape), draw(shape)
    value = float(gauge.value(Z))
    _at_most("g(Z + W) against g(Z) + g(W)", gauge.value(Z + W), value + gauge.value(W), 1e-10 * value)
    for t in (-1.0, 0.0, 1e-3, 7.0):
        _equal(f"g({t} Z) and |{t}| g(Z)", gauge.value(t * Z), abs(t) * value, 1e-10 * value)
        scaled, one = gauge.polar(t * M).value, gauge.polar(M).value
        _equal(f"polar({t} M) and |{t}| polar(M)", scaled, abs(t) * one, 1e-9 * one)
    if isinstance(gauge, Sliced):
        parts = gauge.slice_polars(M)
        _same_shape("slice_polars", parts, tuple(shape[:-2]))
        _equal(
            "the largest of slice_polars(M) and polar(M)", parts.max(), gauge.polar(M).value, 1e-9 * float(parts.max())
        )
    if isinstance(gauge, Sliced) and gauge.column_groups:
        columns = torch.linalg.vector_norm(Z, dim=-2).sum()
        _equal("g(Z) and the sum of the norms of columns", gauge.value(Z), columns, 1e-10 * value)
    if not isinstance(gauge, Atomic):
        return
    for matrix in (M, Z, M * (M > 0.5)):
        polar, atom = gauge.polar(matrix), gauge.atom(matrix)
        _same_shape("atom", atom, shape)
        _at_most("g(atom) against 1", gauge.value(atom), 1.0, 1e-9)
        reached = _inner(matrix, atom)
        if polar.kind is PolarKind.EXACT:
            _equal("<M, atom(M)> and polar(M)", reached, polar.value, 1e-9 * polar.value)
        if not polar.kind.certifies:
            continue
        nearer = [gauge.prox(matrix, 0.3)] if isinstance(gauge, Proximal) else []
        for point in (Z, matrix, atom, gauge.atom(W), *nearer):
            bound = polar.value * float(gauge.value(point))
            _at_most("|<M, Z>| against polar(M) g(Z)", abs(_inner(matrix, point)), bound, 1e-9 * (1 + bound))


def check_head(
    head: Head,
    X: Any,
    Y: Any,
    *,
    loss: str | Loss = "auto",
    mask: Any = None,
    sample_weight: Any = None,
    intercept: bool = False,
    make_network: MakeNetwork | None = None,
    seed: int = 0,
) -> None:
    """Operator, ``beta_max``, recovery and lift of a head, and the certificates of its networks.

    ``make_network(layout, seed)`` returns any network of the head, a random one say; with it the lift is checked to
    never raise the objective, and the certificate to never be below the true gap.
    """
    options: dict[str, Any] = {"loss": loss, "mask": mask, "sample_weight": sample_weight, "intercept": intercept}
    problem = Problem(head, X, Y, beta_ratio=0.3, **options)
    check_operator(problem.operator, seed)
    draw = _normals(seed)
    Z = draw(problem.operator.weight_shape)
    b = draw((problem.layout.n_outputs,)) if intercept else None
    solution = solve(problem, tolerance=1e-7)
    sparse = problem.penalty.prox(Z, 1.0) if isinstance(problem.penalty, Proximal) else 0.5 * Z
    for weights in (Weights(0 * Z, b), Weights(Z, b), Weights(sparse, b), solution.weights):
        _check_recovery(problem, weights, X, mask)
    _equal(
        "predict(X) and A Z + b",
        _rows(problem, solution.predict(X, mask)),
        problem.objective.outputs(solution.weights),
        1e-9,
    )
    if solution.certificate.kind == "none":
        return
    _require(solution.certificate.meets(1e-6), f"not solved to 1e-6: {solution.certificate}")
    if problem.penalty.sparse:
        _check_beta_max(problem)
    if make_network is not None:
        for trial in range(3):
            _check_network(problem, make_network(problem.layout, seed + trial), solution, X, mask)


def check_weak_duality(problem: Problem, tolerance: float = 1e-6) -> Solution:
    """Solve, and assert at every gap check that the certificate encloses the optimum; return the solution."""
    seen: list[tuple[Record, Weights]] = []
    solution = solve(problem, tolerance=tolerance, callback=lambda record, weights: seen.append((record, weights)))
    objective = problem.objective
    slack = 1e-9 if objective.reference() is objective else 1e-4
    best = min(record.primal for record, _ in seen)
    _require(len(seen) > 0, "the solver showed no point")
    for record, weights in seen:
        where = f"at iteration {record.iteration}: "
        proof = certificate(objective, weights)
        room = slack * (abs(best) + abs(record.primal))
        _at_most(where + "dual of the history against the best primal", record.dual, best, room)
        _equal(where + "primal of the history and of the certificate", record.primal, proof.primal, room)
        _encloses(proof, solution.certificate, where)
    return solution


# ---------------------------------------------------------------------- parts of the checks above


def _check_factors(operator: BilinearOperator, Z: Tensor, AZ: Tensor, V: Tensor, AtV: Tensor, slack: float) -> None:
    """Low-rank weights have the outputs of the tensor they stand for; products with factors are those of ``A^T V``."""
    factors = LowRank.of(Z)
    size = float(1 + AZ.abs().max() + AtV.abs().max()) * float(1 + factors.U.abs().max() + factors.V.abs().max())
    M = AtV.reshape(-1, *AtV.shape[-2:])[factors.block]  # (m, p, q)
    for D, terms in ((V, factors), (_reordered(V), factors.with_factors(_reordered(factors.U), _reordered(factors.V)))):
        own = [(operator.matvec(D, terms.V[at], b), operator.rmatvec(D, terms.U[at], b)) for b, at in terms.spans()]
        apart = (torch.cat([left for left, _ in own]), torch.cat([right for _, right in own]))
        for AF in (
            operator.apply(terms),
            operator.apply_factors(terms),
        ):  # through dense matrices where that pays, and not
            _equal("A applied to factors and to the tensor", AF, AZ, slack * size)
        for left, right in (operator.factor_gradients(D, terms), apart):
            _equal("left products and A^T V", left, (M @ factors.V[:, :, None])[:, :, 0], 10 * slack * size)
            _equal("right products and A^T V", right, (factors.U[:, None] @ M)[:, 0], 10 * slack * size)


def _reordered(values: Tensor) -> Tensor:
    """Return the same numbers with the axes stored in the opposite order, and every second place left out."""
    wide = torch.stack([values, values], -1).permute(*reversed(range(values.ndim)), values.ndim).contiguous()
    return wide[..., 0].permute(*reversed(range(values.ndim)))


def _check_dual_scale(loss: Loss, U: Tensor, Y: Tensor, w: Tensor) -> None:
    """The scale is legal, no worse than the plain one, and the best of a grid where it has a closed form."""

    def dual(t: float) -> float:
        return -float((w * loss.conjugate(t * U, Y)).sum())

    for limit in (0.0, 0.3, 1.0, 3.0, math.inf):
        t = loss.dual_scale(U, Y, w, limit)
        _at_most("|dual_scale| against its limit", abs(t), limit, 0.0)
        got, reach = dual(t), min(limit, 3.0)
        _require(math.isfinite(got), f"dual_scale {t} with limit {limit} leaves the domain of the conjugate")
        tried: Iterable[float] = (min(1.0, limit),)
        if isinstance(loss, QuadraticConjugateLoss):
            tried = torch.linspace(-reach, reach, 61, dtype=torch.float64).tolist()
        best = max(dual(s) for s in tried)
        _at_most(f"dual value of a grid against that of dual_scale (limit {limit})", best, got, 1e-9 * (1 + abs(got)))


def _check_prox(penalty: Penalty, Z: Tensor, P: Tensor, step: float, draw: Callable[..., Tensor]) -> None:
    """``P = prox(Z)`` iff ``Z - P`` is a subgradient of ``step g`` at ``P``; and no neighbour does better."""
    R, scale = Z - P, float(Z.square().sum())
    limit, polar = penalty.max_dual_scale(R, step)
    if polar.kind.certifies:
        _at_most("1 against the scale limit of Z - prox(Z): polar(Z - P) <= step", 1.0, limit, 1e-9)
        right = step * penalty.value(P) + penalty.conjugate(R, step)
        _equal("<Z - P, P> and step g(P) + (step g)*(Z - P)", _inner(R, P), right, 1e-9 * scale)
    least = 0.5 * R.square().sum() + step * penalty.value(P)
    for size in (1e-3, 0.3):
        N = P + size * draw(P.shape)
        other = 0.5 * (N - Z).square().sum() + step * penalty.value(N)
        _at_most("objective of the prox against that of a neighbour", least, other, 1e-10 * scale)


def _check_recovery(problem: Problem, weights: Weights, X: Any, mask: Any) -> None:
    """The recovered network has the same outputs and objective, and lifts to the weights it came from."""
    network = problem.head.recover(weights, problem.layout)
    outputs, expected = _rows(problem, network(X, mask).detach()), problem.objective.outputs(weights)
    size = 1 + float(expected.abs().max())
    _equal("outputs of the recovered network and A Z + b", outputs, expected, 1e-8 * size)
    value = float(problem.penalty.value(weights.Z))
    _equal("decay() of the recovered network and g(Z)", network.decay(), value, 1e-8 * (1 + value))
    objective = problem.value(weights)
    proof = certify(network, problem)
    _equal("primal of the recovered network and the objective of Z", proof.primal, objective, 1e-8 * abs(objective))
    back = problem.head.lift(network, problem.layout)
    Z = weights.dense()
    _equal("lift(recover(Z)) and Z", back.dense(), Z, 1e-9 * (1 + float(Z.abs().max())))
    if weights.intercept is not None:
        _require(back.intercept is not None, "the recovered network lost the intercept")
        _equal("intercept of the lift and of the weights", back.intercept, weights.intercept, 1e-12 * size)


def _check_beta_max(problem: Problem) -> None:
    """``Z = 0`` is optimal, and certified, at ``beta_max``; a little below it is neither."""
    top = problem.beta_max
    _require(top > 0, f"beta_max is {top}: these targets leave nothing to learn, so beta_max cannot be checked")
    zero = problem.operator.zeros()
    weights = Weights(zero, problem.objective.zero_evaluation().intercept)
    proof = certificate(problem.objective.at(top), weights)
    _at_most("relative gap of Z = 0 at beta_max against zero", proof.relative_gap, 0.0, 1e-9)
    below = solve(problem.with_beta(0.98 * top), tolerance=1e-7)
    _require(float(below.dense().norm()) > 0, f"Z = 0 still at 0.98 beta_max = {0.98 * top}: beta_max is too large")
    _require(below.objective < proof.primal, f"objective {below.objective} below beta_max, {proof.primal} at Z = 0")


def _check_network(problem: Problem, network: Network, solution: Solution, X: Any, mask: Any) -> None:
    """Outputs of network and lift agree; the lift costs no more; the certificate encloses the optimum."""
    lifted = problem.head.lift(network, problem.layout)
    outputs, expected = _rows(problem, network(X, mask).detach()), problem.objective.outputs(lifted)
    _equal("outputs of the network and of its lift", outputs, expected, 1e-8 * (1 + float(expected.abs().max())))
    values = problem.loss.value(outputs, problem.objective.targets)
    data = float((problem.objective.sample_weight * values).sum())
    own = data + problem.beta * float(network.decay().detach())
    _at_most("objective of the lift against that of the network", problem.value(lifted), own, 1e-9 * abs(own))
    proof = certify(network, problem)
    _equal("primal of the certificate and loss + beta decay()", proof.primal, own, 1e-9 * abs(own))
    _encloses(proof, solution.certificate, "for a random network: ")


def _encloses(proof: Certificate, tight: Certificate, where: str) -> None:
    """``dual <= p* <= primal``, with ``p*`` known from a tight certificate."""
    room = 1e-9 * (abs(proof.primal) + abs(tight.primal))
    _at_most(where + "dual against the objective of the solution", proof.dual, tight.primal, room)
    _at_most(where + "dual of the solution against the primal", tight.dual, proof.primal, room)
    _at_most(where + "true gap against the certified gap", proof.primal - tight.primal, proof.gap, room)


def _rows(problem: Problem, outputs: Tensor) -> Tensor:
    """Outputs in the shape of the targets, as the rows ``(R, c)`` of the loss."""
    if problem.layout.per_token:
        mask = problem.tokens.mask
        return outputs.flatten(0, 1) if mask is None else outputs[mask]
    return outputs.reshape(problem.objective.targets.shape)


def _normals(seed: int, like: Tensor | None = None) -> Callable[..., Tensor]:
    """Return a function from shapes to Gaussian tensors; each call draws anew."""
    generator = torch.Generator().manual_seed(seed)

    def draw(shape: Iterable[int]) -> Tensor:
        normal = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
        return normal if like is None else normal.to(like)

    return draw


def _inner(A: Tensor, B: Tensor) -> float:
    return float((A * B).sum())


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)


def _same_shape(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    _require(tuple(tensor.shape) == tuple(expected), f"{name} has shape {tuple(tensor.shape)}; expected {expected}")


def _equal(name: str, got: Tensor | float | None, expected: Tensor | float, room: float) -> None:
    a, b = (torch.as_tensor(value, dtype=torch.float64).detach() for value in (got, expected))
    worst = float((a - b).abs().max()) if a.numel() else 0.0
    _require(worst <= room, f"{name} differ by {worst:.3g} (allowed {room:.3g}): {_show(a)} and {_show(b)}")


def _at_most(name: str, got: Tensor | float, bound: Tensor | float, room: float) -> None:
    a, b = (torch.as_tensor(value, dtype=torch.float64).detach() for value in (got, bound))
    worst = float((a - b).max())
    _require(worst <= room, f"{name}: too large by {worst:.3g} (allowed {room:.3g}): {_show(a)} and {_show(b)}")


def _show(values: Tensor) -> str:
    return f"{float(values):.10g}" if values.numel() == 1 else f"a tensor of norm {float(values.norm()):.6g}"
