"""The Iceberg catalog that has the tables: a SQLite file in the output folder, or any other one.

The others (REST, Glue, SQL, ...) are those that pyiceberg's own configuration names, in
`.pyiceberg.yaml` or `PYICEBERG_CATALOG__NAME__...`: so credentials are in no option of the job.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Final

SQLITE: Final = "catalog.db"
# The name that the SQLite catalog has in its own file; readers must use it too.
CATALOG: Final = "topics"


class LakeRefused(ValueError):
    """A catalog or table that the job must not use; the message is one line with the reason."""


def sqlite_catalog(folder: str | Path) -> Any:
    """The catalog in an output folder, made if it is not there."""
    from pyiceberg.catalog.sql import SqlCatalog

    folder = Path(folder).resolve()
    return SqlCatalog(CATALOG, uri=f"sqlite:///{folder / SQLITE}", warehouse=folder.as_uri())


def configured_catalog(name: str) -> Any:
    """A catalog that pyiceberg is set up for. Raises `LakeRefused`."""
    from pyiceberg.catalog import load_catalog

    try:
        return load_catalog(name)
    except Exception as error:
        # Whatever the catalog's library raises; its text may repeat the configuration.
        logging.getLogger(__name__).debug("catalog %s", name, exc_info=True)
        raise LakeRefused(
            f"catalog {name} cannot be opened ({type(error).__name__}): set it up for pyiceberg in "
            f".pyiceberg.yaml, or with PYICEBERG_CATALOG__{name.upper()}__URI"
        ) from None
