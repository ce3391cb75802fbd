"""Everything that can be wrong, checked before a model is loaded and on every rank alike."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import datasets
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from colocate_rl import engines
from colocate_rl.collectives import Collectives
from colocate_rl.config import GRPOConfig
from colocate_rl.engine.vllm_api import vllm_version
from colocate_rl.errors import ConfigError, DataError
from colocate_rl.placement import Placement
from colocate_rl.rollout.prompts import PromptCodec, check_prompt_length
from colocate_rl.rollout.rewards import RewardFunction, Rewards
from colocate_rl.training import policy as policies

EvalSets: TypeAlias = datasets.Dataset | Mapping[str, datasets.Dataset]


@dataclass(frozen=True, slots=True)
class Checked:
    """What the checks had to make anyway."""

    placement: Placement
    rewards: Rewards
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    window: int | None
    """Context window of the engines in tokens, None when unknown."""
    longest_prompt: int
    """Tokens of the longest training prompt among this rank's share."""


def check_run(
    args: GRPOConfig,
    collectives: Collectives,
    *,
    model: str | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    reward_funcs: RewardFunction | Sequence[RewardFunction] | None,
    train_dataset: datasets.Dataset | None,
    eval_dataset: EvalSets | None,
) -> Checked:
    """Checks launch, settings, rewards, data and model configuration; no weights are read.

    Raises:
        ColocateError: the first problem found.
    """
    vllm_version()
    placement = engines.plan_placement(args, collectives.world_size, engines.num_nodes())
    functions = [] if reward_funcs is None else reward_funcs
    single = callable(functions) or isinstance(functions, str)
    rewards = Rewards([functions] if single else list(functions), args.reward_weights)  # type: ignore[list-item,arg-type]
    if train_dataset is None:
        raise DataError("train_dataset is required.")
    check_dataset("train_dataset", train_dataset)
    if not args.remove_unused_columns:
        _check_columns(train_dataset)
    _check_enough_prompts(args, train_dataset)
    for name, rows in eval_sets(eval_dataset).items():
        check_dataset(name, rows)
    init_kwargs = _init_kwargs(args)
    if isinstance(model, str):
        config = policies.load_config(model, init_kwargs, trust_remote_code=args.trust_remote_code)
    else:
        config = model.config
    if tokenizer is None:
        name = model if isinstance(model, str) else config._name_or_path
        tokenizer = policies.load_tokenizer(name, init_kwargs, trust_remote_code=args.trust_remote_code)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise TypeError(
            f"processing_class must be a tokenizer (PreTrainedTokenizerBase), got {type(tokenizer).__name__}. "
            "Multimodal processors are not supported."
        )
    vocab_size = policies.vocab_size(config)
    pad = policies.pad_token_id(tokenizer)
    if vocab_size is not None and pad >= vocab_size:
        raise ConfigError(
            f"The tokenizer's pad token has id {pad}, but the model has {vocab_size} embeddings (0 to "
            f"{vocab_size - 1}). "
            "Use a pad token the model knows, or resize its embeddings."
        )
    window = policies.context_window(config, args.vllm_max_model_length)
    if window is not None and args.max_completion_length >= window:
        raise ConfigError(
            f"max_completion_length={args.max_completion_length} does not fit beside any prompt in the context window "
            f"of {window} tokens. Lower it, or raise vllm_max_model_length if the model has more positions."
        )
    assert not isinstance(args.chat_template_kwargs, str)
    codec = PromptCodec(tokenizer, args.chat_template_kwargs)
    longest = _check_prompts("train_dataset", train_dataset, codec, window, vocab_size, collectives)
    for name, rows in eval_sets(eval_dataset).items():
        _check_prompts(name, rows, codec, window, vocab_size, collectives)
    return Checked(placement, rewards, config, tokenizer, window, longest)


def eval_sets(eval_dataset: EvalSets | None) -> dict[str, datasets.Dataset]:
    """The evaluation sets by a name for messages."""
    if eval_dataset is None:
        return {}
    if isinstance(eval_dataset, Mapping):
        return {f"eval_dataset[{name!r}]": rows for name, rows in eval_dataset.items()}
    return {"eval_dataset": eval_dataset}


def check_dataset(name: str, rows: Any) -> None:
    """Refuses anything but a map-style data set with a ``prompt`` column and at least one row.

    Raises:
        TypeError: for another type of data set.
        DataError: for a missing column or an empty set.
    """
    if not isinstance(rows, datasets.Dataset):
        raise TypeError(
            f"{name} must be a datasets.Dataset, got {type(rows).__name__}. Load it with datasets.load_dataset(..., "
            "split=...); streaming sets are not supported yet."
        )
    if "prompt" not in rows.column_names:
        raise DataError(
            f"{name} has no column 'prompt'; its columns are {', '.join(rows.column_names)}. Rename the one that holds "
            "the prompts, for instance with dataset.rename_column."
        )
    if len(rows) == 0:
        raise DataError(f"{name} has no rows.")


def _check_columns(rows: datasets.Dataset) -> None:
    taken = [name for name in rows.column_names if name in ("prompts", "completions", "trainer_state")]
    taken += [name for name in rows.column_names if name in ("log_extra", "log_metric")]
    if taken:
        raise DataError(
            f"train_dataset has column(s) {', '.join(taken)}, which are names of arguments that reward functions get "
            "anyway. Rename them, or set remove_unused_columns=True."
        )


def _check_enough_prompts(args: GRPOConfig, rows: datasets.Dataset) -> None:
    assert args.generation_batch_size is not None
    needed = args.generation_batch_size // args.num_generations
    if len(rows) < needed:
        raise DataError(
            f"train_dataset has {len(rows)} prompt(s), but one generation batch takes {needed} different ones "
            f"(generation_batch_size={args.generation_batch_size} completions / num_generations="
            f"{args.num_generations}), so there would be no step at all. Add prompts, or lower "
            "per_device_train_batch_size, steps_per_generation or gradient_accumulation_steps."
        )


def _check_prompts(
    name: str,
    rows: datasets.Dataset,
    codec: PromptCodec,
    window: int | None,
    vocab_size: int | None,
    collectives: Collectives,
) -> int:
    """Encodes every prompt of this rank's share (the caller makes all fail together); the longest one's tokens."""
    longest = 0
    prompts = rows.select_columns(["prompt"])
    for index in range(collectives.rank, len(rows), collectives.world_size):
        try:
            ids = codec.encode(prompts[index]["prompt"])
        except DataError as error:
            raise DataError(f"{name}, row {index}: {error}") from None
        check_prompt_length(len(ids), limit=window, where=f"{name}, row {index}: the prompt")
        if vocab_size is not None and max(ids) >= vocab_size:
            raise DataError(
                f"{name}, row {index}: the prompt holds token id {max(ids)}, but the model has {vocab_size} "
                f"embeddings. "
                "Use the model's own tokenizer, or resize its embeddings."
            )
        longest = max(longest, len(ids))
    return longest


def _init_kwargs(args: GRPOConfig) -> dict[str, Any]:
    assert not isinstance(args.model_init_kwargs, str)
    return dict(args.model_init_kwargs or {})
