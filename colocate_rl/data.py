"""Loading a data set named on the command line: a local file, a saved folder, or a name on the hub."""

from pathlib import Path

import datasets

from colocate_rl.errors import DataError
from colocate_rl.paths import FILE_FORMATS, local_or_hub


def load_rows(
    name: str, split: str, config: str | None = None, *, streaming: bool = False
) -> datasets.Dataset | datasets.IterableDataset:
    """Loads one split.

    Args:
        name: file (JSON, JSONL, Parquet, CSV), folder made by ``save_to_disk``, folder of data files, or hub name.
        split: used where there are several; a single file has only one.
        config: configuration name of a hub data set.
        streaming: read rows when they are needed instead of all at once.

    Raises:
        DataError: when it cannot be read, or has no such split.
    """
    path = Path(name).expanduser()
    try:
        if path.suffix in FILE_FORMATS and path.is_file():
            return datasets.load_dataset(
                FILE_FORMATS[path.suffix], data_files=str(path), split="train", streaming=streaming
            )
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            loaded = datasets.load_from_disk(str(path))
        else:
            loaded = datasets.load_dataset(local_or_hub(name), config, streaming=streaming)
    except (OSError, ValueError, StopIteration, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"Data set {name!r} could not be read: {str(error) or 'it holds no rows'}") from error
    if isinstance(loaded, dict):
        if split not in loaded:
            raise DataError(f"Data set {name!r} has no split {split!r}; it has {', '.join(loaded)}. Name one of them.")
        loaded = loaded[split]
    return loaded.to_iterable_dataset() if streaming and isinstance(loaded, datasets.Dataset) else loaded
