"""Completions that take more than one call of the engines: tools, or a rollout function of the user's.

Checked before a model is loaded, and joined to the rollout once there are engines.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from colocate_rl.collectives import Collectives
from colocate_rl.config import GRPOConfig
from colocate_rl.engine.protocol import SamplingSpec
from colocate_rl.errors import ConfigError
from colocate_rl.options import dictionary
from colocate_rl.paths import local_or_hub
from colocate_rl.rollout.collect import Further, Replacement
from colocate_rl.rollout.custom import CustomRollout, FreeGenerator, RolloutFunction
from colocate_rl.rollout.dialogue import ToolFormat
from colocate_rl.rollout.generate import Generator
from colocate_rl.rollout.prompts import PromptCodec
from colocate_rl.rollout.tools import Tool, ToolBox
from colocate_rl.rollout.turns import ToolLoop
from colocate_rl.training import policy as policies


@dataclass(frozen=True, slots=True)
class Plan:
    """What the user wants beyond one call of the engines; at most one of the two."""

    toolbox: ToolBox | None = None
    function: RolloutFunction | None = None

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Of the tools; empty without any."""
        return [] if self.toolbox is None else self.toolbox.schemas


def plan(
    args: GRPOConfig, tools: Sequence[Tool] | None, rollout_func: RolloutFunction | None, environment_factory: Any
) -> Plan:
    """Checks what the constructor got.

    Raises:
        ConfigError: for combinations that cannot work.
    """
    if environment_factory is not None:
        raise ConfigError(
            "GRPOTrainer does not support environment_factory. Pass the environment's methods as tools, or run the "
            "environment in a rollout_func, which reaches the engines through trainer.generate."
        )
    if tools and rollout_func is not None:
        raise ConfigError("tools and rollout_func exclude each other: call the tools inside rollout_func.")
    if rollout_func is not None:
        if not callable(rollout_func):
            raise ConfigError(f"rollout_func must be a function, got {type(rollout_func).__name__}.")
        if args.overlap != "none":
            raise ConfigError(
                f"overlap={args.overlap!r} has engines answer while ranks train, but a rollout_func runs in the ranks "
                "themselves. Set overlap='none'."
            )
    if tools and args.overlap not in ("none", "one_step"):
        raise ConfigError(
            f"overlap={args.overlap!r} trains on a group as soon as engines have answered it, but completions that "
            "call tools go on after that. Set overlap to 'none' or 'one_step'."
        )
    return Plan(ToolBox(tools) if tools else None, rollout_func)


def check_template(
    wanted: Plan, args: GRPOConfig, tokenizer: PreTrainedTokenizerBase, model: str | PreTrainedModel, config: Any
) -> None:
    """Refuses tools that the chat template cannot write.

    Args:
        wanted: by the user.
        args: the run's configuration.
        tokenizer: of the policy.
        model: the policy, or its name.
        config: of the policy.

    Raises:
        ConfigError: saying what the template leaves out.
    """
    if wanted.toolbox is None:
        return
    generation = _generation_config(model, config) if isinstance(model, str) else model.generation_config
    ends = policies.end_token_ids(generation, tokenizer)
    ToolFormat(tokenizer, wanted.schemas, ends, dictionary(args.chat_template_kwargs))


def _generation_config(name: str, config: PretrainedConfig) -> GenerationConfig:
    """The one that the model will have once it is loaded."""
    try:
        return GenerationConfig.from_pretrained(local_or_hub(name))
    except OSError:
        return GenerationConfig.from_model_config(config)


@dataclass(frozen=True, slots=True)
class Joint:
    """What both kinds of longer rollouts stand on."""

    codec: PromptCodec
    generator: Generator
    collectives: Collectives
    sampling: SamplingSpec
    end_token_ids: tuple[int, ...]
    window: int | None

    def tool_loop(self, wanted: Plan, args: GRPOConfig) -> Further | None:
        """Goes on with completions that call tools; None without tools."""
        if wanted.toolbox is None:
            return None
        return ToolLoop(
            self.codec,
            wanted.toolbox,
            ToolFormat(self.codec.tokenizer, wanted.schemas, self.end_token_ids, dictionary(args.chat_template_kwargs)),
            self.generator,
            self.collectives,
            self.sampling,
            window=self.window,
            max_iterations=args.max_tool_calling_iterations,
        )

    def replacement(
        self, wanted: Plan, trainer: Any, free: FreeGenerator, vocab_size: int | None
    ) -> Replacement | None:
        """The user's function in place of the engines; None without one."""
        if wanted.function is None:
            return None
        return CustomRollout(
            wanted.function,
            trainer,
            free,
            self.collectives,
            end_token_ids=self.end_token_ids,
            vocab_size=vocab_size,
            window=self.window,
        )
