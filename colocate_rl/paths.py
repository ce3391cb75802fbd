"""Names that users give models and data sets: a path on this machine, or a name on the hub."""

import os
from pathlib import Path

FILE_FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
"""Local files that are read as data sets, by suffix."""


def looks_like_path(name: str) -> bool:
    """True when ``name`` can only be a path: hub names are ``name`` or ``owner/name``."""
    return name.startswith((".", "~", os.sep)) or name.count("/") > 1 or name.endswith("/")


def local_or_hub(name: str) -> str:
    """``name`` with ``~`` expanded where that is a folder here."""
    path = Path(name).expanduser()
    return str(path) if path.is_dir() else name
