"""Data sets named on the command line: every kind of file, saved folders, and what is missing."""

from collections.abc import Callable
from pathlib import Path

import datasets
import pytest

from colocate_rl.data import load_rows
from colocate_rl.errors import DataError

pytestmark = pytest.mark.unit

ROWS = [{"prompt": "1+1=", "answer": 2}, {"prompt": "2+3=", "answer": 5}]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()


def rows() -> datasets.Dataset:
    return datasets.Dataset.from_list(ROWS)


def save_json(path: Path) -> None:
    path.write_text('[{"prompt": "1+1=", "answer": 2}, {"prompt": "2+3=", "answer": 5}]')


def save_jsonl(path: Path) -> None:
    path.write_text('{"prompt": "1+1=", "answer": 2}\n{"prompt": "2+3=", "answer": 5}\n')


def save_csv(path: Path) -> None:
    path.write_text("prompt,answer\n1+1=,2\n2+3=,5\n")


def save_parquet(path: Path) -> None:
    rows().to_parquet(str(path))


@pytest.mark.parametrize(
    ("name", "save"),
    [
        ("rows.json", save_json),
        ("rows.jsonl", save_jsonl),
        ("rows.csv", save_csv),
        ("rows.parquet", save_parquet),
    ],
)
@pytest.mark.parametrize("split", ["train", "test"])
def test_files(tmp_path: Path, name: str, save: Callable[[Path], None], split: str) -> None:
    """A single file has only one split, whatever was asked."""
    save(tmp_path / name)
    loaded = load_rows(str(tmp_path / name), split)
    assert isinstance(loaded, datasets.Dataset)
    assert loaded.to_list() == ROWS
    streamed = load_rows(str(tmp_path / name), split, streaming=True)
    assert isinstance(streamed, datasets.IterableDataset)
    assert list(streamed) == ROWS


def test_a_file_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    save_jsonl(tmp_path / "rows.jsonl")
    assert load_rows("~/rows.jsonl", "train").to_list() == ROWS


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    save_jsonl(path)
    load_rows(str(path), "train")
    path.write_text('{"prompt": "9=", "answer": 9}\n')
    assert load_rows(str(path), "train").to_list() == [{"prompt": "9=", "answer": 9}]


def test_conversational_prompts_survive(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text('{"prompt": [{"role": "user", "content": "1+1"}]}\n')
    assert load_rows(str(path), "train")[0]["prompt"] == [{"role": "user", "content": "1+1"}]


def test_a_saved_data_set(tmp_path: Path) -> None:
    rows().save_to_disk(str(tmp_path / "saved"))
    assert load_rows(str(tmp_path / "saved"), "train").to_list() == ROWS
    assert list(load_rows(str(tmp_path / "saved"), "train", streaming=True)) == ROWS


def test_a_saved_dictionary_of_splits(tmp_path: Path) -> None:
    both = datasets.DatasetDict({"train": rows(), "held_out": rows().select([1])})
    both.save_to_disk(str(tmp_path / "saved"))
    assert load_rows(str(tmp_path / "saved"), "held_out").to_list() == ROWS[1:]
    with pytest.raises(DataError) as caught:
        load_rows(str(tmp_path / "saved"), "test")
    assert "has no split 'test'; it has train, held_out" in str(caught.value)


def test_a_folder_of_files(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    save_jsonl(folder / "train.jsonl")
    assert load_rows(str(folder), "train").to_list() == ROWS
    assert list(load_rows(str(folder), "train", streaming=True)) == ROWS
    with pytest.raises(DataError, match="has no split 'test'; it has train"):
        load_rows(str(folder), "test")


def test_a_folder_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell expands ~ at a word's start only: not in --dataset=~/folder, and not in a --config file."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "folder").mkdir()
    save_jsonl(tmp_path / "folder" / "train.jsonl")
    assert load_rows("~/folder", "train").to_list() == ROWS


@pytest.mark.parametrize("content", ["{broken", "no json at all\n", ""])
def test_a_file_that_cannot_be_read(tmp_path: Path, content: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=r"rows\.jsonl' could not be read"):
        load_rows(str(path), "train")


def test_what_is_not_there(tmp_path: Path) -> None:
    for name in (str(tmp_path / "nowhere.jsonl"), str(tmp_path / "nowhere")):
        with pytest.raises(DataError, match="could not be read"):
            load_rows(name, "train")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty' could not be read"):
        load_rows(str(tmp_path / "empty"), "train")
