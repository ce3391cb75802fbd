"""Every setting this package adds to or changes in ``transformers.TrainingArguments``, as a plain dataclass.

It imports nothing heavy, so that ``--help`` answers at once; :mod:`colocate_rl.config` joins it with
``TrainingArguments`` and checks it. Names are TRL's wherever the meaning is TRL's.
"""

from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal, get_args

LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]
ImportanceSamplingLevel = Literal["token", "sequence"]
OnRewardError = Literal["raise", "none"]
ScaleRewards = Literal["group", "batch", "none"]
MultiObjectiveAggregation = Literal["sum_then_normalize", "normalize_then_sum"]
SamplingCorrectionMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
OldLogprobs = Literal["auto", "policy", "sampling"]
LoraSync = Literal["auto", "merged", "adapter"]
Overlap = Literal["none", "stream", "one_step"]
ModelImplementation = Literal["vllm", "transformers"]

SUPPORTED_VLLM = ("0.24", "0.33")
"""Half-open range of vLLM versions this package is tested with (both ends)."""


def choices(literal: Any) -> tuple[str, ...]:
    """The values of a ``Literal``, for messages and tables."""
    return tuple(str(value) for value in get_args(literal))


SECTIONS = {
    "num_vllm_gpus": "Engines",
    "model_init_kwargs": "Model and data",
    "num_generations": "Generation",
    "beta": "Loss",
    "log_completions": "Logging, and TrainingArguments with another default",
}
"""Heading of the help text that starts with a field."""


def _setting(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


def _switch(text: str) -> Any:
    """A truth value that is None unless given; the flag alone means True, as that of any other truth value does."""
    return field(default=None, metadata={"help": text, "nargs": "?", "const": True})


@dataclass
class GRPOOptions:
    """The settings of :class:`colocate_rl.GRPOConfig` that are not plain ``TrainingArguments``.

    Each field documents itself (unit, meaning of None) in its ``help`` metadata, which is also the text of ``--help``.
    """

    # Engines
    num_vllm_gpus: int | None = _setting(
        None,
        "K, the number of vLLM engines. Engine e lives inside training rank e (times the tensor-parallel size) and "
        "runs on the GPUs after the training ranks. None: 1, or 0 with use_vllm=False.",
    )
    vllm_devices: list[int] | str | None = _setting(
        None,
        "Logical device number of each engine shard, as in '2,3' (on CPU: core numbers). None: the devices after the "
        "training ranks. Naming a training device needs vllm_gpu_memory_utilization too.",
    )
    vllm_tensor_parallel_size: int = _setting(
        1, "t, shards per engine. Neighbouring ranks hold the shards of one in-process engine; no worker processes."
    )
    vllm_gpu_memory_utilization: float | None = _setting(
        None,
        "Share (0 to 1) of each engine device's memory that weights and KV cache may use at most; needed where the "
        "device also trains. None: 0.9. The KV cache holds the generation batch with a quarter to spare if that takes "
        "up to half of the room beside the weights, else what is left. On CPU it has 1 GiB per engine (environment "
        "variable VLLM_CPU_KVCACHE_SPACE changes it).",
    )
    vllm_max_model_length: int | None = _setting(
        None,
        "Context window of the engines in tokens, prompt plus completion. None: the model's own. A prompt that "
        "leaves no room for one new token is refused before training; one that leaves less than "
        "max_completion_length tokens is completed up to the window and counts as truncated.",
    )
    vllm_max_num_seqs: int | None = _setting(
        None,
        "Most completions an engine decodes at once; the others wait, and go to whichever engine has room first. "
        "None: an engine's share of the generation batch, at most 1024.",
    )
    vllm_dtype: str | None = _setting(
        None, "Number type of the engine's weights (float32, bfloat16, float16). None: the type the policy computes in."
    )
    vllm_enforce_eager: bool | None = _switch(
        "True: no CUDA graphs and no compilation in the engine. None: True on CPU, False on GPU."
    )
    vllm_per_request_seeds: bool = _setting(
        False,
        "True: every completion has a seed of its own (run seed, rollout, prompt, copy), so that the completions do "
        "not depend on the number of engines. Slower on GPU.",
    )
    vllm_engine_kwargs: dict[str, Any] | str | None = _setting(
        None, "Further arguments of vllm.LLM (JSON on the command line). They win over what this package sets."
    )
    vllm_logprob_gap_limit: float | None = _setting(
        None,
        "Largest mean |engine - policy| log-probability, in nats, accepted on a probe after the first weight sync. "
        "None: 0.01 when both compute in float32, else 0.2. 0 switches the check off.",
    )
    lora_sync: str = _setting(
        "auto",
        "How a LoRA adapter reaches the engines. merged: each adapted weight is sent with the adapter merged into a "
        "copy of it, and generation costs nothing more. adapter: only the adapter is sent, into a LoRA slot of the "
        "engine, which then computes it beside each layer for each token (not for DoRA, embeddings, or float32 on a "
        "GPU). auto: merged, the cheaper one over a whole step unless completions are very short.",
    )
    vllm_model_impl: str = _setting(
        "vllm",
        "Whose code of the model the engines run: vllm, or transformers (vLLM's wrapper around the model's own code, "
        "for architectures that vLLM does not have; each engine then lives in a child process of its rank).",
    )
    vllm_structured_outputs_regex: str | None = _setting(
        None,
        "Completions match this regular expression (unless max_completion_length cuts them). Wins over "
        "generation_kwargs['structured_outputs']. The sampling log-probabilities are those of the allowed tokens.",
    )
    overlap: str = _setting(
        "none",
        "none: ranks wait while engines generate, and the other way round. stream: groups that are finished are "
        "trained while the others are generated; the gradient is that of none. one_step: engines generate the next "
        "batch, with the weights of before the update, while ranks train on the last one. With both each engine lives "
        "in a child process of its rank.",
    )
    max_staleness: int = _setting(
        1,
        "one_step: most optimizer steps by which the policy may be ahead of a batch's weights when its training "
        "begins.",
    )
    use_vllm: bool | None = _switch(
        "True (None means this too, unlike in TRL): num_vllm_gpus engines generate. False: each rank generates with "
        "its own policy through transformers, on its own device; slow, a reference and a fallback.",
    )
    vllm_mode: str = _setting("colocate", "Kept for TRL scripts. Only 'colocate' (in-process engines) exists here.")

    # Model and data
    model_init_kwargs: dict[str, Any] | str | None = _setting(
        None, "Keyword arguments of from_pretrained when the model is given as a string (JSON on the command line)."
    )
    trust_remote_code: bool = _setting(False, "Allow code from the model's folder or hub repository to run.")
    cast_lm_head_to_fp32: bool = _setting(
        False, "Compute the output head of policy and reference in float32 where the rest computes in 16 bits."
    )
    disable_dropout: bool = _setting(False, "Set every dropout of the policy and the reference to 0.")
    remove_unused_columns: bool = _setting(
        False, "True: pass only the prompt to the reward functions. False: pass every other column too."
    )
    shuffle_dataset: bool = _setting(True, "Permute the prompts in each epoch (by data_seed, else seed).")
    chat_template_kwargs: dict[str, Any] | str | None = _setting(
        None, "Keyword arguments of apply_chat_template for conversational prompts (JSON on the command line)."
    )

    # Generation
    num_generations: int = _setting(8, "G, completions per prompt (a group); at least 2.")
    num_generations_eval: int | None = _setting(None, "Completions per prompt in evaluation. None: num_generations.")
    max_completion_length: int = _setting(512, "Most new tokens per completion.")
    generation_batch_size: int | None = _setting(
        None,
        "Completions per generation batch over all ranks; excludes steps_per_generation. None: "
        "per_device_train_batch_size x ranks x steps_per_generation.",
    )
    steps_per_generation: int | None = _setting(
        None, "Micro-batches served by one generation batch. None: gradient_accumulation_steps."
    )
    temperature: float = _setting(1.0, "Sampling temperature; also divides the policy's logits.")
    top_p: float = _setting(
        1.0,
        "Nucleus sampling threshold; 1.0 is off. Filters (this one, top_k, min_p, repetition_penalty) are part of the "
        "engine's log-probabilities but not of the policy's: the correction weights then carry their renormalisation.",
    )
    top_k: int = _setting(0, "Sample among the k likeliest tokens; 0 is off.")
    min_p: float | None = _setting(None, "Least probability relative to the likeliest token; None is off.")
    repetition_penalty: float = _setting(1.0, "Values above 1.0 make repeated tokens less likely.")
    generation_kwargs: dict[str, Any] | str | None = _setting(
        None,
        "Further vLLM SamplingParams keys (JSON on the command line); they win over the settings above. With "
        "use_vllm=False: GenerationConfig keys that work through logits, such as suppress_tokens.",
    )
    cache_implementation: str | None = _setting(
        None, "use_vllm=False: the kind of key/value cache of transformers' generate. None: the model's own."
    )
    max_tool_calling_iterations: int | None = _setting(
        None, "Most times that a completion may call tools and go on. None: as often as it calls and fits."
    )
    use_transformers_continuous_batching: bool = _setting(False, "Kept for TRL scripts; only False works here.")
    use_transformers_paged: bool = _setting(False, "Kept for TRL scripts; only False works here.")

    # Loss
    beta: float = _setting(0.0, "Weight of the KL term. 0: no reference model is loaded.")
    num_iterations: int = _setting(1, "Passes over each generation batch (mu).")
    epsilon: float = _setting(0.2, "Lower clip range of the probability ratio.")
    epsilon_high: float | None = _setting(
        None,
        "Upper clip range of the probability ratio. None: epsilon. With loss_type cispo it is the cap of the ratio "
        "itself (5.0 is usual).",
    )
    delta: float | None = _setting(None, "Upper bound of the unclipped ratio (two-sided clipping). None: no bound.")
    importance_sampling_level: str = _setting(
        "token", "Level of the probability ratio: " + ", ".join(choices(ImportanceSamplingLevel)) + "."
    )
    loss_type: str = _setting(
        "dapo",
        "What a token's loss is, and how token losses are averaged: " + ", ".join(choices(LossType)) + ".",
    )
    sapo_temperature_pos: float = _setting(1.0, "sapo: temperature of the gate of tokens with a positive advantage.")
    sapo_temperature_neg: float = _setting(1.05, "sapo: temperature of the gate of all other tokens.")
    vespo_k_pos: float = _setting(
        2.0, "vespo: how strongly sequences that became less likely (w < 1) lose weight; advantages of at least 0."
    )
    vespo_lambda_pos: float = _setting(
        3.0, "vespo: how strongly sequences that became likelier (w > 1) lose weight; advantages of at least 0."
    )
    vespo_k_neg: float = _setting(3.0, "vespo: as vespo_k_pos, for negative advantages.")
    vespo_lambda_neg: float = _setting(2.0, "vespo: as vespo_lambda_pos, for negative advantages.")
    scale_rewards: str = _setting(
        "group", "Standard deviation that divides advantages: group (True means this too), batch, none (False)."
    )
    reward_weights: list[float] | None = _setting(None, "One weight per reward function. None: all 1.0.")
    multi_objective_aggregation: str = _setting(
        "sum_then_normalize",
        "Several reward functions: sum_then_normalize, or normalize_then_sum (GDPO), where each is scaled within its "
        "group before they are summed and scale_rewards is not read.",
    )
    reward_num_workers: int = _setting(
        0,
        "Processes per rank that reward functions run in, one call per prompt (coroutine functions and reward models "
        "stay in the rank). Functions must be picklable and are copied into each process. 0: in the rank itself.",
    )
    reward_timeout_s: float | None = _setting(
        None,
        "Most seconds for one call of a reward function, which is ended then: the completions of one prompt for a "
        "function in a worker, all of the rank's for a coroutine function. None: no limit.",
    )
    on_reward_error: str = _setting(
        "raise",
        "What an error, a time limit or a lost worker in a reward function costs. raise: the run. none: the "
        "completions concerned get no reward (None) from that function, with one warning per rollout; their share is "
        "logged as reward_errors/<name>.",
    )
    dynamic_sampling: bool = _setting(
        False,
        "Replace groups whose rewards are all equal, which teach nothing, by completions of other prompts (DAPO).",
    )
    max_resample_tries: int = _setting(
        3, "dynamic_sampling: most times per generation batch that groups are replaced; the last ones are kept."
    )
    mask_truncated_completions: bool = _setting(False, "Leave completions that hit a length limit out of the loss.")
    use_bias_correction_kl: bool = _setting(True, "Multiply the KL term by the probability ratio.")
    sync_ref_model: bool = _setting(
        False, "Let the reference model follow the policy. Needs beta; checkpoints then hold the reference too."
    )
    ref_model_mixup_alpha: float = _setting(
        0.6, "sync_ref_model: the policy's share in reference <- alpha policy + (1 - alpha) reference."
    )
    ref_model_sync_steps: int = _setting(512, "sync_ref_model: optimizer steps between two updates of the reference.")
    top_entropy_quantile: float = _setting(
        1.0,
        "Share of tokens (0 to 1), those of largest entropy, that the policy loss is about, counted over the slices "
        "of all ranks. 1.0: all of them; 0.2 is usual.",
    )
    entropy_coef: float = _setting(
        0.0, "Weight of an entropy bonus (mean entropy per token, whatever loss_type). Adaptive: the first weight."
    )
    use_adaptive_entropy: bool = _setting(
        False, "Raise entropy_coef after each step whose entropy was at or below entropy_target, and lower it else."
    )
    entropy_coef_min: float = _setting(0.0, "use_adaptive_entropy: smallest entropy_coef.")
    entropy_coef_max: float = _setting(1.0, "use_adaptive_entropy: largest entropy_coef.")
    entropy_coef_delta: float = _setting(0.005, "use_adaptive_entropy: change of entropy_coef in a step.")
    entropy_target: float = _setting(
        0.2,
        "use_adaptive_entropy: nats per token; the bonus is applied only after a step at or below it. Choose it near "
        "the entropy logged early in a run.",
    )
    router_aux_loss_coef: float | None = _setting(
        None,
        "Mixture of experts: weight of the load-balancing loss, over prompt and completion tokens. None: the model's "
        "own router_aux_loss_coef; 0: off.",
    )
    off_policy_mask_threshold: float | None = _setting(
        None,
        "Leave completions with a negative advantage out of the policy loss when the engine found them likelier than "
        "the policy does by more than this, in nats per token (0.5, say). None: keep all.",
    )
    old_logprobs: str = _setting(
        "auto",
        "Whose log-probabilities are the 'old' ones, around which the ratio is clipped. policy: the policy's when "
        "training on the batch begins (no extra pass where they equal the live ones); the correction weighs the rest. "
        "sampling: those that the engine sampled with; no pass, no correction. auto: sampling with overlap='one_step', "
        "whose batches are of an older policy, unless a filter such as top_p changes what is sampled; else policy.",
    )
    vllm_importance_sampling_correction: bool = _setting(
        True, "Weight the loss by policy/engine probability, to correct for the engine's other numerics."
    )
    vllm_importance_sampling_mode: str = _setting(
        "sequence_mask", "One of " + ", ".join(choices(SamplingCorrectionMode)) + "."
    )
    vllm_importance_sampling_clip_max: float | None = _setting(3.0, "Upper bound of the correction weight.")
    vllm_importance_sampling_clip_min: float | None = _setting(None, "Lower bound of the correction weight.")
    vllm_importance_sampling_cap: float | None = _setting(
        None, "TRL's old name of vllm_importance_sampling_clip_max; wins over it when set."
    )
    logprob_chunk_size: int = _setting(
        1024, "Tokens whose logits exist at the same time while log-probabilities are computed (memory against speed)."
    )
    use_liger_loss: bool | None = _switch(
        "Kept for older TRL scripts; changes nothing: log-probabilities are always computed without full logits.",
    )
    padding_free: bool | None = _switch(
        "Pack the rows of a micro-batch into one sequence without padding; each row still attends only to itself. "
        "None: on GPU, where the model's attention allows it. True: on CPU too. Rows keep their padding, with one "
        "line in the log, where the model does not allow it or a check at start finds another result.",
    )
    compile_layers: bool | None = _switch(
        "Run the policy's decoder layers and output head compiled (torch.compile), which takes some 20 s at start. "
        "None: on GPU, where a check at start finds the same result. torch_compile=True is another word for True.",
    )
    max_tokens_per_micro_batch: int | None = _setting(
        None,
        "Most tokens (prompt, completion, and padding where there is any) in one forward and backward pass. The "
        "per_device_train_batch_size rows are then cut into as many passes as they need; losses and gradients stay "
        "the same. None: one pass.",
    )

    # Logging and changed defaults of TrainingArguments
    log_completions: bool = _setting(
        False, "At each log, print a table of the newest generation batch's completions and keep it as parquet."
    )
    num_completions_to_print: int | None = _setting(None, "Rows of that table (random sample). None: all; 0: none.")
    log_unique_prompts: bool = _setting(False, "Keep only the first completion of each prompt in that table.")
    log_timeline: bool = _setting(
        False,
        "Append when each rank and engine did what to timeline.jsonl in the output folder, one object per phase; "
        "seconds of the machine's monotonic clock.",
    )
    log_reward_trace: bool = _setting(
        False,
        "Append each prompt's rewards, by function and completion, to rewards.jsonl in the output folder, to follow a "
        "prompt over epochs. The file is begun anew at 256 MiB; the one before is kept.",
    )
    learning_rate: float = _setting(1e-6, "Initial learning rate of AdamW.")
    logging_steps: float = _setting(10, "Optimizer steps between two logs (a share of all steps when below 1).")
    gradient_checkpointing: bool | None = _switch(
        "Recompute activations in the backward pass. None: only on a GPU whose memory the activations would fill."
    )
    bf16: bool | None = _switch("Compute in bfloat16. None: True where there is a GPU that can and fp16 is off.")

    @property
    def sampling_filters(self) -> list[str]:
        """What keeps an engine from sampling some tokens: its log-probabilities are then not the policy's."""
        off: dict[str, tuple[Any, ...]] = {
            "top_p": (1.0,),
            "top_k": (0,),
            "min_p": (None, 0.0),
            "repetition_penalty": (1.0,),
            "vllm_structured_outputs_regex": (None,),
        }
        used = [name for name, values in off.items() if getattr(self, name) not in values]
        keys = ("structured_outputs", "bad_words", "logit_bias", "allowed_token_ids", "min_tokens")
        return used + [key for key in keys if key in dictionary(self.generation_kwargs)]

    @property
    def old_logprobs_source(self) -> Literal["policy", "sampling"]:
        """``old_logprobs`` with "auto" decided."""
        if self.old_logprobs == "auto":
            return "sampling" if self.overlap == "one_step" and not self.sampling_filters else "policy"
        return "policy" if self.old_logprobs == "policy" else "sampling"


JSON_OPTIONS = (
    "model_init_kwargs",
    "chat_template_kwargs",
    "generation_kwargs",
    "vllm_engine_kwargs",
)
"""Settings that the command line takes as JSON."""


def dictionary(value: dict[str, Any] | str | None) -> dict[str, Any]:
    """A setting of :data:`JSON_OPTIONS` once :class:`colocate_rl.GRPOConfig` has read it; empty where there is none."""
    assert not isinstance(value, str), value
    return dict(value or {})


def option_fields() -> tuple[Field[Any], ...]:
    """The fields of :class:`GRPOOptions`, in the order of the help text."""
    return fields(GRPOOptions)
