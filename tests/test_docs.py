"""The code in the documentation runs as it stands, and every option is documented."""

import importlib.util
import inspect
import json
import re
from enum import Enum
from pathlib import Path
from types import ModuleType

import pytest

import convexformer as cf

DOCS = Path(__file__).parent.parent / "docs"


def script(name: str) -> ModuleType:
    """Import a script of the documentation."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


run_notebooks = script("run_notebooks")
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


def test_the_examples_of_the_new_pages_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for page in (
        "certificates.md",
        "first-probe.md",
        *sorted(f"heads/{p.name}" for p in (DOCS / "heads").glob("*.md")),
    ):
        names: dict[str, object] = {"__name__": "docs"}
        for number, block in enumerate(BLOCK.findall((DOCS / page).read_text())):
            exec(compile(block, f"{page}, block {number}", "exec"), names)
    assert (tmp_path / "model" / "config.json").exists()


def test_the_example_of_the_readme_runs_and_its_links_lead_somewhere():
    text = (DOCS.parent / "README.md").read_text()
    (block,) = BLOCK.findall(text)
    names: dict[str, object] = {"__name__": "docs"}
    exec(compile(block, "README.md", "exec"), names)
    assert names["probe"].certificate_.meets(1e-3)
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert (DOCS.parent / link).exists(), link


def test_the_errata_quote_the_numbers_that_their_script_prints():
    printed = "\n".join(script("errata_numbers").main())
    text = (DOCS / "errata.md").read_text()
    for number in re.findall(r"\d+\.\d{3,}|\d+%|\d+(?:\.\d)?M|108", printed):
        assert number in text, f"errata.md lacks {number}"
    for number in re.findall(r"\d+\.\d{3,}", text):
        assert number in printed, f"errata_numbers.py does not print {number}"


CONTRACT = [
    *(getattr(cf, name) for name in cf.__all__),
    *(getattr(module, name) for module in (cf.heads, cf.features, cf.losses) for name in module.__all__),
    cf.margin.AttentionSVM,
    cf.deep.ConvexTransformer,
    cf.deep.SoftmaxTransformer,
    cf.deep.Training,
]
INTERNAL = {"Layout", "Program", "DiagonalHessian", "SoftmaxHessian"}  # made by the library, never by a user
CLASSES = {
    thing.__name__: thing
    for thing in CONTRACT
    if inspect.isclass(thing) and not issubclass(thing, (Exception, Enum)) and not inspect.isabstract(thing)
}


@pytest.mark.parametrize("name", sorted(CLASSES.keys() - INTERNAL))
def test_every_option_of_a_public_class_is_documented(name):
    cls = CLASSES[name]
    options = inspect.signature(cls).parameters
    text = inspect.cleandoc(cls.__doc__ or "")
    titles = re.findall(r"^([\w, ]+) : ", text.partition("\n----------\n")[2], re.M)
    documented = {option for title in titles for option in title.split(", ")}
    missing = set(options) - documented
    assert not missing, f"add to the Parameters (or Attributes) section of {name}'s docstring: {sorted(missing)}"
    extra = documented - set(options)
    assert not extra, f"{name} has no options {sorted(extra)}, but its docstring describes them"


def test_the_estimators_name_every_head():
    for name in cf.heads.HEADS:
        if name not in ("sum", "feature", "kernel", "block_self_attention"):  # objects only: they need arguments
            assert f'``"{name}"``' in (cf.TokenClassifier.__doc__ or ""), name


def test_every_head_and_every_new_page_is_in_the_navigation():
    nav = (DOCS.parent / "mkdocs.yml").read_text()
    for page in DOCS.rglob("*.md"):
        assert str(page.relative_to(DOCS)) in nav, f"{page} is missing from nav in mkdocs.yml"


def test_the_committed_notebooks_are_those_of_their_sources():
    sources = sorted((DOCS / "gallery").glob("*.py"))
    assert len(sources) >= 4
    for source in sources:
        page = source.with_suffix(".md").read_text()
        notebook = json.loads(source.with_suffix(".ipynb").read_text())
        cells = run_notebooks.cells(source.read_text())
        assert ["".join(cell["source"]) for cell in notebook["cells"]] == [cell.text for cell in cells]
        assert all(cell.text in page for cell in cells), f"{page} is older than {source}: run `make notebooks`"


@pytest.mark.parametrize("name", sorted(source.stem for source in (DOCS / "gallery").glob("*.py")))
def test_every_notebook_runs_and_shows_figures_and_certificates(name):
    done = run_notebooks.run(DOCS / "gallery" / f"{name}.py")
    assert any(output.png.startswith(b"\x89PNG") for _, output in done)
    assert any("relative" in output.html + output.printed for _, output in done)


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
