"""The code in the documentation runs as it stands."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)


@pytest.mark.parametrize("page", ["architecture.md"])
def test_the_examples_of_a_page_run_one_after_the_other(page, capsys):
    blocks = BLOCK.findall((DOCS / page).read_text())
    assert len(blocks) >= 6
    names: dict[str, object] = {"__name__": "docs"}
    for number, block in enumerate(blocks):
        exec(compile(block, f"{page}, block {number}", "exec"), names)
    assert "solver='auto' takes" in capsys.readouterr().out


def test_the_example_of_shipping_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number, block in enumerate(BLOCK.findall((DOCS / "shipping.md").read_text())):
        exec(compile(block, f"shipping.md, block {number}", "exec"), {"__name__": "docs"})
    assert (tmp_path / "probe.pt2").exists()


def test_the_examples_of_the_report_run(tmp_path, monkeypatch):
    pytest.importorskip(
        "vl_convert", reason="vl-convert-python, which carries the charts' JavaScript, is not installed"
    )
    monkeypatch.chdir(tmp_path)
    (block,) = BLOCK.findall((DOCS / "report.md").read_text())
    exec(compile(block, "report.md", "exec"), {"__name__": "docs"})
    assert (tmp_path / "digits.html").stat().st_size > 500_000


def test_the_examples_of_which_head_run(capsys):
    names: dict[str, object] = {"__name__": "docs"}
    for number, block in enumerate(BLOCK.findall((DOCS / "which-head.md").read_text())):
        exec(compile(block, f"which-head.md, block {number}", "exec"), names)
    assert "scikit-learn LogisticRegression" in capsys.readouterr().out


def test_the_examples_of_exact_relu_run(capsys):
    names: dict[str, object] = {"__name__": "docs"}
    for number, block in enumerate(BLOCK.findall((DOCS / "relu.md").read_text())):
        exec(compile(block, f"relu.md, block {number}", "exec"), names)
    assert "the optimum lies in" in capsys.readouterr().out


def test_the_recipe_for_a_model_in_hand_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (block,) = BLOCK.findall((DOCS / "embedding.md").read_text())
    exec(compile(block, "embedding.md", "exec"), {"__name__": "docs"})
    assert "shape=(1797, 16, 12), float16" in capsys.readouterr().out


def test_the_example_of_student_teacher_runs():
    (block,) = BLOCK.findall((DOCS / "student-teacher.md").read_text())
    exec(compile(block, "student-teacher.md", "exec"), {"__name__": "docs"})
