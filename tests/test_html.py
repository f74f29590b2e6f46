"""What notebooks show of certificates, solutions, paths and leaderboards."""

from html.parser import HTMLParser

import numpy as np
import pytest

import convexformer as cf
from convexformer import html
from convexformer.estimators.leaderboard import Entry


class Tags(HTMLParser):
    """Collects the tags of a page and checks that they are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.feed(text)
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag, attrs):
        assert not attrs
        self.open.append(tag)
        self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def path():
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(30, 4, 3)), rng.normal(size=30)
    return cf.path("attention", X, y, n_betas=3, beta_min_ratio=0.1)


def test_a_certificate_shows_its_bound_and_its_kind(path):
    text = path.solutions[1].certificate._repr_html_()
    Tags(text)
    assert "relative gap" in text
    assert "exact" in text


def test_a_certificate_that_claims_nothing_says_why_and_shows_no_gap():
    text = cf.Certificate(1.0, 0.0, "none", 0.0, reason="a <b>lower</b> bound & no more")._repr_html_()
    Tags(text)
    assert "gap" not in text
    assert "none: a &lt;b&gt;lower&lt;/b&gt; bound &amp; no more" in text


def test_a_probabilistic_certificate_shows_its_probability():
    assert "with probability 0.999999" in cf.Certificate(1.0, 0.9, "probabilistic", 1 - 1e-6)._repr_html_()


def test_a_solution_shows_head_sizes_status_and_certificate(path):
    text = path.solutions[2]._repr_html_()
    Tags(text)
    for words in ("attention", "s = 4, d = 3, c = 1", "CONVERGED", "relative gap"):
        assert words in text


def test_a_path_has_a_row_for_each_beta_and_counts_tokens(path):
    tags = Tags(path._repr_html_())
    assert tags.seen.count("tr") == 1 + len(path)
    assert "active tokens" in path._repr_html_()
    assert len(path._repr_html_()) < 2000


def test_a_leaderboard_escapes_names():
    board = cf.Leaderboard([Entry("<script>alert(1)</script>", 0.9, 0.01, 1.0, None, "mean & max", "C 1")])
    tags = Tags(board._repr_html_())
    assert "script" not in tags.seen
    assert "&lt;script&gt;" in board._repr_html_()


def test_long_tables_are_cut_and_say_so():
    text = html.table([(k,) for k in range(html.MAX_ROWS + 5)])
    assert Tags(text).seen.count("tr") == html.MAX_ROWS
    assert f"{html.MAX_ROWS} of {html.MAX_ROWS + 5} rows" in text
