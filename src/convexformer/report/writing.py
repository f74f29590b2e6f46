"""``report(model, path)``: gather the evidence, draw the sections, write the page."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any

from sklearn.utils.validation import check_is_fitted

from convexformer.data.files import atomic_write
from convexformer.estimators import Leaderboard, TokenEstimator
from convexformer.estimators.inputs import plain_label
from convexformer.path import Path
from convexformer.report import gather
from convexformer.report.blocks import Omission, Section
from convexformer.report.evidence import BetaPath, Evidence
from convexformer.report.inputs import GivenData
from convexformer.report.page import render
from convexformer.report.sections import SECTIONS
from convexformer.report.sections.setup import versions
from convexformer.report.text import clean, count, number, percent

NO_PATH = (
    "the model was fitted at one beta. Pass the training data (X_train and y_train, --train) or a path "
    "(beta_path=cf.path(...), or `convexformer path` into the run folder)."
)


def report(
    model: TokenEstimator,
    path: str | os.PathLike[str],
    X_test: Any = None,
    y_test: Any = None,
    *,
    mask_test: Any = None,
    X_train: Any = None,
    y_train: Any = None,
    mask_train: Any = None,
    weight_train: Any = None,
    texts: Sequence[str | Sequence[str]] | None = None,
    images: Sequence[Any] | None = None,
    image_root: str | os.PathLike[str] | None = None,
    grid: tuple[int, int] | None = None,
    class_names: Sequence[str] | Mapping[Any, str] | None = None,
    leaderboard: Leaderboard | None = None,
    beta_path: Path | Mapping[str, Any] | None = None,
    title: str | None = None,
    n_betas: int = 12,
    baselines: bool = True,
    max_time: float = 60.0,
    max_test: int = 20_000,
    fitted_with: Mapping[str, str] | None = None,
) -> FilePath:
    """Write one self-contained HTML page about a fitted model; return the file.

    Parameters
    ----------
    model, path
        A fitted estimator; the file to write.
    X_test, y_test, mask_test
        Data that the model has not seen, for scores, confusions, reliability and mistakes. A token store brings its labels,
        texts, file names and grid along.
    X_train, y_train, mask_train, weight_train
        The data of the fit, for baselines of scikit-learn and for fits at other betas.
    texts
        A text for each test sample, or a list of strings, one for each of its tokens.
    images, image_root
        A file name, under ``image_root`` where that is given, or an array for each test sample.
    grid
        ``(rows, columns)`` of the tokens of an image; a class token may come before.
    class_names
        Names of the classes, in their order or by label.
    leaderboard
        What :func:`convexformer.compare` returned, to be shown with the model.
    beta_path
        What :func:`convexformer.path` returned on the standardised tokens, or its ``summary()``.
    title, n_betas, baselines, max_time
        The headline; betas of a path computed from the training data, and seconds for it; whether to fit baselines.
    max_test
        Test samples at most; of more, so many are drawn at random, and the page says so.
    fitted_with
        Versions of the software at the time of the fit.

    Sections that do not apply are left out, with the reason. Strings are escaped, and the page requests nothing.
    """
    check_is_fitted(model, "solution_")
    given = GivenData(X_test, y_test, mask_test, texts, images, grid).described()
    given.check(model)
    test = given.drawn(max_test)
    evidence = Evidence(
        model,
        tokens=test.tokens(model),
        y=test.targets(model),
        texts=test.texts,
        images=test.pictures(image_root),
        grid=test.grid,
        class_names=_class_names(model, class_names),
        n_given=given.n_samples,
        environment=fitted_with or {},
    )
    training = None
    if X_train is not None:
        if y_train is None:
            raise ValueError("X_train was given without y_train; pass both, or neither.")
        training = gather.Training(X_train, y_train, mask_train, weight_train)
    evidence = _with_path(evidence, training, beta_path, n_betas, max_time)
    evidence = _with_rows(evidence, training if baselines else None, leaderboard)
    page = _draw(evidence, title)
    target = FilePath(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(target, lambda file: file.write(page.encode()))
    return target


def _with_path(
    evidence: Evidence, training: gather.Training | None, given: Any, n_betas: int, seconds: float
) -> Evidence:
    found: BetaPath | None
    if given is not None:
        found = gather.saved_path(given.summary() if isinstance(given, Path) else given, evidence.model)
    elif training is not None:
        found = gather.computed_path(evidence, training, n_betas, seconds)
    else:
        found = gather.searched_path(evidence.model)
    return replace(evidence, beta_path=found, no_path="" if found else NO_PATH)


def _with_rows(evidence: Evidence, training: gather.Training | None, board: Leaderboard | None) -> Evidence:
    own = gather.own_row(evidence)
    rows = [own]
    if board is not None:
        rows.extend(gather.board_rows(board, own))
    elif training is not None:
        rows.extend(gather.probe_rows(evidence, training))
    return replace(evidence, rows=rows)


def _class_names(model: TokenEstimator, names: Sequence[str] | Mapping[Any, str] | None) -> Mapping[Any, str]:
    if names is None:
        return {}
    if isinstance(names, Mapping):
        return names
    classes = getattr(model, "classes_", ())
    if isinstance(names, str) or len(names) != len(classes):
        raise ValueError(
            f"class_names has {len(names)} names; the model has {len(classes)} classes. Pass one for each."
        )
    return dict(zip(map(plain_label, classes), names, strict=True))


def _draw(evidence: Evidence, title: str | None) -> str:
    found = [section(evidence) for section in SECTIONS]
    model, proof = evidence.model, evidence.model.certificate_
    certified = proof.meets(model.tolerance)
    row = next(row for row in evidence.rows if row.ours)
    if proof.kind == "none":
        summary = f"Nothing is proved about this fit: {clean(proof.reason) or 'there is no lower bound.'}"
    else:
        odds = "" if proof.kind == "exact" else f" with probability {number(proof.confidence)}"
        summary = (
            f"The training objective is at most {number(proof.relative_gap, 2)} (relative) above its global minimum "
            f"over all weights{odds}; the tolerance was {number(model.tolerance, 2)}."
        )
    return render(
        title=clean(title, 120) if title else f"{row.name.replace('_', ' ')} head",
        summary=summary,
        certified=certified,
        tiles=_tiles(evidence),
        sections=[part for part in found if isinstance(part, Section)],
        omissions=[part for part in found if isinstance(part, Omission)],
        footer=f"Written by convexformer {versions()['convexformer']}; charts by Vega-Lite (BSD-3-Clause). This page works "
        "without a network and sends nothing.",
    )


def _tiles(evidence: Evidence) -> list[tuple[str, str, str]]:
    model = evidence.model
    tiles: list[tuple[str, str, str]] = []
    if evidence.score is not None and evidence.tokens is not None:
        value = percent(evidence.score) if evidence.classifies else number(evidence.score)
        name = f"test {gather.test_name(model)}"
        drawn = f" of {evidence.n_given:,}, drawn at random" if evidence.tokens.n_samples < evidence.n_given else ""
        tiles.append((name, value, count(evidence.tokens.n_samples, "test sample") + drawn))
    if hasattr(model, "best_score_"):
        tiles.append((f"{gather.fold_name(model)}, folds", number(model.best_score_), "by cross-validation"))
    proof = model.certificate_
    tiles.append(("certified gap", number(proof.relative_gap, 2) if proof.kind != "none" else "none", proof.kind))
    tiles.append(("beta / beta_max", number(gather.beta_ratio(model), 3), f"beta {number(model.beta_, 4)}"))
    if evidence.classifies:
        tiles.append(("classes", str(len(model.classes_)), ""))
    norms = model.solution_.token_norms()
    if norms is not None:
        tiles.append(("tokens in use", f"{int((norms > 0).sum())}", f"of {len(norms)}"))
    return tiles
