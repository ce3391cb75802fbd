"""The documents say what the code does: tables against fields, and quoted messages against their sources."""

import ast
import inspect
import json
import re
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import TrainingArguments

from benchmarks import compare_splits
from benchmarks.planning import Law, Plan
from benchmarks.work import work_from
from colocate_rl import (
    GRPOConfig,
    GRPOTrainer,
    backend,
    engines,
    errors,
    grpo,
    multiturn,
    peft_flags,
    settings,
    trl_only,
)
from colocate_rl.errors import ConfigError
from colocate_rl.options import option_fields
from colocate_rl.placement import Placement
from colocate_rl.runreport import RunReport
from colocate_rl.scoring.names import resolve_reward
from docs import make_options
from tests.tiny import chat_tokenizer, save_tiny
from tests.unit.test_padding_free_run import LengthyEngine

pytestmark = pytest.mark.unit

REPOSITORY = Path(__file__).parents[2]
PAGES = sorted([*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/*.md")])


def page(name: str) -> str:
    return (REPOSITORY / "docs" / name).read_text("utf-8")


def section(text: str, heading: str) -> str:
    """What stands under a heading of the second level."""
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def statuses(heading: str) -> dict[str, str]:
    """Name and second cell of each row of a table in from_trl.md; a row may name several."""
    found: dict[str, str] = {}
    for line in section(page("from_trl.md"), heading).splitlines():
        if line.startswith("| `"):
            first, status = (cell.strip() for cell in line.split("|")[1:3])
            names = re.findall(r"`(\w+)`", first)
            assert not found.keys() & names, f"listed twice: {names}"
            found |= dict.fromkeys(names, status)
    return found


# Coming from TRL

FIELDS = {
    name: (status, heading)
    for heading in ("Fields of GRPOConfig", "Fields of TrainingArguments")
    for name, status in statuses(heading).items()
}


def test_every_field_of_trl_is_listed() -> None:
    assert len(statuses("Fields of GRPOConfig")) == 77, "the settings that TRL 1.16 adds to those of transformers"
    assert set(statuses("Fields of GRPOConfig").values()) == {"same", "different", "refused"}


@pytest.mark.parametrize("name", [name for name, (status, _) in FIELDS.items() if status != "refused"])
def test_a_field_that_is_there(name: str) -> None:
    ours = {item.name for item in option_fields()}
    inherited = {item.name for item in fields(TrainingArguments)}
    is_trainers = FIELDS[name][1] == "Fields of TrainingArguments"
    assert name in (inherited if is_trainers else ours)


@pytest.mark.parametrize("name", [name for name, (status, _) in FIELDS.items() if status == "refused"])
def test_a_field_that_is_refused(tmp_path: Path, name: str) -> None:
    if name not in {item.name for item in fields(GRPOConfig)}:
        with pytest.raises(ConfigError, match=f"{name} is TRL's, and has no meaning here: .*"):
            GRPOConfig(str(tmp_path), **{name: True})
        with pytest.raises(ConfigError, match=f"{name} is TRL's"):
            trl_only.check_names([name])
        return
    if name in ("deepspeed", "fsdp"):
        with pytest.raises(ConfigError, match=f"(?i){name}"):  # before transformers looks for packages
            GRPOConfig(str(tmp_path), **{name: "anything"})
        return
    config = GRPOConfig(str(tmp_path), use_cpu=True)
    setattr(config, name, True)
    check = backend.resolve if name.startswith("use_transformers") else GRPOConfig._check_unsupported
    with pytest.raises(ConfigError, match=f"(?i){name}"):
        check(config)


def test_the_arguments_of_the_constructor() -> None:
    listed = statuses("Arguments of GRPOTrainer")
    assert list(listed) == list(inspect.signature(GRPOTrainer).parameters)
    assert [name for name, status in listed.items() if status == "refused"] == ["environment_factory"]
    with pytest.raises(ConfigError, match="environment_factory"):
        multiturn.plan(GRPOConfig("unused"), None, None, object)


# Options


def test_the_page_of_options_is_up_to_date() -> None:
    assert page("options.md") == make_options.options_page(), "run: python -m docs.make_options > docs/options.md"


def test_each_option_has_one_theme() -> None:
    themes = [name for names in make_options.THEMES.values() for name in names.split()]
    assert sorted(themes) == sorted(item.name for item in option_fields())


def test_the_settings_of_the_readme_exist() -> None:
    text = section((REPOSITORY / "README.md").read_text("utf-8"), "The most used settings")
    named = re.findall(r"`(\w+)`", " ".join(make_options.first_cells(text)))
    assert named
    assert set(named) <= {item.name for item in option_fields()}


# Troubleshooting

ERRORS = {kind.__name__ for kind in vars(errors).values() if isinstance(kind, type)}
HOLE = "…"


def message_of(node: ast.expr) -> str:
    """A message as its source has it, with a hole for what is put in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return re.sub(f"{HOLE}+", HOLE, " ".join("".join(message_of(part) for part in node.values).split()))
    return HOLE


def messages_in_the_code() -> dict[str, str]:
    """Every message of an error of ours, and where it stands."""
    found = {}
    for path in sorted((REPOSITORY / "colocate_rl").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ERRORS and node.args:
                message = message_of(node.args[0])
                if message != HOLE:
                    found[message] = f"{path.name}:{node.lineno}"
    return found


MESSAGES = messages_in_the_code()
HEADS = [
    head
    for line in page("troubleshooting.md").splitlines()
    if line.startswith("| `")
    for head in re.findall(r"`([^`]+)`", line.split("|")[1])
]


def fits(message: str, head: str) -> bool:
    return message.startswith(head.rstrip(HOLE))


def test_quoted_messages_are_in_the_code() -> None:
    assert [head for head in HEADS if not any(fits(message, head) for message in MESSAGES)] == []
    assert [head for head in HEADS if not re.search("[a-z]{3}", head)] == [], "these would fit any message"


def test_every_message_is_explained() -> None:
    missing = {message: where for message, where in MESSAGES.items() if not any(fits(message, head) for head in HEADS)}
    assert missing == {}, "add them to docs/troubleshooting.md"


# All pages


def anchors(text: str) -> set[str]:
    """GitHub's names of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text("utf-8")):
        file, _, anchor = target.partition("#")
        if "://" in target:
            continue
        linked = (path.parent / file).resolve() if file else path
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked.read_text("utf-8")), target


# Choosing K


def test_the_example_of_splits_is_the_formula_s() -> None:
    text = section(page("choosing_k.md"), "What a step takes")
    named = re.search(r"N = (\d+), G = (\d+), R = (\d+)", text)
    assert named is not None
    devices, generation, training = map(int, named.groups())
    plan = Plan(Law(0.0, generation), Law(0.0, training), 0.0)
    rows = re.findall(r"^\| (\d+) \| ([\d.]+) \| ([\d.]+) \|$", text, re.MULTILINE)
    assert [int(row[0]) for row in rows] == list(range(1, devices // 2 + 1))
    for count, none, one_step in rows:
        parts = plan.generation.seconds(int(count)), plan.training.seconds(devices - int(count))
        assert float(none) == pytest.approx(plan.step_s(devices, int(count)), abs=0.06)
        assert float(one_step) == pytest.approx(max(parts), abs=0.06)


# Snippets


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def commands() -> list[tuple[str, list[str]]]:
    """Page and words of every command of the pages that runs something of ours and leaves nothing out."""
    found = []
    for path in PAGES:
        for block in blocks(path.read_text("utf-8"), "bash"):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words and not {"...", "…"} & set(words):
                    found.append((path.name, words))
    return found


COMMANDS = commands()


@pytest.mark.parametrize(
    ("where", "words"), [item for item in COMMANDS if "colocate_rl.grpo" in item[1]], ids=lambda item: str(item)[-60:]
)
def test_a_launch_line_is_taken(monkeypatch: pytest.MonkeyPatch, where: str, words: list[str]) -> None:
    """Through both parsers, and its engines find their places on the GPUs it is written for."""
    monkeypatch.chdir(REPOSITORY)
    start = words.index("colocate_rl.grpo") + 1
    ranks = int(words[words.index("--num_processes") + 1])
    script, rest = grpo.parse_script(words[start:])
    peft_flags.check_flags(script)
    args = grpo._parse_config(script, [*rest, "--output_dir=unused"])
    assert script.dataset == "problems.jsonl"
    for name in script.reward_funcs:
        assert name == "rewards:correct" or callable(resolve_reward(name))
    if args.use_vllm:
        assert args.num_vllm_gpus is not None
        num_devices = 8 if args.vllm_devices is None else ranks
        Placement.on_gpus(
            num_ranks=ranks,
            num_engines=args.num_vllm_gpus,
            num_devices=num_devices,
            tensor_parallel_size=args.vllm_tensor_parallel_size,
            devices=args.vllm_devices,
        )


@pytest.mark.parametrize(
    "words",
    [words for _, words in COMMANDS if "benchmarks/compare_splits.py" in words],
    ids=lambda item: str(item)[-60:],
)
def test_a_comparison_is_taken(words: list[str]) -> None:
    options = compare_splits.parse(words[2:])
    assert work_from(options).completions


def test_comparisons_can_share_out_their_completions() -> None:
    for line in re.findall(r"^python benchmarks/compare_splits.+# \d+ GPUs$", page("choosing_k.md"), re.MULTILINE):
        options = compare_splits.parse(shlex.split(line, comments=True)[2:])
        for row in compare_splits.plan_rows(options, int(line.split()[-2])):
            work_from(options).rows(row["num_processes"])


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_snippets_can_be_read(path: Path) -> None:
    text = path.read_text("utf-8")
    for block in blocks(text, "python"):
        compile(block, path.name, "exec")
    for block in blocks(text, "json"):
        json.loads(block)


def test_the_snippet_of_the_change_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in blocks(page("from_trl.md"), "python"):
        exec(block, names)  # of our own page
    assert names["args"].num_vllm_gpus == 2


CORRECT, *SNIPPETS = blocks(page("recipes.md"), "python")


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda text: text.split("GRPOConfig(")[-1][:40])
def test_a_snippet_of_the_recipes_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snippet: str) -> None:
    """As it stands, with a tiny model and scripted completions."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(engines, "build_engine", lambda *_: LengthyEngine())
    monkeypatch.setattr(settings, "logprob_gap_limit", lambda *_: 0.0)
    save_tiny(tmp_path / "model", max_position_embeddings=1024)
    chat_tokenizer().save_pretrained(tmp_path / "model")
    names: dict[str, Any] = {"model": str(tmp_path / "model")}
    prompts = [f"{number}+1=" for number in range(4)]
    names["data"] = datasets.Dataset.from_dict({"prompt": prompts, "answer": ["5"] * 4})
    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
    names["conversations"] = datasets.Dataset.from_dict({"prompt": conversations, "answer": ["5"] * 4})
    exec(CORRECT, names)  # of our own page
    if "conversations" in snippet:
        plain = names["correct"]
        names["correct"] = lambda completions, **columns: plain([c[-1]["content"] for c in completions], **columns)
    exec(snippet, names)
    trainer = names["trainer"]
    trainer.remove_callback(RunReport)  # its curves take longer than all the rest
    trainer.args.max_steps = 1
    trainer.train()
    assert trainer.state.global_step == 1
    trainer.close()


# Contributing


def test_each_module_has_one_room() -> None:
    listed = []
    rooms = (REPOSITORY / "CONTRIBUTING.md").read_text("utf-8").partition("\n## Rooms")[2].partition("\n## ")[0]
    for line in rooms.splitlines():
        folders = re.findall(r"`(\w+/)`", line)
        listed += [folder + name for folder in folders[:1] or [""] for name in re.findall(r"`(\w+\.py)`", line)]
    package = REPOSITORY / "colocate_rl"
    modules = [path.relative_to(package).as_posix() for path in package.rglob("*.py") if path.name != "__init__.py"]
    assert sorted(listed) == sorted(modules)
