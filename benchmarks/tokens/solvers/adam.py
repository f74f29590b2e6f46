"""Adam on the convex objective, full batch, with a cosine schedule: the common practice."""

from __future__ import annotations

import time

from solvers.base import Solver


class Adam(Solver):
    name = "Adam"
    environment = "own"
    package = "torch"
    sampling = "callback"
    knobs = (1e-1, 1e-2, 1e-3)
    """Learning rates; the table shows the best of them, without the time of the others."""

    patience = 12.0
    """CPU seconds for each rate: the schedule is planned to end by then."""

    @staticmethod
    def skip(facts):
        return "left out at this size: minutes" if facts["size"] > 5e7 else None

    def set_objective(self, objective):
        import torch

        self.objective = objective
        self.A = torch.from_numpy(objective.design)
        self.y = torch.from_numpy(objective.y)
        classes = [objective.n_classes] if objective.n_classes else []
        self.shape = (objective.n_features // objective.width, objective.width, *classes)

    def run(self, knob, clock):
        import torch

        self.Z = torch.full(self.shape, 1e-6, dtype=torch.float64, requires_grad=True)
        optimiser = torch.optim.Adam([self.Z], lr=knob)
        started = time.process_time()
        self._value().backward()
        steps = max(50, min(5_000, int(min(clock.limit, self.patience) / (time.process_time() - started + 1e-6))))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
        for k in range(steps):
            optimiser.zero_grad()
            self._value().backward()
            optimiser.step()
            schedule.step()
            if k % max(1, steps // 400) == 0 and clock.judge(self.get_result()):
                break

    def get_result(self):
        return self.Z.detach().numpy()

    def _value(self):
        import torch

        F = self.A @ self.Z.reshape(self.A.shape[1], -1)
        if self.objective.n_classes:
            loss = torch.nn.functional.cross_entropy(F, self.y, reduction="sum")
        else:
            loss = 0.5 * (F[:, 0] - self.y).square().sum()
        return loss + self.objective.beta * self.Z.norm(dim=1).sum()
