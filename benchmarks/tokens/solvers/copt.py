"""copt: accelerated proximal gradient with backtracking; the one peer whose groups may be (class, token) under softmax."""

from __future__ import annotations

import numpy as np

from solvers.base import Solver


class Copt(Solver):
    name = "copt"
    package = "copt"
    sampling = "callback"

    @staticmethod
    def skip(facts):
        slow = facts["size"] > 5e7 or (facts["size"] > 1e7 and facts["beta_ratio"] < 0.05)
        return "left out at this size and beta: minutes" if slow else None

    def set_objective(self, objective):
        from copt.penalty import GroupL1

        self.objective = objective
        self.A = np.array(objective.design)
        n_columns = max(objective.n_classes, 1)
        self.shape = (n_columns, objective.n_features)  # a class a row, so that groups are contiguous
        d = objective.width
        groups = [np.arange(k, k + d) for k in range(0, n_columns * objective.n_features, d)]
        self.penalty = GroupL1(objective.beta, groups)

    def run(self, knob, clock):
        import copt

        checks = 0

        def look(state):
            nonlocal checks
            checks += 1
            self.w = state["x"]
            if checks <= 10 or checks % 5 == 0:
                return not clock.judge(self.get_result())  # False stops
            return True

        copt.minimize_proximal_gradient(
            lambda w, *_: self._loss(w)[0],
            np.zeros(self.shape).ravel(),
            jac=lambda w, *_: self._gradient(w),
            prox=lambda w, step, *_: self.penalty.prox(w, step),
            tol=0,
            max_iter=100_000,
            accelerated=True,
            callback=look,
        )

    def get_result(self):
        return self.w.reshape(self.shape).T

    def _loss(self, w):
        """Value and the gradient with respect to the outputs."""
        F = self.A @ w.reshape(self.shape).T
        y = self.objective.y
        if not self.objective.n_classes:
            R = F - y[:, None]
            return 0.5 * float(np.sum(R * R)), R
        E = np.exp(F - F.max(1, keepdims=True))
        P = E / E.sum(1, keepdims=True)
        rows = np.arange(len(y))
        value = -float(np.log(np.maximum(P[rows, y], 1e-300)).sum())
        P[rows, y] -= 1.0
        return value, P

    def _gradient(self, w):
        return (self._loss(w)[1].T @ self.A).ravel()
