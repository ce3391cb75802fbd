"""Everything that can be wrong, checked before a model is loaded and on every rank alike."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import datasets
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from colocate_rl import engines, multiturn
from colocate_rl.collectives import Collectives
from colocate_rl.config import GRPOConfig
from colocate_rl.engine.spec import vllm_version
from colocate_rl.errors import ConfigError, DataError, PlacementError
from colocate_rl.options import dictionary
from colocate_rl.placement import Placement
from colocate_rl.rollout.custom import RolloutFunction
from colocate_rl.rollout.prompts import PromptCodec, check_prompt_length
from colocate_rl.rollout.rewards import Reward, Rewards
from colocate_rl.rollout.tools import Tool
from colocate_rl.scoring.contract import HELPERS, RewardOptions, passed_columns
from colocate_rl.scoring.models import ModelOptions
from colocate_rl.training import adapters
from colocate_rl.training import policy as policies
from colocate_rl.training.routers import router_loss

logger = logging.getLogger(__name__)

Rows: TypeAlias = datasets.Dataset | datasets.IterableDataset
EvalSets: TypeAlias = Rows | Mapping[str, Rows]
NUM_STREAM_PROMPTS = 64
"""Prompts of a stream that are checked before training; memory is planned for the longest of them."""
RewardTokenizers: TypeAlias = PreTrainedTokenizerBase | Sequence[PreTrainedTokenizerBase | None] | None


@dataclass(frozen=True, slots=True)
class Checked:
    """What the checks had to make anyway."""

    placement: Placement
    rewards: Rewards
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    longest_prompt: int
    """Tokens of the longest training prompt among this rank's share."""
    longer: multiturn.Plan
    """What is wanted beyond one call of the engines."""


@dataclass(frozen=True, slots=True)
class Given:
    """What the trainer was constructed with."""

    model: str | PreTrainedModel
    train_dataset: Rows | None
    eval_dataset: EvalSets | None = None
    reward_funcs: Reward | Sequence[Reward] | None = None
    reward_processing_classes: RewardTokenizers = None
    tokenizer: PreTrainedTokenizerBase | None = None
    peft_config: Any = None
    quantization_config: Any = None
    tools: Sequence[Tool] | None = None
    rollout_func: RolloutFunction | None = None
    environment_factory: Any = None


def check_run(args: GRPOConfig, collectives: Collectives, given: Given) -> Checked:
    """Checks launch, settings, rewards, data and model configuration; no weights are read.

    Raises:
        ColocateError: the first problem found.
    """
    model, train_dataset = given.model, given.train_dataset
    adapters.check_arguments(model, given.peft_config, given.quantization_config, args=args)
    longer = multiturn.plan(args, given.tools, given.rollout_func, given.environment_factory)
    placement = _placement(args, collectives.world_size)
    rewards = make_rewards(args, given.reward_funcs, given.reward_processing_classes)
    if train_dataset is None:
        raise DataError("train_dataset is required.")
    check_dataset(args, "train_dataset", train_dataset, rewards, given.rollout_func)
    if isinstance(train_dataset, datasets.IterableDataset):
        _check_stream(args)
    else:
        _check_enough_prompts(args, train_dataset)
    _check_output_dir(args)
    for name, rows in eval_sets(given.eval_dataset).items():
        check_dataset(args, name, rows, rewards, given.rollout_func)
    config = _config(args, model)
    _check_router(args, config)
    tokenizer = _tokenizer(args, given, config)
    vocab_size = policies.vocab_size(config)
    _check_pad_token(tokenizer, vocab_size)
    window = _window(args, config)
    codec = PromptCodec(tokenizer, dictionary(args.chat_template_kwargs), longer.schemas)
    longest = _check_prompts("train_dataset", train_dataset, codec, window, vocab_size, collectives)
    for name, rows in eval_sets(given.eval_dataset).items():
        _check_prompts(name, rows, codec, window, vocab_size, collectives)
    multiturn.check_template(longer, args, tokenizer, model, config)
    return Checked(placement, rewards, config, tokenizer, longest, longer)


def _config(args: GRPOConfig, model: str | PreTrainedModel) -> PretrainedConfig:
    if not isinstance(model, str):
        return model.config
    return policies.load_config(model, dictionary(args.model_init_kwargs), trust_remote_code=args.trust_remote_code)


def _check_router(args: GRPOConfig, config: PretrainedConfig) -> None:
    router = router_loss(config, args.router_aux_loss_coef, args.gradient_checkpointing_kwargs)
    if router is not None and args.overlap == "stream":
        raise ConfigError(
            f"overlap='stream' trains a group while others are generated, but the load-balancing loss of "
            f"{type(config).__name__} (weight {router.weight}) needs the experts of a whole slice. Set "
            "router_aux_loss_coef=0, or choose another overlap."
        )


def _tokenizer(args: GRPOConfig, given: Given, config: PretrainedConfig) -> PreTrainedTokenizerBase:
    """The one that was given, else the model's own."""
    tokenizer = given.tokenizer
    if tokenizer is None:
        name = given.model if isinstance(given.model, str) else config._name_or_path
        tokenizer = policies.load_tokenizer(
            name, dictionary(args.model_init_kwargs), trust_remote_code=args.trust_remote_code
        )
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise TypeError(
            f"processing_class must be a tokenizer (PreTrainedTokenizerBase), got {type(tokenizer).__name__}. "
            "Multimodal processors are not supported."
        )
    return tokenizer


def _check_pad_token(tokenizer: PreTrainedTokenizerBase, vocab_size: int | None) -> None:
    pad = policies.pad_token_id(tokenizer)
    if vocab_size is not None and pad >= vocab_size:
        raise ConfigError(
            f"The tokenizer's pad token has id {pad}, but the model has {vocab_size} embeddings (0 to "
            f"{vocab_size - 1}). Use a pad token the model knows, or resize its embeddings."
        )


def _window(args: GRPOConfig, config: PretrainedConfig) -> int | None:
    """Tokens that prompt and completion may have together, with room for a prompt; None when unknown."""
    window = policies.context_window(config, args.vllm_max_model_length)
    if window is not None and args.max_completion_length >= window:
        raise ConfigError(
            f"max_completion_length={args.max_completion_length} does not fit beside any prompt in the context window "
            f"of {window} tokens. Lower it, or raise vllm_max_model_length if the model has more positions."
        )
    return window


def _check_output_dir(args: GRPOConfig) -> None:
    folder = Path(args.output_dir or ".")
    taken = next((path for path in (folder, *folder.parents) if path.exists() and not path.is_dir()), None)
    if taken is not None:
        raise ConfigError(
            f"output_dir={args.output_dir!r} cannot be a folder: {str(taken)!r} is a file. Choose another output_dir."
        )


def _placement(args: GRPOConfig, num_ranks: int) -> Placement:
    if args.use_vllm:
        vllm_version()
    try:
        return engines.plan_placement(args, num_ranks, engines.num_nodes())
    except PlacementError as error:
        # What accelerate's launcher leaves behind where it was asked for several processes and started one.
        if num_ranks > 1 or "MASTER_PORT" not in os.environ or "RANK" in os.environ:
            raise
        raise PlacementError(
            f"{error} Without a GPU accelerate launch starts one process, whatever its --num_processes: start a "
            "script with torchrun --nproc_per_node N there."
        ) from None


def make_rewards(
    args: GRPOConfig, reward_funcs: Reward | Sequence[Reward] | None, tokenizers: RewardTokenizers
) -> Rewards:
    """The reward sources as the settings want them asked; nothing is loaded or started yet.

    Raises:
        ConfigError: for anything that is no reward source, or cannot be used so.
    """
    functions: Any = [] if reward_funcs is None else reward_funcs
    single = callable(functions) or isinstance(functions, str)
    if tokenizers is not None and not isinstance(tokenizers, list | tuple):
        tokenizers = [tokenizers]  # type: ignore[list-item]  # a tokenizer is a sequence to isinstance, not to mypy
    return Rewards(
        [functions] if single else list(functions),
        args.reward_weights,
        options=RewardOptions(args.reward_num_workers, args.reward_timeout_s, args.on_reward_error),
        processing_classes=tokenizers,
        model_options=ModelOptions(
            dictionary(args.model_init_kwargs), args.trust_remote_code, dictionary(args.chat_template_kwargs)
        ),
    )


def eval_sets(eval_dataset: EvalSets | None) -> dict[str, Rows]:
    """The evaluation sets by a name for messages."""
    if eval_dataset is None:
        return {}
    if isinstance(eval_dataset, Mapping):
        return {f"eval_dataset[{name!r}]": rows for name, rows in eval_dataset.items()}
    return {"eval_dataset": eval_dataset}


def check_dataset(
    args: GRPOConfig, name: str, rows: Any, rewards: Rewards, rollout_func: RolloutFunction | None
) -> None:
    """Refuses anything but a data set, streaming or not, with prompts and with what the reward functions take.

    Args:
        args: the run's configuration.
        name: of the data set, for messages.
        rows: the data set.
        rewards: of the run.
        rollout_func: it may add columns; None: nothing does.

    Raises:
        TypeError: for another type of data set.
        DataError: for a missing column, an empty set, or columns that stand for something else.
        ConfigError: for a reward function that could not be called.
    """
    if not isinstance(rows, datasets.Dataset | datasets.IterableDataset):
        raise TypeError(
            f"{name} must be a datasets.Dataset or IterableDataset, got {type(rows).__name__}. Load it with "
            "datasets.load_dataset(..., split=...)."
        )
    columns = column_names(rows)
    if not columns:
        raise DataError(f"{name} has no rows.")
    if "prompt" not in columns:
        raise DataError(
            f"{name} has no column 'prompt'; its columns are {', '.join(columns)}. Rename the one that holds "
            "the prompts, for instance with dataset.rename_column."
        )
    if isinstance(rows, datasets.Dataset) and len(rows) == 0:
        raise DataError(f"{name} has no rows.")
    taken = [column for column in columns if column in ("prompts", "completions", *HELPERS)]
    if taken and not args.remove_unused_columns:
        raise DataError(
            f"{name} has column(s) {', '.join(taken)}, which are names of arguments that reward functions get anyway. "
            "Rename them, or set remove_unused_columns=True."
        )
    if rollout_func is None:
        rewards.check_arguments([] if args.remove_unused_columns else passed_columns(columns), name)


def column_names(rows: Rows) -> list[str]:
    """The columns; those of a stream that does not say are its first row's."""
    if rows.column_names is not None:
        return list(rows.column_names)
    return list(next(iter(rows.take(1)), {}))


def _check_stream(args: GRPOConfig) -> None:
    if args.max_steps <= 0:
        raise ConfigError(
            "train_dataset is a stream, which has no length, so the run needs one: set max_steps to the number of "
            "optimizer steps."
        )
    if args.dynamic_sampling:
        raise ConfigError(
            "dynamic_sampling=True draws further prompts from anywhere in train_dataset, which a stream does not "
            "allow. Load the data set without streaming=True."
        )
    if args.dataloader_num_workers:
        logger.warning("dataloader_num_workers=%d: a stream is read in the rank itself.", args.dataloader_num_workers)


def _check_enough_prompts(args: GRPOConfig, rows: datasets.Dataset) -> None:
    needed = args.prompts_per_batch
    if len(rows) < needed:
        raise DataError(
            f"train_dataset has {len(rows)} prompt(s), but one generation batch takes {needed} different ones "
            f"(generation_batch_size={args.generation_batch_size} completions / num_generations="
            f"{args.num_generations}), so there would be no step at all. Add prompts, or lower "
            "per_device_train_batch_size, steps_per_generation or gradient_accumulation_steps."
        )


def _check_prompts(
    name: str,
    rows: Rows,
    codec: PromptCodec,
    window: int | None,
    vocab_size: int | None,
    collectives: Collectives,
) -> int:
    """Encodes every prompt of this rank's share (the caller makes all fail together); the longest one's tokens.

    Of a stream the first prompts are checked; the others are when their turn comes.
    """
    longest = 0
    prompts: Any = rows.select_columns(["prompt"])
    if isinstance(rows, datasets.IterableDataset):
        prompts = list(prompts.take(NUM_STREAM_PROMPTS))
    for index in range(collectives.rank, len(prompts), collectives.world_size):
        try:
            ids = codec.encode(prompts[index]["prompt"])
        except DataError as error:
            raise DataError(f"{name}, row {index}: {error}") from None
        check_prompt_length(len(ids), limit=window, where=f"{name}, row {index}: the prompt")
        if vocab_size is not None and max(ids) >= vocab_size:
            raise DataError(
                f"{name}, row {index}: the prompt holds token id {max(ids)}, but the model has {vocab_size} "
                "embeddings. Use the model's own tokenizer, or resize its embeddings."
            )
        longest = max(longest, len(ids))
    return longest
