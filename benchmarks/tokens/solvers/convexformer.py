"""convexformer: stops by its own certificate; gated problems are given as tokens and gates."""

from __future__ import annotations

import warnings

from solvers.base import Solver


class Auto(Solver):
    name = "convexformer"
    environment = "own"
    package = "convexformer"
    sampling = "callback"
    knobs = (1e-3, 1e-6)
    """Tolerances: the relative duality gap to certify."""
    solver = "auto"

    def set_objective(self, objective):
        import torch

        self.objective = objective
        self.tokens = torch.from_numpy(objective.X)  # shares the memory
        self.problem = None

    def warm_up(self):
        self.refresh()
        self._solve(self.problem, self.knobs[-1])
        self.problem = None

    def run(self, knob, clock):
        def look(record, weights):
            clock.judge(
                self._numbers(weights)
            )  # its return value is ignored: the certificate stops the run, not the oracle
            return clock.seconds > clock.limit

        self.solution = self._solve(self.problem, knob, callback=look)

    def refresh(self):
        """Build the problem anew, so that nothing that the last run cached is free."""
        self.problem = None  # before building the new one: two may not fit into memory
        self.problem = self._problem()

    def get_result(self):
        return self._numbers(self.solution.weights)

    def extra(self):
        solution = self.solution
        return {
            "solver": solution.solver,
            "certified_gap": solution.certificate.relative_gap,
            "kind": solution.certificate.kind,
            "dual": solution.certificate.dual,
            "iterations": solution.n_iter,
            "status": solution.status.name,
        }

    def _problem(self):
        import convexformer as cf

        head = cf.heads.Attention()
        if self.objective.gate_vectors is not None:
            head = cf.heads.Attention(activation="gated_relu", gates=self.objective.gate_vectors)
        loss = "cross_entropy" if self.objective.n_classes else "squared"
        problem = cf.Problem(head, self.tokens, self.objective.y, loss=loss, beta=self.objective.beta)
        problem.operator  # noqa: B018  (preparing the data is not timed, as for every tool)
        return problem

    def _solve(self, problem, tolerance, **options):
        import convexformer as cf

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return cf.solve(problem, tolerance=tolerance, solver=self.solver, max_iter=200_000, **options)

    @staticmethod
    def _numbers(weights):
        return weights.dense().cpu().double().numpy()


class Fista(Auto):
    name = "convexformer, fista"
    solver = "fista"


class WorkingSet(Auto):
    name = "convexformer, working_set"
    solver = "working_set"

    def set_objective(self, objective):
        from convexformer.solvers import SOLVERS

        if "working_set" not in SOLVERS:
            raise ImportError("no solver 'working_set' in this version of convexformer")
        super().set_objective(objective)
