"""Messages that say which packages to install for exports, jobs and pictures.

The package is not on a registry, so `pip install topics-server[spark]` would fail, or install
another package of that name. The commands here work in a checkout.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

PACKAGES = {
    "parquet": ("pyarrow",),
    "spark": ("pyspark", "pyarrow"),
    "iceberg": ("pyiceberg", "pyiceberg_core", "sqlalchemy", "pyarrow"),
    "pictures": ("matplotlib",),
}
_EXTRA = {"pictures": "spark"}


def missing(need: str) -> Sequence[str]:
    """The packages of a feature that are not installed."""
    return [each for each in PACKAGES[need] if importlib.util.find_spec(each) is None]


def how(what: str, need: str) -> str:
    """A sentence: `what` needs these packages, and these commands install them."""
    extra = _EXTRA.get(need, need)
    quick = "" if extra == "spark" else f", or .venv/bin/python -m pip install -e '.[{extra}]'"
    return (
        f"{what} {' and '.join(PACKAGES[need])} (extra `{extra}`). In a checkout of topics-server: "
        f"./run spark-setup{quick}; beside a wheel of it: pip install 'FILE.whl[{extra}]'. "
        "No registry has topics-server."
    )
