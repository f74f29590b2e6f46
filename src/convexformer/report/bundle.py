"""The JavaScript of the charts: Vega, Vega-Lite and Vega-Embed, from the package ``vl-convert-python``; no network."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

VEGA_LITE = "6.4"  # the specifications of charts.py are written for it


@lru_cache(maxsize=1)
def charts_script() -> str:
    """Return one script that defines ``vegaEmbed``; made once a process, in some two seconds."""
    try:
        import vl_convert
    except ImportError as error:
        raise ValueError(
            "a report needs vl-convert-python, which carries the charts' JavaScript; install it with "
            "pip install 'convexformer[report]'."
        ) from error
    bundle: Callable[..., str] = vl_convert.javascript_bundle
    # a function of its own: the bundle's names stay out of the page
    return f'(function () {{\n"use strict";\n{bundle(vl_version=VEGA_LITE)}\n}})();'
