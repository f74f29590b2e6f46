"""The table of claims: every claim has a verdict, the page is what the script writes, and checks say what they measure."""

import importlib.util
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from rich.console import Console

from convexformer.experiments import claims, claims_kernels, claims_programs, claims_registry
from convexformer.experiments.claims import CLAIMS, QUICK, SOURCES
from convexformer.experiments.claims_counterexamples import cell_count, equal_parameters, row_stochastic
from convexformer.experiments.claims_margins import zero_entries_stay
from convexformer.experiments.claims_networks import equivalence, half_on_the_loss
from convexformer.experiments.claims_registry import Beyond, Check, Claim, Found, Records
from convexformer.experiments.claims_structure import inverse_map, uncorrelated_blocks
from convexformer.experiments.deep_study import Measured
from convexformer.experiments.registry import EXPERIMENTS
from convexformer.experiments.study import Verdict
from convexformer.features import Fastfood

DOCS = Path(__file__).parent.parent / "docs"
VERDICTS = {each.value for each in Verdict}


def make_claims():
    spec = importlib.util.spec_from_file_location("make_claims", DOCS / "make_claims.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_script_writes_from_the_records():
    expected = make_claims().page()
    assert (DOCS / "claims.md").read_text() == expected, "run `python docs/make_claims.py`"


def test_every_claim_of_the_five_documents_has_a_verdict_and_a_command():
    records = Records.stored(DOCS / "results", SOURCES)
    table = claims_registry.rows(CLAIMS, records)
    assert len({row[0] for row in table}) == 5
    assert len(table) == len(CLAIMS) > 150
    assert max(Counter(tuple(row[:3]) for row in table).values()) == 1
    for row, claim in zip(table, CLAIMS, strict=True):
        assert row[4] in VERDICTS, row
        assert row[3], row  # a measurement, or why there is none
        assert (row[5] == "-") == isinstance(claim.evidence, Beyond)


def test_every_check_is_recorded():
    records = Records.stored(DOCS / "results", SOURCES)
    keys = {claim.evidence.key for claim in CLAIMS if isinstance(claim.evidence, Check)}
    assert keys == set(records.checks), "run `python docs/make_claims.py --measure`"


def test_claims_that_fail_say_why_or_link_to_the_errata():
    records = Records.stored(DOCS / "results", SOURCES)
    for claim, row in zip(CLAIMS, claims_registry.rows(CLAIMS, records), strict=True):
        if isinstance(claim.evidence, Check) and row[4] == Verdict.NO.value:
            assert "errata.md" in row[3], row
    for page in set(re.findall(r"\]\(([\w-]+\.md)\)", (DOCS / "claims.md").read_text())):
        assert (DOCS / page).exists(), page


def test_the_head_of_the_page_counts_the_verdicts_of_its_table():
    lines = (DOCS / "claims.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| ")]
    table = [row for row in cells if len(row) == 6 and row[0] not in ("document", "---")]
    stated = {row[0]: row[1] for row in cells if len(row) == 2 and row[0] not in ("document", "---")}
    assert len(table) == len(CLAIMS)
    for paper in (*dict.fromkeys(row[0] for row in table), "all"):
        verdicts = Counter(row[4] for row in table if paper in (row[0], "all"))
        found = {name: int(number) for number, name in re.findall(r"(\d+) ([a-z ]+)", stated.pop(paper))}
        assert found == verdicts, paper
    assert not stated


def test_no_verdict_depends_on_a_clock():
    """Seconds are measured for table 1 alone (``deep_costs``) and to be printed; no experiment stops at a time."""
    for file in sorted(Path(claims.__file__).parent.glob("*.py")):
        text = file.read_text()
        assert "max_time=" not in text, file.name
        if file.name.startswith("claims_"):
            assert "time" not in re.findall(r"^import (\w+)", text, re.M), file.name


def test_every_finding_of_a_recorded_run_that_a_claim_reads_has_its_experiment():
    """A pattern that matches nothing would leave its row without a measurement."""
    records = Records.stored(DOCS / "results", SOURCES)
    for claim in CLAIMS:
        if isinstance(claim.evidence, Found):
            assert any(claim.evidence.matches(each) for each in records.findings[claim.evidence.experiment]), claim


def test_experiments_and_their_patterns_exist():
    assert set(SOURCES) <= set(EXPERIMENTS)
    assert set(QUICK) <= set(SOURCES)
    for claim in CLAIMS:
        if isinstance(claim.evidence, Found):
            re.compile(claim.evidence.source)
            re.compile(claim.evidence.claim)
            assert claim.evidence.preset in ("", *EXPERIMENTS[claim.evidence.experiment].presets), claim


def finding(claim, verdict, measured="5"):
    return {"source": "Ours, figure 1", "claim": claim, "measured": measured, "verdict": verdict}


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ([], "not tested"),
        (["not tested"], "not tested"),
        (["reproduced"], "reproduced"),
        (["reproduced", "not tested"], "reproduced"),
        (["reproduced", "not reproduced"], "partly"),
        (["not reproduced", "not reproduced"], "not reproduced"),
    ],
)
def test_findings_of_one_claim_are_joined(verdicts, expected):
    claim = Claim("Ours", "figure 1", "faster", Found("grokking", "figure 1", "^faster"))
    found = [finding(f"faster, case {k}", verdict) for k, verdict in enumerate(verdicts)]
    records = Records({}, {"grokking": [*found, finding("slower", "not reproduced")]})
    text, verdict = claims_registry.measured(claim, records)
    assert verdict == expected
    assert text
    assert "slower" not in text


def test_a_quick_run_counts_where_a_full_one_lacks_the_test():
    claim = Claim("Ours", "figure 1", "faster", Found("grokking", "figure 1", "^faster"))
    quick = {**finding("faster", "reproduced"), "quick": True}
    for others, expected in (([], "reproduced"), ([finding("faster", "not tested")], "reproduced")):
        text, verdict = claims_registry.measured(claim, Records({}, {"grokking": [*others, quick]}))
        assert verdict == expected
        assert text.endswith("(a quick run)")
    full = finding("faster", "not reproduced")
    assert claims_registry.measured(claim, Records({}, {"grokking": [full, quick]})) == ("5", "not reproduced")


def test_what_a_quick_run_alone_has_tested_stands_beside_the_full_one():
    claim = Claim("Ours", "figure 1", "faster", Found("grokking", "figure 1", "^faster"))
    full = {**finding("faster", "reproduced", "7"), "seeds": 5}
    other = {**finding("faster, case 2", "not reproduced", "8"), "quick": True, "seeds": 9}
    again = {**finding("faster", "not reproduced", "9"), "quick": True, "seeds": 9}
    for order in ([full, other, again], [again, other, full]):
        text, verdict = claims_registry.measured(claim, Records({}, {"grokking": order}))
        assert sorted(text.split("; ")) == ["faster, case 2: 8 (a quick run)", "faster: 7"]
        assert verdict == "partly"


def test_the_run_with_most_seeds_counts():
    claim = Claim("Ours", "figure 1", "faster", Found("grokking", "figure 1", "^faster"))
    one, five = ({**finding("faster", "reproduced", str(n)), "seeds": n} for n in (1, 5))
    five["verdict"] = "not reproduced"
    for order in ([one, five], [five, one]):
        assert claims_registry.measured(claim, Records({}, {"grokking": order})) == ("5", "not reproduced")
    five["verdict"] = "not tested"
    for order in ([one, five], [five, one]):
        assert claims_registry.measured(claim, Records({}, {"grokking": order})) == ("1 (one seed)", "reproduced")
    other = {**finding("faster, case 2", "not reproduced"), "seeds": 1}
    text, verdict = claims_registry.measured(claim, Records({}, {"grokking": [one, five, other]}))
    assert verdict == "partly"
    assert text == "faster: 1; faster, case 2: 5 (one seed)"


def test_a_claim_beyond_the_recorded_runs_says_why():
    claim = Claim("Ours", "figure 1", "faster", Found("grokking", "figure 1", "^faster", "It takes a day."))
    full = finding("faster", "not tested", "never in 5")
    expected = ("never in 5. It takes a day.", "not testable here")
    assert claims_registry.measured(claim, Records({}, {"grokking": [full]})) == expected
    quick = {"grokking": [{**full, "quick": True}]}
    assert claims_registry.measured(claim, Records({}, quick)) == ("never in 5", "not tested")
    assert claims_registry.measured(claim, Records({}, {}))[1] == "not tested"
    tested = {"grokking": [full, {**finding("faster", "reproduced", "at 3"), "quick": True}]}
    assert claims_registry.measured(claim, Records({}, tested)) == ("at 3 (a quick run)", "reproduced")


def test_records_of_before_claims_had_one_form_are_read():
    old = {"claims": [{"source": "the report, figure 1", "claim": "a", "measured": "b", "holds": False}]}
    (one,) = claims_registry.findings_of(old)
    assert one["source"] == "Fisher et al., figure 1"
    assert one["verdict"] == "not reproduced"


@pytest.mark.parametrize("head", ["attention", "fno"])
def test_an_equivalence_holds_and_a_wrong_optimum_would_be_noticed(head, monkeypatch):
    assert equivalence(head, "linear", "tokens" if head == "fno" else "vector").verdict is Verdict.YES
    from convexformer.experiments import claims_networks

    honest = claims_networks.network_objective
    monkeypatch.setattr(claims_networks, "network_objective", lambda *a: 0.99 * honest(*a))
    assert equivalence(head, "linear", "tokens" if head == "fno" else "vector").verdict is Verdict.NO


def test_counterexamples_and_identities_say_what_they_should():
    assert half_on_the_loss().verdict is Verdict.NO
    assert "0.274375" in row_stochastic().text
    assert cell_count("self_attention").text.startswith("108 arrangements, printed bound 1.71")
    assert inverse_map().verdict is Verdict.PARTLY
    assert uncorrelated_blocks().verdict is Verdict.YES
    assert equal_parameters().verdict is Verdict.PARTLY  # as printed yes, in the programs no
    assert claims_programs.mixer_is_smaller().verdict is Verdict.PARTLY
    assert claims_programs.gated_token_weighted().verdict is Verdict.YES
    assert zero_entries_stay().verdict is Verdict.YES


def test_the_whitened_program_is_compared_with_its_closed_form(monkeypatch):
    assert claims_programs.whitened_relu().verdict is Verdict.YES
    honest = claims_programs._shrunk
    monkeypatch.setattr(claims_programs, "_shrunk", lambda size, beta: honest(size, 1.01 * beta))
    assert claims_programs.whitened_relu().verdict is Verdict.NO


def test_weights_between_uncorrelated_features_are_looked_at(monkeypatch):
    assert claims_programs.uncorrelated_weights().verdict is Verdict.YES
    apart = claims_programs._uncorrelated()
    monkeypatch.setattr(claims_programs, "_uncorrelated", lambda: apart + 0.1)  # now all features are correlated
    assert claims_programs.uncorrelated_weights().verdict is Verdict.NO


def test_operations_of_the_feature_map_are_counted_not_timed(monkeypatch):
    monkeypatch.setattr(claims_kernels, "WIDTHS", (256, 512, 1024, 2048))
    honest = claims_kernels.log_linear_operations()
    assert honest.verdict is Verdict.YES
    assert honest == claims_kernels.log_linear_operations()
    monkeypatch.setattr(Fastfood, "project", lambda self, X: X @ torch.ones(X.shape[-1], X.shape[-1]))
    assert claims_kernels.log_linear_operations().verdict is Verdict.NO


def test_chi_variables_flip_signs_and_near_gaussians_with_their_degrees():
    assert claims_kernels.sign_flips().verdict is Verdict.NO
    found = claims_kernels.chi_against_gaussian()
    assert found.verdict is Verdict.PARTLY
    values = [float(each) for each in re.findall(r"0\.\d{3}", found.text)]
    assert values == sorted(values, reverse=True)


def test_a_run_writes_the_table_and_counts_what_it_leaves_open(tmp_path, monkeypatch):
    def tiny(output, *, quick, console):
        return {"certified": True, "untested": 0, "claims": [finding("faster", "reproduced")]}

    monkeypatch.setattr(claims, "EXPERIMENTS", {"grokking": type("E", (), {"load": staticmethod(lambda: tiny)})})
    monkeypatch.setattr(claims, "QUICK", ("grokking",))
    monkeypatch.setattr(
        claims,
        "CLAIMS",
        (
            Claim("Ours", "a", "faster", Found("grokking", "figure 1", "faster")),
            Claim("Ours", "b", "left out", Found("mod15", "figure 6", "four")),
            Claim("Ours", "c", "half", Check(half_on_the_loss)),
            Claim("Ours", "d", "elsewhere", Beyond("no data")),
        ),
    )
    monkeypatch.setattr(claims, "SOURCES", ("grokking", "mod15"))
    result = claims.run(tmp_path, quick=True, console=Console(quiet=True))
    assert [each["verdict"] for each in result["claims"]] == [
        "reproduced",
        "not tested",
        "not reproduced",
        "not testable here",
    ]
    assert result["untested"] == 1
    assert result["certified"]
    assert "Left out: mod15" in (tmp_path / "summary.md").read_text()
    assert (tmp_path / "results.json").exists()


def test_an_uncertified_optimum_is_not_certified(tmp_path, monkeypatch):
    def equivalence() -> Measured:
        return Measured("off", Verdict.NO)

    monkeypatch.setattr(claims, "CLAIMS", (Claim("Ours", "a", "equal", Check(equivalence)),))
    monkeypatch.setattr(claims, "SOURCES", ())
    assert not claims.run(tmp_path, quick=True, console=Console(quiet=True))["certified"]
