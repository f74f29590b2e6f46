"""A model and all that a report takes, with hostile strings throughout; a parser of the page."""

from html.parser import HTMLParser

import convexformer as cf

HOSTILE = [
    "</script><img src=x onerror=hacked=1>",
    "<svg/onload=hacked=1>",
    "'\"><script>hacked=1</script>",
    "]]><!--",
    "שלום",
    "日本語 \U0001f600",
    "{{ 7*7 }}{% raw %}",
    "javascript:hacked=1",
    "&lt;b&gt;",
    "\ud800 lone \x00\x07\u202e surrogate",
]


def build():
    """Digits of four tokens: a model with a search, and all that a report takes, hostile strings throughout."""
    X, y = (part.numpy() for part in cf.data.digits(patch=4))
    pictures = cf.data.digits(patch=1, positions=False).X.numpy().reshape(-1, 8, 8)
    model = cf.TokenClassifierCV(cv=2, n_betas=5, beta_min_ratio=1e-2).fit(X[:160], y[:160])
    return {
        "model": model,
        "X_test": X[160:300],
        "y_test": y[160:300],
        "X_train": X[:160],
        "y_train": y[:160],
        "texts": [f"{HOSTILE[k % len(HOSTILE)]} number {k}" for k in range(140)],
        "images": list(pictures[160:300]),
        "grid": (2, 2),
        "class_names": HOSTILE,
        "title": HOSTILE[0],
    }


class Tree(HTMLParser):
    """Tags with their attributes, and the text outside of scripts and styles."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.text, self.scripts = [], "", []
        self._inside = None
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._inside = None

    def handle_data(self, data):
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.text += data
