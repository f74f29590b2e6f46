"""The report: what it says is what the model does, strings stay strings, and nothing is requested."""

import base64
import copy
import hashlib
import json
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix, log_loss
from sklearn.model_selection import StratifiedKFold
from typer.testing import CliRunner

import convexformer as cf
from convexformer.cli import app
from convexformer.data import TokenDataset
from convexformer.data.files import write_json
from convexformer.io import saved_with
from convexformer.report import gather
from convexformer.report.blocks import Figure, Omission, Section
from convexformer.report.evidence import Evidence
from convexformer.report.occlusion import Occlusion
from convexformer.report.page import embedded
from convexformer.report.pictures import thumbnail
from convexformer.report.sections import SECTIONS
from convexformer.report.sections.convergence import RECORDS, thinned
from convexformer.report.sections.predictions import confusion_matrix as confusion_section
from convexformer.report.sections.predictions import reliability
from convexformer.report.sections.weights import _singular
from convexformer.report.text import clean, number
from convexformer.solvers.status import Record
from convexformer.weights import LowRank
from report_case import HOSTILE, Tree

pytest.importorskip("vl_convert", reason="vl-convert-python, which carries the charts' JavaScript, is not installed")


def evidence_of(case, **more):
    model = case["model"]
    tokens = TokenDataset.of(case["X_test"])
    found = Evidence(model, tokens, case["y_test"], environment={}, **more)
    return replace(found, rows=[gather.own_row(found)])


# ---------------------------------------------------------------------- the page


def test_the_page_has_every_section_that_applies_and_says_why_others_do_not(report_page):
    tree = Tree(report_page.read_text())
    sections = [attrs["id"] for tag, attrs in tree.tags if tag == "section"]
    assert sections == [
        *("leaderboard", "convergence", "betas", "confusion", "reliability", "tokens", "spectrum", "mistakes", "setup"),
        "left-out",
    ]
    assert "the attention head is one head, not a sum of blocks" in tree.text


def test_the_page_requests_nothing_and_allows_no_script_but_its_own(report_page):
    tree = Tree(report_page.read_text())
    assert not [tag for tag, _ in tree.tags if tag in ("link", "iframe", "object", "embed", "base", "form")]
    for tag, attrs in tree.tags:
        assert not [name for name in attrs if name.startswith("on")], (tag, attrs)
        assert attrs.get("src", "data:").startswith("data:")
        assert attrs.get("href", "#").startswith("#")
    assert "url(" not in report_page.read_text().split("<style>")[1].split("</style>")[0]
    policy = next(attrs["content"] for tag, attrs in tree.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    assert "unsafe-eval" not in policy
    data, *scripts = tree.scripts
    assert len(scripts) == 2
    for script in scripts:
        assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy
    assert set(json.loads(data)) == {"config", "charts", "follows", "steps"}


def test_hostile_strings_are_text(report_page):
    tree = Tree(report_page.read_text())
    for text in HOSTILE[:-1]:
        assert text in tree.text
    assert "49" not in re.findall(r"\{\{ 7\*7 \}\}|49 number", tree.text)
    assert not [attrs for tag, attrs in tree.tags if tag == "img" and not attrs["src"].startswith("data:image/")]
    assert "? lone    surrogate" in tree.text or "? lone   surrogate" in tree.text


def test_the_page_is_marked_up_for_screen_readers(report_page):
    tree = Tree(report_page.read_text())
    tags = [tag for tag, _ in tree.tags]
    assert [tags.count(name) for name in ("main", "nav", "header", "footer", "h1")] == [1, 1, 1, 1, 1]
    assert ("html", {"lang": "en"}) in tree.tags
    ids = [attrs["id"] for _, attrs in tree.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    for tag, attrs in tree.tags:
        for name in ("aria-labelledby", "aria-describedby", "for"):
            assert attrs.get(name, ids[0]) in ids, (tag, attrs)
        if tag == "img":
            assert attrs["alt"]
        if tag == "th":
            assert attrs["scope"] in ("row", "col")
    charts = [attrs for _, attrs in tree.tags if attrs.get("class") == "chart"]
    assert all(attrs["role"] == "img" and len(attrs["aria-label"]) > 20 for attrs in charts)
    assert tags.count("details") == len(charts)


def test_embedded_json_ends_no_script_and_reads_back():
    value = {"a": ["</script><!--", "\u2028\u2029&<>", 1.5, None]}
    text = embedded(value)
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == value
    with pytest.raises(ValueError, match="JSON"):
        embedded(float("nan"))


# ---------------------------------------------------------------------- what the sections say


def test_the_leaderboard_has_the_scores_of_the_model_and_of_baselines_on_the_same_folds(report_case):
    model, found = report_case["model"], evidence_of(report_case)
    own = gather.own_row(found)
    assert own.test_score == model.score(report_case["X_test"], report_case["y_test"])
    assert own.cv_score == model.best_score_
    assert own.gap == model.certificate_.relative_gap
    probes = list(gather.probe_rows(found, gather.Training(report_case["X_train"], report_case["y_train"])))
    assert [row.reads for row in probes] == ["mean token", "flattened tokens"]
    assert all(row.gap is None and 0 < row.test_score < 1 for row in probes)
    assert all(row.cv_score is not None for row in probes)
    other = evidence_of({**report_case, "model": copy.copy(model).set_params(cv=StratifiedKFold(2, shuffle=True))})
    others = gather.probe_rows(other, gather.Training(report_case["X_train"], report_case["y_train"]))
    assert all(row.cv_score is None and row.test_score for row in others)
    board = cf.Leaderboard(model.leaderboard_)
    assert list(gather.board_rows(board, own)) == []


def test_confusions_and_reliability_are_those_of_scikit_learn(report_case):
    model, X, y = report_case["model"], report_case["X_test"], report_case["y_test"]
    found = evidence_of(report_case)
    figure = next(block for block in confusion_section(found).blocks if isinstance(block, Figure))
    counts = np.array([[int(cell) for cell in row[1:]] for row in figure.table.rows])
    assert (counts == confusion_matrix(y, model.predict(X))).all()
    rows = figure.spec["data"]["values"]
    assert sum(row["count"] for row in rows) == len(y)
    facts, chart = reliability(found).blocks
    facts = dict(facts.pairs)
    p = model.predict_proba(X)
    assert facts["mean negative log-likelihood"] == number(log_loss(y, p, labels=model.classes_))
    groups = chart.spec["data"]["values"]
    assert sum(group["count"] for group in groups) == len(y)
    assert sum(group["count"] * group["true"] for group in groups) / len(y) == pytest.approx(model.score(X, y))


def test_the_computed_path_passes_through_the_model(report_case):
    found = evidence_of(report_case)
    path = gather.computed_path(found, gather.Training(report_case["X_train"], report_case["y_train"]), 6, 60.0)
    assert (path.ratios == report_case["model"].cv_results_["beta_ratio"][: len(path.ratios)]).all()
    at = report_case["model"].best_index_
    assert path.test_scores[at] == pytest.approx(found.score, abs=0.02)
    assert np.allclose(path.norms[at], report_case["model"].token_importance_, rtol=0.1, atol=0.05)
    assert (path.gaps <= 1e-3).all()


def test_contributions_of_a_linear_head_add_up(report_case):
    X, y = report_case["X_train"], report_case["y_train"]
    model = cf.TokenClassifier(beta_ratio=0.05).fit(X, y)
    tokens = TokenDataset.of(X[:3])
    occlusion = Occlusion(model, tokens, 10.0)
    mean = model.mean_.expand(1, *X.shape[1:])
    outputs = model.outputs(torch.cat([tokens.X, mean]))
    scores = outputs - outputs.mean(1, keepdims=True)
    for row in range(3):
        at = scores[row].argmax()
        assert occlusion.of(row).sum() == pytest.approx(scores[row, at] - scores[3, at])
    occlusion.left = 0.0
    assert occlusion.of(0) is None


def test_contributions_of_a_masked_sample_are_those_of_its_tokens():
    rng = np.random.default_rng(0)
    X = [rng.standard_normal((n, 3)) for n in (2, 4) * 20]
    y = np.array([x[0, 0] > 0 for x in X])
    model = cf.TokenClassifier(beta_ratio=0.05).fit(X, y)
    occlusion = Occlusion(model, model._read_tokens(X, None, reset=False), 10.0)
    assert [len(occlusion.of(row)) for row in (0, 1)] == [2, 4]
    assert np.argmax(np.abs(occlusion.of(1))) == 0


def test_singular_values_of_factors_are_those_of_the_matrix():
    rng = torch.Generator().manual_seed(0)
    U, V = (torch.randn(5, n, generator=rng, dtype=torch.float64) for n in (7, 6))
    factors = LowRank(U, V, torch.tensor([0, 0, 1, 1, 1]), (2, 7, 6))
    dense = torch.cat([torch.linalg.svdvals(block)[:k] for block, k in zip(factors.dense(), (2, 3), strict=True)])
    assert torch.allclose(_singular(factors), dense.sort(descending=True).values)
    assert _singular(torch.zeros(1 << 13, 1 << 12)) is None


def test_a_portfolio_shows_its_blocks_and_a_regressor_its_residuals(report_case):
    head = cf.heads.Sum([cf.heads.Feature(cf.features.MeanPooling(), decay="frobenius"), "attention"])
    model = cf.TokenClassifier(head=head, beta_ratio=0.05).fit(report_case["X_train"], report_case["y_train"])
    found = evidence_of({**report_case, "model": model})
    parts = {part.id: part for part in (section(found) for section in SECTIONS) if isinstance(part, Section)}
    shares = {row[0]: row[2] for row in parts["blocks"].blocks[0].table.rows}
    norms = model.solution_.block_norms
    assert shares == {name: f"{100 * norm / sum(norms.values()):.1f}%" for name, norm in norms.items()}
    assert {row[0] for row in parts["spectrum"].blocks[0].table.rows} == set(norms)

    rng = np.random.default_rng(0)
    X = rng.standard_normal((60, 3, 2))
    model = cf.TokenRegressor(beta_ratio=0.01).fit(X[:40], X[:40, 1, 0])
    found = evidence_of({"model": model, "X_test": X[40:], "y_test": X[40:, 1, 0]})
    parts = [part for part in (section(found) for section in SECTIONS) if part is not None]
    ids = {part.id for part in parts if isinstance(part, Section)}
    assert {"scatter-section", "mistakes", "tokens"} <= ids
    assert "the model is a regressor." in [part.reason for part in parts if isinstance(part, Omission)]


def test_a_model_alone_makes_a_page_and_says_what_is_missing(report_case, tmp_path):
    model = cf.TokenClassifier(loss="squared_hinge").fit(report_case["X_train"], report_case["y_train"] > 4)
    text = Tree(model.report(tmp_path / "alone.html").read_text()).text
    assert text.count("there is no test data with targets") == 3
    assert "the model was fitted at one beta" in text
    tested = model.report(tmp_path / "tested.html", report_case["X_test"], report_case["y_test"] > 4)
    assert "has margins, not probabilities" in Tree(tested.read_text()).text


def test_texts_with_a_word_for_each_token_are_shown_by_word(report_case, tmp_path):
    words = [[f"w{k % 7}", "<b>", "c", "d"] for k in range(140)]
    file = report_case["model"].report(
        tmp_path / "words.html", report_case["X_test"], report_case["y_test"], texts=words
    )
    tree = Tree(file.read_text())
    assert "word-importance" in [attrs.get("id") for _, attrs in tree.tags]
    assert not [tag for tag, _ in tree.tags if tag == "b"]


# ---------------------------------------------------------------------- what it reads


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"y_test": [1]}, "y_test was given without X_test"),
        ({"texts": ["a"]}, "texts were given without X_test"),
        ({"X_test": np.zeros((2, 4, 18)), "texts": ["a"]}, "texts: 1 for 2 test samples"),
        ({"X_test": np.zeros((2, 4, 18)), "images": "abc"}, "images: one string for 2"),
        ({"X_test": np.zeros((2, 4, 18)), "y_test": [1]}, "X_test has 2 samples and y_test has 1"),
        ({"grid": (3, 3)}, "expected .rows, columns. with 4 cells"),
        ({"class_names": ["a"]}, "class_names has 1 names; the model has 10 classes"),
        ({"X_train": np.ones((30, 4, 18))}, "X_train was given without y_train"),
        ({"beta_path": {"betas": [1]}}, "this is no path"),
        ({"beta_path": {"beta_max": 1, "betas": [1], "relative_gaps": [0]}}, "it is of another fit"),
    ],
)
def test_bad_input_is_explained(report_case, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        report_case["model"].report(tmp_path / "page.html", **options)
    assert not (tmp_path / "page.html").exists()


def test_training_data_of_another_fit_is_refused(report_case, tmp_path):
    with pytest.raises(ValueError, match="X_train has beta_max="):
        report_case["model"].report(
            tmp_path / "page.html", X_train=report_case["X_train"][:80], y_train=report_case["y_train"][:80]
        )


def test_without_the_extra_the_error_says_what_to_install(report_case, tmp_path, monkeypatch):
    from convexformer.report.bundle import charts_script

    monkeypatch.setitem(sys.modules, "vl_convert", None)
    charts_script.cache_clear()
    with pytest.raises(ValueError, match=r"convexformer\[report\]"):
        report_case["model"].report(tmp_path / "page.html")
    charts_script.cache_clear()


def test_the_command_uses_what_the_run_folder_holds(report_case, tmp_path):
    call = CliRunner().invoke
    run = tmp_path / "run"
    cf.save(report_case["model"], run)
    np.savez(
        tmp_path / "test.npz", X=report_case["X_test"], y=report_case["y_test"], names=np.array(["missing.png"] * 140)
    )
    np.savez(tmp_path / "train.npz", X=report_case["X_train"], y=report_case["y_train"])
    solved = call(app, ["path", str(tmp_path / "train.npz"), "-o", str(run), "--n-betas", "4", "--json"])
    assert solved.exit_code == 0, solved.output
    write_json(
        run / "leaderboard.json", [{**report_case["model"].leaderboard_.records()[0], "name": "<u>other", "score": 0.5}]
    )
    words = ["report", str(run), "--data", str(tmp_path / "test.npz"), "--images", "names", "--grid", "2x2", "--json"]
    done = call(app, words)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["report"] == str(run / "report.html")
    text = Tree((run / "report.html").read_text()).text
    assert "a path solved before" in text
    assert "<u>other" in text
    assert "could not be read" in text
    assert cf.__version__ in text
    assert call(app, ["report", str(run), "--texts", "t"]).exit_code == 2
    assert call(app, [*words[:-3], "--grid", "2by2"]).exit_code == 2
    (run / "path.json").write_text("{")
    assert "is not valid JSON" in call(app, words).stderr
    cf.save(report_case["model"].network_, tmp_path / "network")
    assert "holds a StandardizedNetwork" in call(app, ["report", str(tmp_path / "network")]).stderr


def test_folders_note_the_software_and_those_of_earlier_versions_load(report_case, tmp_path):
    cf.save(report_case["model"], tmp_path)
    assert saved_with(tmp_path)["torch"] == torch.__version__
    config = json.loads((tmp_path / "config.json").read_text())
    del config["environment"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert saved_with(tmp_path) == {"convexformer": cf.__version__}
    assert cf.load(tmp_path).best_score_ == report_case["model"].best_score_


def test_a_leaderboard_reads_its_records_back(report_case):
    board = report_case["model"].leaderboard_
    again = cf.Leaderboard.of_records(json.loads(json.dumps(board.records())))
    assert list(again) == list(board)
    with pytest.raises(ValueError, match="no records of a leaderboard"):
        cf.Leaderboard.of_records([{"name": "x"}])


# ---------------------------------------------------------------------- small parts


def test_strings_numbers_and_histories_are_shortened():
    assert clean("a\x00b\u202ec\nd") == "a bc d"
    assert len(clean("x" * 1000)) == 600
    assert number(None) == number(float("nan")) == "\N{EN DASH}"
    assert number(-1.5e-7, 4) == "\N{MINUS SIGN}1.5e\N{MINUS SIGN}07"
    assert number(float("-inf")) == "\N{MINUS SIGN}∞"
    assert number(123456.0) == "123,456"
    history = tuple(Record(k, 0.0, 1.0, 0.0, 1.0) for k in range(1000))
    short = thinned(history)
    assert len(short) <= RECORDS
    assert (short[0], short[-1]) == (history[0], history[-1])


def test_thumbnails_take_arrays_and_files_and_survive_the_rest(tmp_path):
    from PIL import Image

    Image.new("RGB", (300, 200), "red").save(tmp_path / "red.png")
    assert thumbnail(tmp_path / "red.png").startswith("data:image/jpeg")
    assert thumbnail(np.eye(8)).startswith("data:image/png")
    assert thumbnail(np.zeros((3, 40, 40), dtype=np.uint8)).startswith("data:image/jpeg")
    (tmp_path / "bad.png").write_bytes(b"no picture")
    assert thumbnail(tmp_path / "bad.png") == thumbnail("nowhere.png") == thumbnail(np.zeros(5)) == ""


class Store:
    """What a token store offers: tokens by rows, and what is known of the samples."""

    def __init__(self, X, labels, texts):
        self.X, self.labels, self.texts = X, labels, texts
        self.grid, self.names, self.pieces = (2, 2), None, None

    def __len__(self):
        return len(self.X)

    def __getitem__(self, rows):
        return Store(self.X[rows], None, None)

    def load(self):
        return TokenDataset.of(self.X)


def test_a_search_by_another_score_is_named_by_it(report_case, tmp_path):
    y = report_case["y_train"] > 4
    model = cf.TokenClassifierCV(cv=2, n_betas=3, scoring="neg_log_loss").fit(report_case["X_train"], y)
    tested = {"X_test": TokenDataset.of(report_case["X_test"]), "y_test": report_case["y_test"] > 4}
    file = model.report(tmp_path / "page.html", **tested, X_train=report_case["X_train"], y_train=y)
    text = Tree(file.read_text()).text
    assert "neg log loss, folds" in text
    assert "test accuracy" in text
    assert "Neg log loss against beta: by cross-validation it is at most" in text
    assert "on the test data it is at most" not in text


def test_a_store_brings_its_labels_texts_and_grid_and_large_data_is_drawn_from(report_case, tmp_path):
    store = Store(report_case["X_test"], report_case["y_test"], [f"text <{k}>" for k in range(140)])
    file = report_case["model"].report(tmp_path / "store.html", store, max_test=100)
    text = Tree(file.read_text()).text
    assert "100 test samples of 140, drawn at random" in text
    assert re.search(r"text <\d+>", text)
    assert "token-map" in file.read_text()
