"""The Parameters section of an estimator's docstring, gathered from the classes that define its options."""

from __future__ import annotations

import inspect

HEADING = "Parameters\n----------\n"


def describe_parameters(cls: type) -> None:
    """Give ``cls.__doc__`` a Parameters section with one entry for each argument of its constructor.

    Descriptions are those of the nearest base class that has one, so that an option is described once, where it is
    defined. An option that none describes is left out, which a test of the documentation finds.
    """
    if cls.__doc__ is None:  # python -OO
        return
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        texts |= _entries(base.__dict__.get("__doc__") or "")
    names = [name for name in inspect.signature(cls).parameters if name in texts]
    entries = dict.fromkeys(texts[name] for name in names)  # "a, b : float" is one entry for both
    own, _, rest = inspect.cleandoc(cls.__doc__).partition("\n\nExamples\n")
    own = own.partition("\n\n" + HEADING)[0]
    tail = f"\n\nExamples\n{rest}" if rest else ""
    cls.__doc__ = f"{own}\n\n{HEADING}" + "\n".join(entries) + tail + "\n"


def _entries(doc: str) -> dict[str, str]:
    """Return the entries of a docstring's Parameters section by the names they describe."""
    section = inspect.cleandoc(doc).partition(HEADING)[2].partition("\n\n")[0]
    entries: dict[str, list[str]] = {}
    for line in section.splitlines():
        if line and not line.startswith(" "):
            entries[line] = []
        if entries:
            entries[next(reversed(entries))].append(line)
    return {
        name: "\n".join(lines) for title, lines in entries.items() for name in title.partition(" : ")[0].split(", ")
    }
