"""The work that is measured: which model, how many prompts and tokens; the same for every split and every system."""

import argparse
import json
import os
import random
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

EOS, PAD = "<|eos|>", "<|pad|>"

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "qwen2-0.5b": {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "qwen2-1.5b": {
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "qwen2-7b": {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
}
"""Dimensions of the Qwen2.5 models of these sizes; the weights are random."""


class WorkError(ValueError):
    """The work cannot be cut as asked; the message holds the numbers."""


@dataclass(frozen=True)
class Work:
    """One optimizer step's work: ``prompts`` x ``generations`` completions of (at most) ``new_tokens`` tokens each."""

    model: str = "qwen2-1.5b"
    """Name of a shape in :data:`SHAPES`, or a model folder."""
    prompts: int = 32
    """Different prompts per step (P)."""
    prompt_tokens: int = 128
    generations: int = 8
    """Completions per prompt (G)."""
    new_tokens: int = 512
    """Sampled tokens per completion; without ``mean_tokens`` sampling never ends earlier."""
    mean_tokens: int = 0
    """Above 0: every ``mean_tokens``-th id of the vocabulary ends a completion. Random weights sample all ids about
    equally often, so lengths are geometric with about this mean, cut at ``new_tokens``: a tail, as in practice."""
    micro_batch: int = 8
    """Most rows per forward/backward pass (b); see :meth:`rows`."""
    dtype: str = "bfloat16"
    """Type of the policy's weights. On GPUs everything computes in bfloat16, also with float32 weights."""
    steps: int = 7
    """Optimizer steps in all."""
    warmup_steps: int = 2
    """Of these, steps at the start that are not counted."""
    gradient_checkpointing: bool = False
    seed: int = 1

    def __post_init__(self) -> None:
        counts = ("prompts", "prompt_tokens", "new_tokens", "micro_batch", "steps")
        for name, least in {**dict.fromkeys(counts, 1), "generations": 2, "warmup_steps": 0, "mean_tokens": 0}.items():
            if getattr(self, name) < least:
                raise WorkError(f"{name} is {getattr(self, name)}; it must be at least {least}.")
        if self.warmup_steps >= self.steps:
            raise WorkError(f"warmup_steps={self.warmup_steps} of steps={self.steps} leaves no step to count.")
        if self.dtype not in ("bfloat16", "float32"):
            raise WorkError(f"dtype={self.dtype!r} is unknown. Use bfloat16 or float32.")
        if self.mean_tokens and self.model not in SHAPES:
            raise WorkError(
                f"mean_tokens={self.mean_tokens} needs random weights, which end a completion by chance; {self.model} "
                f"is trained. Choose one of {', '.join(SHAPES)}, or leave mean_tokens out."
            )

    @property
    def completions(self) -> int:
        """Completions per step (P x G)."""
        return self.prompts * self.generations

    @property
    def new_tokens_per_step(self) -> int:
        """Sampled tokens per step: exactly so many, or with ``mean_tokens`` at most."""
        return self.completions * self.new_tokens

    @property
    def prompt_tokens_per_step(self) -> int:
        """Prompt tokens that pass through the policy per step, once per completion."""
        return self.completions * self.prompt_tokens

    @property
    def window(self) -> int:
        """Tokens that a prompt and its completion have together."""
        return self.prompt_tokens + self.new_tokens

    def rows(self, num_ranks: int) -> tuple[int, int]:
        """Micro-batch rows and micro-batches per optimizer step, so that a step uses exactly P x G completions.

        Args:
            num_ranks: training ranks (W).

        Returns:
            The largest micro-batch that is at most ``micro_batch`` and divides a rank's rows, and how many of them.

        Raises:
            WorkError: when the completions cannot be shared evenly.
        """
        if num_ranks < 1:
            raise WorkError("The engines leave no device for a training rank.")
        share, rest = divmod(self.completions, num_ranks)
        if rest:
            raise WorkError(
                f"{self.prompts} prompts x {self.generations} completions = {self.completions} cannot be shared evenly "
                f"by {num_ranks} training ranks. Choose prompts x generations as a multiple of {num_ranks}."
            )
        size = max(size for size in range(1, min(self.micro_batch, share) + 1) if share % size == 0)
        return size, share // size

    def sampling(self) -> dict[str, Any]:
        """Sampling parameters of vLLM under which completions get their lengths."""
        if not self.mean_tokens:
            return {"ignore_eos": True, "stop_token_ids": []}
        return {"stop_token_ids": list(range(0, SHAPES[self.model]["vocab_size"], self.mean_tokens))}

    def save(self, path: Path) -> None:
        """Writes the work as JSON."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> "Work":
        """Reads what :meth:`save` wrote."""
        return cls(**json.loads(path.read_text()))


def add_work_arguments(parser: argparse.ArgumentParser, defaults: Work) -> None:
    """Adds one flag per field of :class:`Work`."""
    group = parser.add_argument_group("the work (the same for every split)")
    helps = {
        "model": f"{', '.join(SHAPES)}, or a model folder",
        "prompts": "prompts per step",
        "prompt_tokens": "tokens of each prompt",
        "generations": "completions per prompt",
        "new_tokens": "tokens of each completion",
        "mean_tokens": "let completions end by chance after about X tokens, --new-tokens at most; 0: never earlier",
        "micro_batch": "most rows per forward/backward pass",
        "dtype": "the policy's weights: bfloat16 or float32",
        "steps": "optimizer steps in all",
        "warmup_steps": "steps at the start that are not counted",
        "gradient_checkpointing": "recompute activations, in every system",
        "seed": "of weights, prompts and sampling",
    }
    for item in fields(Work):
        flag, default = "--" + item.name.replace("_", "-"), getattr(defaults, item.name)
        if isinstance(default, bool):
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=default, help=helps[item.name])
        else:
            text = f"{helps[item.name]} (default: {default})"
            group.add_argument(flag, type=type(default), default=default, metavar="X", help=text)


def work_from(arguments: argparse.Namespace) -> Work:
    """The work that the flags of :func:`add_work_arguments` describe."""
    return Work(**{item.name: getattr(arguments, item.name) for item in fields(Work)})


def make_tokenizer() -> Any:
    """A byte-level tokenizer without merges: one token per byte, an end and a pad token; model ids may lie beyond."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), EOS, PAD]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: number for number, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD)


def shape_config(shape: str, **changes: Any) -> Any:
    """The ``Qwen2Config`` of a named shape."""
    from transformers import Qwen2Config

    if shape not in SHAPES:
        raise WorkError(f"There is no shape {shape!r}. Known: {', '.join(SHAPES)}.")
    values = {
        "max_position_embeddings": 32768,
        "bos_token_id": None,
        "eos_token_id": 256,
        "pad_token_id": 257,
        "architectures": ["Qwen2ForCausalLM"],
    }
    return Qwen2Config(**{**values, **SHAPES[shape], **changes})


def model_folder(work: Work, cache: Path) -> Path:
    """Where the model of ``work`` lies; a shape's weights are made once, by :func:`make_model`."""
    if work.model in SHAPES:
        return (cache / f"{work.model}-seed{work.seed}").resolve()
    folder = Path(work.model).expanduser().resolve()
    if not (folder / "config.json").is_file():
        raise WorkError(f"model {work.model!r} is neither a shape ({', '.join(SHAPES)}) nor a folder with config.json.")
    return folder


def make_model(shape: str, folder: Path, seed: int) -> None:
    """Writes random weights (float32 for tiny, else bfloat16) and a tokenizer, unless they are there.

    Uses the first GPU for the random numbers when there is one, so call it in a process of its own.
    """
    if (folder / "config.json").is_file():
        return
    import torch
    from transformers import AutoModelForCausalLM

    dtype = torch.float32 if shape == "tiny" else torch.bfloat16
    torch.manual_seed(seed)
    with torch.device("cuda" if torch.cuda.is_available() and shape != "tiny" else "cpu"):
        model = AutoModelForCausalLM.from_config(shape_config(shape), dtype=dtype)
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".making-"))
    try:
        model.save_pretrained(unfinished)
        make_tokenizer().save_pretrained(unfinished)
        unfinished.chmod(0o755)
        os.replace(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def make_prompts(tokenizer: Any, count: int, num_tokens: int, seed: int) -> list[str]:
    """Different prompts of lower-case words, each of exactly ``num_tokens`` tokens.

    Raises:
        WorkError: when the tokenizer gives no text of that length.
    """
    source, prompts = random.Random(seed), dict[str, None]()
    for _ in range(50 * count):
        prompt = _prompt(tokenizer, num_tokens, source)
        if prompt is not None:
            prompts[prompt] = None
        if len(prompts) == count:
            return list(prompts)
    raise WorkError(
        f"Found only {len(prompts)} of {count} different prompts of {num_tokens} tokens for this tokenizer."
    )


def _prompt(tokenizer: Any, num_tokens: int, source: random.Random) -> str | None:
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(source.choices(letters, k=source.randint(2, 7))) for _ in range(num_tokens)]
    text = " ".join(words)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    added = len(tokenizer(text)["input_ids"]) - len(ids)
    text = tokenizer.decode(ids[: num_tokens - added])
    return text if len(tokenizer(text)["input_ids"]) == num_tokens else None


def make_dataset(work: Work, tokenizer: Any) -> Any:
    """Prompts for every step of the run, as a ``datasets.Dataset``."""
    import datasets

    prompts = make_prompts(tokenizer, work.prompts * work.steps, work.prompt_tokens, work.seed)
    return datasets.Dataset.from_dict({"prompt": prompts})


def even_ids(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """A reward that costs nothing: the share of even token ids."""
    return [sum(token % 2 == 0 for token in ids) / max(1, len(ids)) for ids in completion_ids]


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes JSON so that a reader never sees half a file."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(value, indent=2) + "\n")
    unfinished.replace(path)


if __name__ == "__main__":
    cli = argparse.ArgumentParser(description="Make the model folder of a shape.")
    cli.add_argument("shape", choices=SHAPES)
    cli.add_argument("folder", type=Path)
    cli.add_argument("--seed", type=int, default=1)
    chosen = cli.parse_args()
    make_model(chosen.shape, chosen.folder, chosen.seed)
