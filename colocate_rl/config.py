"""`GRPOConfig`: `transformers.TrainingArguments` plus the settings of :mod:`colocate_rl.options`, checked."""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import parse_flag_from_env
from transformers import TrainingArguments
from transformers.trainer_utils import IntervalStrategy
from transformers.utils.import_utils import is_liger_kernel_available

from colocate_rl import backend, objective_checks, options, trl_only, values
from colocate_rl.errors import ConfigError
from colocate_rl.options import GRPOOptions

logger = logging.getLogger(__name__)


@dataclass
class GRPOConfig(GRPOOptions, TrainingArguments):  # type: ignore[misc]  # None stands for "decide by the machine"
    """Settings of :class:`colocate_rl.GRPOTrainer`.

    Every ``TrainingArguments`` field works as usual; the fields of :class:`colocate_rl.options.GRPOOptions` come on
    top or replace a default. Batch sizes count completions, not prompts: with b = per_device_train_batch_size, W ranks
    and S = steps_per_generation, one generation batch holds b * W * S completions of b * W * S / G prompts.

    Raises:
        ConfigError: for values or combinations that cannot work, with the numbers.
    """

    _VALID_DICT_FIELDS = [*TrainingArguments._VALID_DICT_FIELDS, *options.JSON_OPTIONS]  # noqa: RUF012  # as there

    def __new__(cls, *args: Any, **kwargs: Any) -> "GRPOConfig":
        """Names what TRL's settings are here, where Python would only say that they are unexpected."""
        trl_only.check_names(kwargs)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self._check_sharding()
        # Asking for a GPU alone would keep a notebook from forking ranks.
        has_gpu = not self.use_cpu and torch.cuda.is_available()
        if not has_gpu:
            self.use_cpu = True  # nothing else exists here, so nobody has to say so
        if self.bf16 is None:
            self.bf16 = has_gpu and not self.fp16 and torch.cuda.is_bf16_supported()
        self.checkpointing_is_open = self.gradient_checkpointing is None  # the trainer decides once it knows the model
        if self.gradient_checkpointing is None:
            self.gradient_checkpointing = False
        if self.ddp_find_unused_parameters is None:
            self.ddp_find_unused_parameters = False  # every parameter takes part in every micro-batch, empty ones too
        if self.torch_compile and not (self.torch_compile_backend or self.torch_compile_mode):
            self.torch_compile, self.compile_layers = False, True  # layer by layer, not as accelerate would
        super().__post_init__()
        self._n_gpu = min(self._n_gpu, 1)  # spare GPUs belong to the engines: never nn.DataParallel
        self._normalise()
        values.check_types(self)
        backend.resolve(self)
        values.check_choices(self)
        self._check_ranges()
        objective_checks.check_objective(self)
        self._check_unsupported()
        self._resolve_batches()
        self._check_resampling()
        self._check_staleness()

    def _normalise(self) -> None:
        if isinstance(self.vllm_devices, str):
            try:
                self.vllm_devices = [int(part) for part in self.vllm_devices.split(",")]
            except ValueError:
                raise ConfigError(
                    f"vllm_devices={self.vllm_devices!r} is not a list of device numbers such as '2,3'."
                ) from None
        given: Any = self.vllm_devices
        if isinstance(given, int):
            self.vllm_devices = [given]
        for name in options.JSON_OPTIONS:
            if not isinstance(getattr(self, name), dict | None):
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} is no JSON object; write it as '{{\"key\": value}}'."
                )
        objective_checks.take_old_names(self)
        spelled = str(self.scale_rewards)  # TRL's booleans are taken too
        self.scale_rewards = {"true": "group", "false": "none"}.get(spelled.lower(), spelled)
        if self.epsilon_high is None:
            self.epsilon_high = self.epsilon
        if self.num_generations_eval is None:
            self.num_generations_eval = self.num_generations

    def _check_ranges(self) -> None:
        rows = "at least 1 completion"
        values.check_rules(
            self,
            [
                ("per_device_train_batch_size", self.per_device_train_batch_size >= 1, rows),
                ("per_device_eval_batch_size", self.per_device_eval_batch_size >= 1, rows),
                ("seed", 0 <= self.seed < 2**32, "at least 0, below 2**32"),
            ],
        )
        values.check_ranges(self)
        if self.vllm_max_model_length is not None and self.vllm_max_model_length <= self.max_completion_length:
            raise ConfigError(
                f"vllm_max_model_length={self.vllm_max_model_length} tokens hold prompt and completion together, so "
                f"max_completion_length={self.max_completion_length} leaves no room for any prompt. Raise the first or "
                "lower the second."
            )

    def _check_sharding(self) -> None:
        """To be called first: transformers would look for packages that these need."""
        by_launcher = any(map(parse_flag_from_env, ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")))
        if self.deepspeed or self.fsdp or by_launcher:
            raise ConfigError(
                "DeepSpeed and FSDP are not supported yet: weight sync needs the whole policy on each host rank. "
                "Remove the setting; ranks then train with DistributedDataParallel."
            )

    def _check_unsupported(self) -> None:
        if self.vllm_mode != "colocate":
            raise ConfigError(
                f"vllm_mode={self.vllm_mode!r} is not supported: engines live inside the training processes, there is "
                "no server. Remove the setting and choose the number of engine GPUs with num_vllm_gpus."
            )
        if self.auto_find_batch_size:
            raise ConfigError(
                "auto_find_batch_size=True would shrink the batch and cut groups of completions apart. Set "
                "per_device_train_batch_size instead."
            )
        for name, reason in (
            ("torch_compile", "layers are compiled one by one, with torch's defaults; leave out its backend and mode"),
            ("ignore_data_skip", "a resumed run would train other prompts than its generation batches say"),
        ):
            if getattr(self, name):
                raise ConfigError(f"{name}=True is not supported: {reason}. Remove the setting.")
        for name in ("split_batches", "dispatch_batches"):
            if getattr(self.accelerator_config, name, False):
                raise ConfigError(
                    f"accelerator_config.{name}=True is not supported: each rank reads its own rows, and "
                    "per_device_train_batch_size is what one rank trains on. Remove the setting."
                )
        self._check_passed_on()
        self._check_liger()
        used = self.sampling_filters
        if used and self.use_vllm and self.vllm_importance_sampling_correction:
            logger.warning(
                "%s: the engine's log-probabilities include this filter, the policy's do not, so the "
                "importance-sampling correction also weighs completions by the filter's renormalisation (see "
                "sampling/sampling_logp_difference). Consider vllm_importance_sampling_correction=False.",
                ", ".join(used),
            )

    def _check_passed_on(self) -> None:
        """Refuses keys of dictionaries that would contradict a setting without anybody noticing."""
        for key in options.dictionary(self.vllm_engine_kwargs):
            if key in backend.ENGINE_OWNED_ARGUMENTS:
                raise ConfigError(f"vllm_engine_kwargs holds {key!r}, which is decided by the run itself. Remove it.")

    def _check_liger(self) -> None:
        """Lets Liger's kernels stand in for a model's layers, but not for its head, which is chunked here anyway."""
        if not self.use_liger_kernel:
            return
        if not is_liger_kernel_available():
            raise ConfigError(
                "use_liger_kernel=True needs the package liger-kernel, which is not installed. Install it, or remove "
                "the setting: log-probabilities are computed without full logits either way."
            )
        kernels = dict(self.liger_kernel_config or {})
        if kernels.get("fused_linear_cross_entropy"):
            raise ConfigError(
                "liger_kernel_config={'fused_linear_cross_entropy': True} would replace the forward pass that "
                "log-probabilities are computed in. Remove it; they are computed without full logits anyway."
            )
        self.liger_kernel_config = {**kernels, "fused_linear_cross_entropy": False}

    def _check_resampling(self) -> None:
        if self.dynamic_sampling and self.overlap != "none":
            raise ConfigError(
                f"dynamic_sampling=True asks the engines again before a batch is trained, but overlap={self.overlap!r} "
                "has them busy with the batches to come. Use overlap='none'."
            )

    def _check_staleness(self) -> None:
        """A batch generated one generation batch ahead is as many versions old as that batch has optimizer steps."""
        if self.overlap == "stream":
            self._check_stream()
        if self.overlap != "one_step":
            return
        steps, rest = divmod(self.micro_batches_per_rollout, self.gradient_accumulation_steps)
        steps += 2 if rest else 0  # a batch may begin within a step, and an epoch may end with a short one
        if steps > self.max_staleness:
            raise ConfigError(
                f"overlap={self.overlap!r} generates a batch while the one before it is trained, which takes "
                f"steps_per_generation={self.steps_per_generation} x num_iterations={self.num_iterations} / "
                f"gradient_accumulation_steps={self.gradient_accumulation_steps} = {steps} optimizer steps, so "
                f"completions would be up to {steps} versions old; max_staleness={self.max_staleness} refuses that. "
                "Raise it, or use each generation batch for fewer steps."
            )

    def _check_stream(self) -> None:
        """Rows arrive in no known order, so all that arrive must belong to one optimizer step."""
        if self.steps_per_generation != self.gradient_accumulation_steps:
            raise ConfigError(
                f"overlap='stream' trains a generation batch as it comes, in one optimizer step, so "
                f"steps_per_generation={self.steps_per_generation} must be "
                f"gradient_accumulation_steps={self.gradient_accumulation_steps}. Make them equal, or choose another "
                "overlap."
            )
        for name, is_off, needed in (
            ("scale_rewards", self.scale_rewards != "batch", "all rewards of the batch"),
            (
                "multi_objective_aggregation",
                self.multi_objective_aggregation != "normalize_then_sum",
                "all rewards of the batch",
            ),
            ("top_entropy_quantile", self.top_entropy_quantile >= 1, "the entropies of a whole slice"),
            ("entropy_coef", self.entropy_coef == 0.0 and not self.use_adaptive_entropy, "the tokens of a whole slice"),
        ):
            if not is_off:
                raise ConfigError(
                    f"overlap='stream' trains a group while others are generated, but {name}={getattr(self, name)!r} "
                    f"needs {needed}, known only at its end. Change it, or choose another overlap."
                )

    def _resolve_batches(self) -> None:
        per_step = self.per_device_train_batch_size * self.world_size
        both = self.generation_batch_size, self.steps_per_generation
        if None not in both and both[0] != per_step * (both[1] or 0):  # a copy of a configuration names both
            raise ConfigError(
                f"generation_batch_size={self.generation_batch_size} and "
                f"steps_per_generation={self.steps_per_generation} both set the size of a generation batch. Set one."
            )
        sizes = f"per_device_train_batch_size={self.per_device_train_batch_size} x {self.world_size} rank(s)"
        if self.generation_batch_size is not None:
            if self.generation_batch_size < 1 or self.generation_batch_size % per_step:
                raise ConfigError(
                    f"generation_batch_size={self.generation_batch_size} must be a multiple of {sizes} = {per_step}."
                )
            self.steps_per_generation = self.generation_batch_size // per_step
        if self.steps_per_generation is None:
            self.steps_per_generation = self.gradient_accumulation_steps
        if self.steps_per_generation < 1:
            raise ConfigError(f"steps_per_generation is {self.steps_per_generation}; it must be at least 1.")
        self.generation_batch_size = per_step * self.steps_per_generation
        if self.generation_batch_size % self.num_generations:
            valid = [g for g in range(2, self.generation_batch_size + 1) if self.generation_batch_size % g == 0]
            raise ConfigError(
                f"A generation batch holds {sizes} x steps_per_generation={self.steps_per_generation} = "
                f"{self.generation_batch_size} completions, which is no multiple of "
                f"num_generations={self.num_generations}, and groups must be whole. Change one of them; valid "
                f"num_generations here: {', '.join(map(str, valid)) or 'none'}."
            )
        eval_rows = self.per_device_eval_batch_size * self.world_size
        assert self.num_generations_eval is not None
        if self.eval_strategy != IntervalStrategy.NO and eval_rows % self.num_generations_eval:
            raise ConfigError(
                f"per_device_eval_batch_size={self.per_device_eval_batch_size} x {self.world_size} rank(s) = "
                f"{eval_rows} completions is no multiple of num_generations_eval={self.num_generations_eval}. Change "
                "one of them."
            )

    @property
    def micro_batches_per_rollout(self) -> int:
        """Micro-batches trained between two rollouts: steps_per_generation x num_iterations."""
        assert self.steps_per_generation is not None
        return self.steps_per_generation * self.num_iterations

    @property
    def prompts_per_batch(self) -> int:
        """Different prompts of a generation batch, over all ranks."""
        assert self.generation_batch_size is not None
        return self.generation_batch_size // self.num_generations
