import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

# the same examples on every machine and in every run; how long one takes is nobody's business
settings.register_profile(
    "convexformer",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("convexformer")


@pytest.fixture(scope="session")
def report_case():
    """What a report takes; the fixtures of the report are here, since two modules share them."""
    from report_case import build

    return build()


@pytest.fixture(scope="session")
def report_page(report_case, tmp_path_factory):
    """A page with everything in it."""
    file = tmp_path_factory.mktemp("report") / "report.html"
    options = {name: value for name, value in report_case.items() if name != "model"}
    return report_case["model"].report(file, **options)
