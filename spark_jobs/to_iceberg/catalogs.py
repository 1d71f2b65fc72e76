"""The Iceberg catalog of the tables: a SQLite file in the output folder, or another catalog.

Other catalogs (REST, Glue, SQL, ...) come from pyiceberg's own configuration, in `.pyiceberg.yaml`
or `PYICEBERG_CATALOG__NAME__...`, so that the options of the job never hold credentials.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Final

SQLITE: Final = "catalog.db"
# The name of the SQLite catalog in its own file; readers must use the same name.
CATALOG: Final = "topics"


class LakeRefused(ValueError):
    """A catalog or table that the job must not use; the message is one line with the reason."""


def sqlite_catalog(folder: str | Path) -> Any:
    """The catalog in an output folder, created if it does not exist."""
    from pyiceberg.catalog.sql import SqlCatalog

    folder = Path(folder).resolve()
    return SqlCatalog(CATALOG, uri=f"sqlite:///{folder / SQLITE}", warehouse=folder.as_uri())


def configured_catalog(name: str) -> Any:
    """A catalog from pyiceberg's configuration. Raises `LakeRefused`."""
    from pyiceberg.catalog import load_catalog

    try:
        return load_catalog(name)
    except Exception as error:
        # The catalog's library may raise any error, whose text may repeat the configuration.
        logging.getLogger(__name__).debug("catalog %s", name, exc_info=True)
        raise LakeRefused(
            f"catalog {name} cannot be opened ({type(error).__name__}): set it up for pyiceberg in "
            f".pyiceberg.yaml, or with PYICEBERG_CATALOG__{name.upper()}__URI"
        ) from None
