"""`GRPOTrainer`: the order of things. What each thing does lives in the rooms below."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import torch
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
)
from transformers.trainer_utils import EvalLoopOutput

from colocate_rl import engines, loaders, preflight, progress, settings, speedups, trackers
from colocate_rl.collectives import Collectives
from colocate_rl.config import GRPOConfig
from colocate_rl.errors import ConfigError
from colocate_rl.metrics import MetricBuffer, PhaseClock
from colocate_rl.rollout.collect import Rollout, Row, Scored
from colocate_rl.rollout.generate import Generator
from colocate_rl.rollout.prompts import PromptCodec, check_prompt_length
from colocate_rl.rollout.records import EngineStats, RolloutBatch
from colocate_rl.rollout.rewards import RewardFunction
from colocate_rl.runlog import RunLog
from colocate_rl.runreport import RunReport
from colocate_rl.schedule import OneStepAhead, Schedule, Synchronous
from colocate_rl.sync import WeightSync
from colocate_rl.training import policy as policies
from colocate_rl.training.objective import Objective

logger = logging.getLogger(__name__)


class GRPOTrainer(Trainer):
    """Trains a language model with GRPO; K in-process vLLM engines generate the completions.

    Constructor order and names are TRL's. Every rank of the launch must construct it.

    Args:
        model: folder or hub name of a causal language model (loaded in float32 unless ``model_init_kwargs`` says
            otherwise), or the model itself.
        reward_funcs: one callable or several; called with keywords ``prompts``, ``completions``, ``completion_ids``,
            every further column, ``trainer_state``, ``log_extra``, ``log_metric``; each returns one float or None per
            completion.
        args: the configuration; None: ``GRPOConfig("<model name>-GRPO")``.
        train_dataset: with a ``prompt`` column of strings or of message lists.
        eval_dataset: the same, or several by name.
        processing_class: the tokenizer; None: the model's own.
        reward_processing_classes: not supported yet.
        callbacks: as in ``Trainer``.
        optimizers: as in ``Trainer``.
        quantization_config: not supported yet.
        peft_config: not supported yet.
        tools: not supported yet.
        rollout_func: not supported yet.
        environment_factory: not supported yet.

    Raises:
        ColocateError: for anything that cannot work, before a model is loaded.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        reward_funcs: RewardFunction | list[RewardFunction] | None = None,
        args: GRPOConfig | None = None,
        train_dataset: datasets.Dataset | None = None,
        eval_dataset: preflight.EvalSets | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        reward_processing_classes: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Any = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
    ) -> None:
        model = str(model) if isinstance(model, Path) else model
        if not isinstance(model, str) and hasattr(model, "peft_config"):
            raise ConfigError("GRPOTrainer does not support PEFT models yet. Pass the base model.")
        name = model if isinstance(model, str) else model.config._name_or_path
        args = args if args is not None else GRPOConfig(f"{Path(name).resolve().name}-GRPO")
        _refuse(
            reward_processing_classes=reward_processing_classes,
            quantization_config=quantization_config,
            peft_config=peft_config,
            tools=tools,
            rollout_func=rollout_func,
            environment_factory=environment_factory,
        )
        self.collectives = Collectives(args.device)
        with self.collectives.failing_together("checking the run"):
            checked = preflight.check_run(
                args,
                self.collectives,
                model=model,
                tokenizer=processing_class,
                reward_funcs=reward_funcs,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
            )
        self.placement = checked.placement
        self.reward_funcs = checked.rewards.functions
        self.reward_func_names = checked.rewards.names
        self.reward_weights = checked.rewards.weights
        set_seed(args.seed)
        with self.collectives.failing_together("loading the model"):
            policy, self.ref_model = _load_models(model, args)
        longest = int(self.collectives.max(torch.tensor([checked.longest_prompt])))
        settings.decide_checkpointing(args, policy, self.placement, longest)
        self.eos_token_ids = policies.end_token_ids(policy, checked.tokenizer)
        pad = policies.pad_token_id(checked.tokenizer)
        policy.config.pad_token_id = pad
        if policy.generation_config is not None:
            policy.generation_config.pad_token_id = pad
        super().__init__(
            model=policy,
            args=args,
            data_collator=loaders.as_list,  # type: ignore[arg-type]  # rows stay rows until they are a rollout
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=checked.tokenizer,
            callbacks=[_StepHooks(self), RunReport(checked.placement), *(callbacks or [])],
            optimizers=optimizers,
        )
        self.args: GRPOConfig
        self.model_accepts_loss_kwargs = False  # compute_loss leaves the division by accumulation steps to Trainer
        if self.ref_model is not None:
            nn.Module.to(self.ref_model, args.device)
        set_seed(args.seed, device_specific=True)
        clock = PhaseClock(_synchronizer(args.device))
        clock.announce = progress.replace_bar(self, self.is_world_process_zero())
        names = checked.rewards.names
        self._log = RunLog(args, self.collectives, clock, self.placement.num_engines, names)
        with_padding = Objective(
            settings=settings.loss_settings(args),
            temperature=args.temperature,
            chunk=args.logprob_chunk_size,
            autocast=self.accelerator.autocast,
            max_tokens=args.max_tokens_per_micro_batch,
        )
        models = [model for model in (policy, self.ref_model) if model is not None]
        objective = speedups.decide_packing(args, models, with_padding, self.collectives)
        self._objective = speedups.decide_compiling(args, models, objective, self.collectives)
        with clock.phase(progress.BUILDING):
            self._build_engines(checked, longest)
        self._buffer: list[RolloutBatch] = []
        self._evaluated = False
        self._logs_together = False
        self._micro_step = 0
        self._micro_steps_since_update = 0
        self._tokens_per_slice = 1.0

    def _build_engines(self, checked: preflight.Checked, longest_prompt: int) -> None:
        args, policy = self.args, self.accelerator.unwrap_model(self.model)
        dtype = policies.model_dtype(policy)
        window = policies.context_window(policy.config, args.vllm_max_model_length)
        self.engine = engines.build_engine(
            args, self.placement, self.collectives, policy.config, dtype, window, longest_prompt
        )
        generator = Generator(
            self.placement,
            self.engine,
            self.collectives,
            lambda length, where: check_prompt_length(length, limit=window, where=where),
        )
        assert not isinstance(args.chat_template_kwargs, str)
        codec = PromptCodec(checked.tokenizer, args.chat_template_kwargs)
        self.rollout = Rollout(
            codec,
            generator,
            checked.rewards,
            self.collectives,
            settings.rollout_settings(args, policies.pad_token_id(checked.tokenizer), self.eos_token_ids),
            self._log.clock,
        )
        probe = replace(self._objective, temperature=1.0, compiled=False)  # one short pass, not worth compiling for
        self.weight_sync = WeightSync(
            self.engine,
            policy,
            self.collectives,
            lambda batch: probe.logprobs(policy, batch),
            vocab_size=min(len(checked.tokenizer), policy.get_input_embeddings().weight.shape[0]),
            gap_limit=settings.logprob_gap_limit(args, dtype),
        )
        clock, seed = self._log.clock, self._rollout_seed
        self.schedule: Schedule = Synchronous(self.rollout, self.weight_sync, clock, seed)
        if args.overlap == "one_step":
            self.schedule = OneStepAhead(self.rollout, self.weight_sync, clock, seed, self._rows_of, args.max_staleness)

    def _rollout_seed(self, number: int) -> int | None:
        """Of generation batch ``number``, when completions shall not depend on the number of engines."""
        return engines.engine_seed(self.args.seed, -1, number) if self.args.vllm_per_request_seeds else None

    # Data

    def get_train_dataloader(self) -> DataLoader[Row]:
        """Yields this rank's rows of one generation batch, as often as the batch is used."""
        assert isinstance(self.train_dataset, datasets.Dataset)
        loader, self._train_sampler = loaders.train_loader(self.args, self.train_dataset)
        self._feed = loaders.batch_feed(self.args, self.train_dataset, self.collectives)
        prepared: DataLoader[Row] = self.accelerator.prepare(loader)
        return prepared

    def _rows_of(self, number: int) -> Sequence[Row] | None:
        """This rank's rows of a generation batch to come, or None past the end of the run."""
        args = self.args
        first_micro_step = number * args.micro_batches_per_rollout
        if first_micro_step >= self._micro_steps_in_run():
            return None
        return self._feed.batch(number)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Row]:
        """Yields this rank's share of the evaluation rows, each (prompt, copy) on exactly one rank."""
        rows: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(rows, str):
            rows = self.eval_dataset[rows]  # type: ignore[index]
        with self.collectives.failing_together("checking the evaluation set"):
            preflight.check_dataset("eval_dataset", rows)
        return loaders.eval_loader(self.args, rows, self.collectives)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Row]:
        """The same for ``predict``."""
        return self.get_eval_dataloader(test_dataset)

    # Training

    def _prepare_inputs(self, inputs: Any) -> Any:
        """The micro-batch to train on now; generates when the last generation batch is used up."""
        args = self.args
        assert args.steps_per_generation is not None
        if self._micro_step % args.micro_batches_per_rollout == 0 or not self._buffer:
            self._buffer = self._roll_out(inputs)
        position = self._micro_step % args.steps_per_generation
        self._micro_step += 1
        self._micro_steps_since_update += 1
        return position, self._buffer[position].to(args.device)

    def _roll_out(self, rows: list[Row]) -> list[RolloutBatch]:
        args = self.args
        assert args.steps_per_generation is not None
        number = self._micro_step // args.micro_batches_per_rollout
        answered = self.schedule.next(number, rows, self.state.global_step)
        scored, batch = self.rollout.score(answered, self._log.metrics, trainer_state=self.state)
        self._log.note_staleness(answered, self.state.global_step)
        self._note_rollout(scored, batch, answered.stats)
        slices = batch.rows(self._order_of_rows(batch.num_rows)).split(args.steps_per_generation)
        return [self._with_fixed_logprobs(part, number) for number, part in enumerate(slices)]

    def _order_of_rows(self, num_rows: int) -> list[int]:
        """Shuffled where several optimizer steps share the rows; one step sees them all, groups stay together."""
        if self.args.micro_batches_per_rollout <= self.args.gradient_accumulation_steps:
            return list(range(num_rows))
        order: list[int] = torch.randperm(num_rows).tolist()
        return order

    def _with_fixed_logprobs(self, batch: RolloutBatch, position: int) -> RolloutBatch:
        """Adds the log-probabilities that do not change while the generation batch is used.

        Old ones are computed only for micro-batches whose first turn comes after the policy has moved: before that the
        live ones are the same numbers, and are kept by :meth:`compute_loss` for later turns.
        """
        args = self.args
        assert args.steps_per_generation is not None
        turn = (position - self._micro_step) % args.steps_per_generation  # micro-steps from now; a resume starts midway
        old = ref = None
        if args.old_logprobs == "sampling":
            old = batch.sampling_logprobs
        elif turn >= args.gradient_accumulation_steps - self._micro_steps_since_update:
            old = self._objective.logprobs(self.accelerator.unwrap_model(self.model), batch).cpu()
        if self.ref_model is not None:
            ref = self._objective.logprobs(self.ref_model, batch).cpu()
        return batch.with_logprobs(old_logprobs=old, ref_logprobs=ref)

    def _note_rollout(self, scored: Scored, batch: RolloutBatch, stats: Sequence[EngineStats]) -> None:
        args = self.args
        assert args.steps_per_generation is not None
        counts = torch.stack([batch.attention_mask.sum(), batch.loss_mask.sum()])
        tokens, loss_tokens = self.collectives.sum(counts).tolist()
        self.state.num_input_tokens_seen += tokens
        self._log.metrics.latest("num_tokens", self.state.num_input_tokens_seen)
        self._tokens_per_slice = loss_tokens / self.collectives.world_size / args.steps_per_generation
        self._log.note_engines(stats)
        self._log.note_completions(scored, self.rollout.codec)

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """The loss of one slice of the rollout (Trainer divides it by the accumulation steps).

        The backward passes of all but its last micro-batch have been run by then.

        Raises:
            ValueError: when outputs are asked for; there are none.
        """
        if return_outputs:
            raise ValueError("GRPOTrainer.compute_loss has no outputs to return; call it with return_outputs=False.")
        position, batch = inputs
        policy = self.accelerator.unwrap_model(model)

        @contextlib.contextmanager
        def early() -> Iterator[Callable[[torch.Tensor], None]]:
            with self.accelerator.no_sync(model):
                yield lambda part: self.accelerator.backward(part / self.current_gradient_accumulation_steps)

        loss, logprobs = self._objective.loss(model, policy, batch, self._tokens_per_slice, self._log.metrics, early)
        if batch.old_logprobs is None and self.args.num_iterations > 1:
            self._buffer[position] = self._buffer[position].with_logprobs(old_logprobs=logprobs.cpu())
        return loss

    # Evaluation

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Generates for every row through the engines, a generation batch at a time, and scores the completions."""
        policy = self.accelerator.unwrap_model(self.model)
        policy.eval()
        metrics = MetricBuffer()
        self.schedule.pause()
        self.weight_sync.sync(self.state.global_step)
        num_rows = 0
        for number, rows in enumerate(dataloader):
            seed = engines.engine_seed(self.args.seed, -2 - number, 0) if self.args.vllm_per_request_seeds else None
            _, batch, _ = self.rollout.collect(rows, metrics, trainer_state=self.state, seed=seed)
            self._evaluate_loss(policy, batch, metrics)
            num_rows += len(rows)
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        values = {f"{metric_key_prefix}_{name}": value for name, value in metrics.flush(self.collectives).items()}
        total = int(self.collectives.sum(torch.tensor([num_rows])).item())
        self._evaluated = True  # the next log is this evaluation's, whatever its prefix
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=values, num_samples=total)  # type: ignore[arg-type]

    def _evaluate_loss(self, policy: nn.Module, batch: RolloutBatch, metrics: MetricBuffer) -> None:
        size = self.args.per_device_eval_batch_size
        for start in range(0, batch.num_rows, size):
            part = batch.rows(range(start, min(start + size, batch.num_rows)))
            if self.ref_model is not None:
                part = part.with_logprobs(ref_logprobs=self._objective.logprobs(self.ref_model, part).cpu())
            part = part.to(self.args.device)
            with torch.no_grad():
                loss, _ = self._objective.loss(policy, policy, part, float(part.loss_mask.sum()), metrics)
            rows = torch.tensor(float(part.num_rows))
            metrics.share("loss", loss.detach().cpu() * rows, rows)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """As in ``Trainer``; unlike an evaluation it logs nothing."""
        try:
            return super().predict(*args, **kwargs)
        finally:
            self._evaluated = False

    # Logs and checkpoints

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the figures since the last log; also appends them to ``metrics.jsonl`` in the output folder.

        Figures are joined over ranks only in the trainer's own logs, which all ranks reach together: a user may log on
        one rank alone.
        """
        is_eval, self._evaluated = self._evaluated, False
        own = self._logs_together and not logs.keys().isdisjoint(("learning_rate", "train_runtime"))
        if not is_eval and not own:  # a user's, perhaps from a callback of the trainer's own log, save or evaluation
            super().log(logs, start_time)
            return
        if not is_eval:
            logs = {**logs, **self._log.metrics.flush(self.collectives)}  # type: ignore[dict-item]
        super().log(logs, start_time)
        with self.collectives.failing_together("writing the log"):
            if self.is_world_process_zero():
                rows = self._log.write(self.state.global_step, logs, with_completions=not is_eval)
                trackers.send_completions(self.callback_handler.callbacks, rows, self.state.global_step)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        with self._logging_together():
            super()._maybe_log_save_evaluate(*args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        with self._logging_together():
            return super()._finalize_training(*args, **kwargs)

    @contextlib.contextmanager
    def _logging_together(self) -> Iterator[None]:
        self._logs_together = True
        try:
            yield
        finally:
            self._logs_together = False

    def begin_step(self) -> None:
        """Starts the clock of an optimizer step."""
        self._log.clock.restart()

    def end_step(self) -> None:
        """Logs the step that has just ended."""
        self._log.note_step()
        self._micro_steps_since_update = 0

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_checkpoint(*args, **kwargs)
        self.weight_sync.invalidate()

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self.weight_sync.invalidate()

    def resume_at(self, global_step: int) -> None:
        """Puts the counters where an unbroken run would have them after ``global_step`` optimizer steps.

        A generation batch that was in use is generated again, by the resumed weights, and its remaining micro-batches
        are trained, so that each prompt is trained as often as in an unbroken run.
        """
        args = self.args
        epoch, step = divmod(global_step, self._steps_per_epoch())
        self._micro_step = epoch * self._micro_steps_per_epoch() + step * args.gradient_accumulation_steps
        self._buffer = []
        self._micro_steps_since_update = 0
        self.schedule.forget()
        self.weight_sync.invalidate()
        with self.collectives.failing_together("seeding the engines"):
            shard = self.placement.shard_of(self.collectives.rank)
            if self.engine is not None and shard is not None and global_step > 0:
                self.engine.reseed(engines.engine_seed(args.seed, shard.engine, global_step))

    def _micro_steps_per_epoch(self) -> int:
        return self._feed.batches_per_epoch * self.args.micro_batches_per_rollout

    def _steps_per_epoch(self) -> int:
        return -(-self._micro_steps_per_epoch() // self.args.gradient_accumulation_steps)

    def _micro_steps_in_run(self) -> int:
        """Micro-batches up to ``state.max_steps``; an epoch's last step may have fewer than the others."""
        epochs, steps = divmod(self.state.max_steps, self._steps_per_epoch())
        return epochs * self._micro_steps_per_epoch() + steps * self.args.gradient_accumulation_steps

    def set_epoch(self, epoch: int) -> None:
        """Gives each epoch its own order of prompts, the same one after a resume."""
        self._train_sampler.set_epoch(epoch)

    def close(self) -> None:
        """Frees the engine of this rank; the trained model stays usable."""
        if self.engine is not None:
            self.engine.close()


class _StepHooks(TrainerCallback):
    """Tells the trainer where its steps begin and end."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Puts the trainer where a resumed run stands within its generation batch and its random streams."""
        self._trainer.resume_at(state.global_step)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Gives each epoch its own order of prompts, also after a resume."""
        self._trainer.set_epoch(int(state.epoch or 0))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Starts the step's clock."""
        self._trainer.begin_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stops it."""
        self._trainer.end_step()


def _refuse(**arguments: Any) -> None:
    """Refuses constructor arguments of TRL's trainer that do not exist here yet, by name."""
    given = [name for name, value in arguments.items() if value is not None]
    if given:
        raise ConfigError(f"GRPOTrainer does not support {', '.join(given)} yet. Remove the argument.")


def _load_models(model: str | PreTrainedModel, args: GRPOConfig) -> tuple[PreTrainedModel, PreTrainedModel | None]:
    """The policy, and the reference when the KL term is on."""
    assert not isinstance(args.model_init_kwargs, str)
    init_kwargs = args.model_init_kwargs or {}
    trust = args.trust_remote_code
    name = model if isinstance(model, str) else None
    policy = model if not isinstance(model, str) else policies.load_policy(model, init_kwargs, trust_remote_code=trust)
    reference = None
    if args.beta != 0.0:
        reference = policies.make_reference(policy, name, init_kwargs, trust_remote_code=trust)
    for loaded in (policy, reference):
        if args.disable_dropout and loaded is not None:
            policies.disable_dropout(loaded)
    if policies.has_dropout(policy):
        logger.warning(
            "The policy has dropout, which stays on while it trains: its log-probabilities then differ from the "
            "engine's. Set disable_dropout=True to train without."
        )
    return policy, reference


def _synchronizer(device: torch.device) -> Callable[[], None]:
    return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)
