"""`GRPOTrainer`: the order of things. What each thing does lives in the rooms below."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import torch
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, EvalLoopOutput

from colocate_rl import lifeline, loaders, preflight, progress, resume, settings, speedups, startup, trackers, trl_only
from colocate_rl.collectives import Collectives
from colocate_rl.config import GRPOConfig
from colocate_rl.evaluation import Evaluator
from colocate_rl.hooks import SteadyHeap, StepHooks
from colocate_rl.metrics import PhaseClock
from colocate_rl.occasions import Occasion, Occasions
from colocate_rl.rollout.rewards import Reward
from colocate_rl.rollout.stages import Row
from colocate_rl.runlog import RunLog
from colocate_rl.runreport import RunReport
from colocate_rl.slices import Slices
from colocate_rl.training.fixed import FixedLogprobs
from colocate_rl.training.passes import Runner
from colocate_rl.wiring import Wiring, choose_schedule


class GRPOTrainer(Trainer):
    """Trains a language model with GRPO; K in-process vLLM engines generate the completions.

    Constructor order and names are TRL's. Every rank of the launch must construct it.

    Args:
        model: folder or hub name of a causal language model (loaded in float32 unless ``model_init_kwargs`` says
            otherwise), or the model itself.
        reward_funcs: one source of rewards or several. Functions and coroutine functions are called with keywords
            ``prompts``, ``completions``, ``completion_ids``, every further column, ``trainer_state``, ``log_extra``,
            ``log_metric``; each returns one float or None per completion. Reward models (sequence classifiers with one
            label), or their folder or hub name, read prompt and completion.
        args: the configuration; None: ``GRPOConfig("<model name>-GRPO")``.
        train_dataset: with a ``prompt`` column of strings or of message lists; a streaming one needs ``max_steps``.
        eval_dataset: the same, or several by name.
        processing_class: the tokenizer; None: the model's own.
        reward_processing_classes: tokenizers of the reward models, one entry per source (None for functions); None:
            their own.
        callbacks: as in ``Trainer``.
        optimizers: as in ``Trainer``.
        quantization_config: a ``BitsAndBytesConfig`` for the base weights under an adapter (GPU, model by name).
        peft_config: a ``LoraConfig``: an adapter is trained, the base weights stay as they are. A ``PeftModel`` as
            ``model`` goes on training its active adapter.
        tools: functions, sync or async, with type hints and Google docstrings, which completions may call; each goes on
            behind what its tools answered, up to ``max_completion_length`` in all. Prompts must be conversational.
        rollout_func: called as ``rollout_func(prompts, trainer)`` in place of the engines, with this rank's prompts
            (one per completion; in an evaluation, or with ``dynamic_sampling``, perhaps none); returns a dictionary of
            lists with one entry each: ``prompt_ids``, ``completion_ids``, ``logprobs``, optionally ``env_mask`` (0: not
            sampled, not learned from); any further entry becomes an argument of the reward functions. :meth:`generate`
            reaches the engines from inside it.
        environment_factory: not supported; see ``tools`` and ``rollout_func``.

    Raises:
        ColocateError: for anything that cannot work, before a model is loaded.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """A subclass written for TRL would train without what it overrides, and nobody would notice."""
        super().__init_subclass__(**kwargs)
        trl_only.check_overrides(cls, GRPOTrainer)

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        reward_funcs: Reward | list[Reward] | None = None,
        args: GRPOConfig | None = None,
        train_dataset: datasets.Dataset | datasets.IterableDataset | None = None,
        eval_dataset: preflight.EvalSets | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        reward_processing_classes: preflight.RewardTokenizers = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Any = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
    ) -> None:
        model = str(model) if isinstance(model, Path) else model
        name = model if isinstance(model, str) else model.config._name_or_path
        args = args if args is not None else GRPOConfig(f"{Path(name).resolve().name}-GRPO")
        self.collectives = Collectives(args.device)
        given = preflight.Given(
            model=model,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            reward_funcs=reward_funcs,
            reward_processing_classes=reward_processing_classes,
            tokenizer=processing_class,
            peft_config=peft_config,
            quantization_config=quantization_config,
            tools=tools,
            rollout_func=rollout_func,
            environment_factory=environment_factory,
        )
        lifeline.follow_launcher()
        with self.collectives.failing_together("checking the run"):
            checked = preflight.check_run(args, self.collectives, given)
        loaded = startup.load(args, self.collectives, given, checked)
        rewards = checked.rewards
        self.reward_funcs, self.reward_func_names = rewards.functions, rewards.names
        self.reward_weights, self.reward_processing_classes = rewards.weights, rewards.processing_classes
        self.tools, self.rollout_func = list(tools or []), rollout_func
        self.placement, self.ref_model, self.eos_token_ids = checked.placement, loaded.reference, loaded.end_token_ids
        self._heap = SteadyHeap()
        super().__init__(
            model=loaded.policy,
            args=args,
            data_collator=loaders.as_list,  # type: ignore[arg-type]  # rows stay rows until they are a rollout
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=checked.tokenizer,
            callbacks=[StepHooks(self), self._heap, RunReport(checked.placement), *(callbacks or [])],
            optimizers=optimizers,
        )
        self.args: GRPOConfig
        self.model_accepts_loss_kwargs = False  # compute_loss leaves the division by accumulation steps to Trainer
        if self.ref_model is not None:
            nn.Module.to(self.ref_model, args.device)
        set_seed(args.seed, device_specific=True)
        clock = PhaseClock.of(args.device)
        clock.announce = progress.replace_bar(self, self.is_world_process_zero())
        self._log = RunLog(args, self.collectives, clock, self.placement.num_engines, rewards.names)
        self._prepare_objective(loaded.policy)
        with clock.phase(progress.BUILDING):
            self._prepare_generation(checked, loaded)
        self._occasions = Occasions()
        self._resumed_from: Path | None = None

    def _prepare_objective(self, policy: PreTrainedModel) -> None:
        args, autocast = self.args, self.accelerator.autocast
        with_padding = settings.objective(args, policy.config, autocast, self.collectives)
        self._objective = speedups.decide(args, policy, self.ref_model, with_padding, self.collectives)
        self._fixed = FixedLogprobs(self._objective, policy, self.ref_model, args.beta != 0.0, args.old_logprobs_source)
        self._moving = settings.moving_parts(args, self.collectives, self._objective, self.ref_model)

    def _prepare_generation(self, checked: preflight.Checked, loaded: startup.Loaded) -> None:
        args, clock, autocast = self.args, self._log.clock, self.accelerator.autocast
        wiring = Wiring(args, self.collectives, checked, loaded, self._objective, clock, autocast)
        self._wired = wired = wiring.join(trainer=self)
        self.engine, self.rollout, self.weight_sync = wired.engine, wired.rollout, wired.weight_sync
        self.schedule = choose_schedule(args, wired, clock, self._rows_of)
        self._slices = Slices(args, wired, self.schedule, self._objective, self._fixed, self.collectives, self._log)
        sampling = (wired.streams.evaluation_seed, wired.generator.other_prompts)
        self._evaluator = Evaluator(args, wired.rollout, self._objective, self._fixed, self.collectives, *sampling)

    # Data

    def get_train_dataloader(self) -> DataLoader[Row]:
        """Yields this rank's rows of one generation batch, as often as the batch is used."""
        assert isinstance(self.train_dataset, datasets.Dataset | datasets.IterableDataset)
        self._rows = loaders.TrainingRows(self.args, self.train_dataset, self.collectives)
        if self._rows.is_stream:
            return self._rows.loader
        prepared: DataLoader[Row] = self.accelerator.prepare(self._rows.loader)
        return prepared

    def _rows_of(self, number: int) -> Sequence[Row] | None:
        """This rank's rows of a generation batch to come, or None past the end of the run."""
        return self._rows.of(number, self.state.max_steps)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Row]:
        """Yields this rank's share of the evaluation rows, each (prompt, copy) on exactly one rank."""
        rows: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(rows, str):
            rows = self.eval_dataset[rows]  # type: ignore[index]
        with self.collectives.failing_together("checking the evaluation set"):
            preflight.check_dataset(self.args, "eval_dataset", rows, self.rollout.rewards, self.rollout_func)
        return loaders.eval_loader(self.args, rows, self.collectives)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Row]:
        """The same for ``predict``."""
        return self.get_eval_dataloader(test_dataset)

    # Training

    def _prepare_inputs(self, inputs: Any) -> Any:
        """The slice to train on now, with its number; generates when the last generation batch is used up."""
        return self._slices.next(inputs, self._rows.spares, self.state)

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
        number, batch = inputs
        runner = Runner(
            model,
            self.accelerator.unwrap_model(model),
            self.args.device,
            lambda loss: self.accelerator.backward(loss / self.current_gradient_accumulation_steps),
            lambda: self.accelerator.no_sync(model),
        )
        return self._slices.loss(runner, number, batch, self.state)

    # Generation outside the trainer's own rollouts

    def generate(self, prompts: Sequence[Any], num_generations: int = 1, **sampling: Any) -> dict[str, list[Any]]:
        """Completions of any prompts by the engines, for a ``rollout_func`` or a callback.

        All engines answer all ranks' prompts in one call, so **every rank must call it equally often** and with the
        same sampling settings, also a rank that has nothing to ask: it passes an empty list. Ranks that call it
        unevenly are told so. In a loop whose length differs between prompts, go on until no rank has any left
        (``trainer.collectives.max``).

        Args:
            prompts: this rank's: texts, lists of messages, or lists of token ids (to go on behind what has been
                sampled, without tokenising it again).
            num_generations: completions of each prompt, which stand side by side in the result.
            sampling: fields of :class:`colocate_rl.engine.protocol.SamplingSpec` to override, such as ``max_tokens``.

        Returns:
            What a ``rollout_func`` may return: ``prompt_ids``, ``completion_ids`` and ``logprobs``, each with one list
            per completion.
        """
        return self._wired.free_generator(prompts, num_generations, sampling, self._update_engines)

    def _update_engines(self) -> None:
        """Leaves the engines free for something else, with the policy's weights."""
        self.schedule.pause()
        self.weight_sync.sync(self.state.global_step)

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
        self._update_engines()
        self._wired.streams.begin_evaluation()

        def after_batch() -> None:
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)

        figures, total = self._evaluator.run(policy, dataloader, self.state, after_batch)
        values = {f"{metric_key_prefix}_{name}": value for name, value in figures.items()}
        self._occasions.evaluated()
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=values, num_samples=total)  # type: ignore[arg-type]

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """As in ``Trainer``; unlike an evaluation it logs nothing."""
        with self._occasions.only_predicting():
            return super().predict(*args, **kwargs)

    # Logs and checkpoints

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the figures since the last log; also appends them to ``metrics.jsonl`` in the output folder.

        Figures are joined over ranks only in the trainer's own logs, which all ranks reach together: a user may log on
        one rank alone.
        """
        occasion = self._occasions.of(logs)
        if occasion is Occasion.STEPS:
            logs = {**logs, **self._log.flush()}  # type: ignore[dict-item]
        still_to_log = self.control.should_log and occasion is not Occasion.STEPS
        super().log(logs, start_time)
        self.control.should_log |= still_to_log  # else this rank alone would leave out the log of the step
        if occasion is Occasion.USER:
            return
        with self.collectives.failing_together("writing the log"):
            if self.is_world_process_zero():
                rows = self._log.write(self.state.global_step, logs, with_completions=occasion is Occasion.STEPS)
                trackers.send_completions(self.callback_handler.callbacks, rows, self.state.global_step)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        with self._occasions.all_ranks():
            super()._maybe_log_save_evaluate(*args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        with self._occasions.all_ranks():
            return super()._finalize_training(*args, **kwargs)

    def begin_step(self) -> None:
        """Starts the clock of an optimizer step."""
        self._log.clock.restart()

    def end_step(self) -> None:
        """Logs the step that has just ended."""
        self._log.note_step()
        self._slices.end_step()
        self._moving.end_step(self.accelerator.unwrap_model(self.model), self.state.global_step, self._log.metrics)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        folder = Path(self._get_output_dir(trial=None)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        with self.collectives.failing_together("saving the objective"):
            if self.args.should_save:
                self._moving.save(folder)
        if not self.args.save_only_model:
            resume.save(folder, self._slices.hold(), self.args, self.collectives)
        super()._save_checkpoint(*args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)
        self._moving.load(Path(resume_from_checkpoint))
        self._resumed_from = Path(resume_from_checkpoint)
        self.weight_sync.invalidate()

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self.weight_sync.invalidate()

    def resume_at(self, global_step: int) -> None:
        """Puts everything where an unbroken run would have it after ``global_step`` optimizer steps.

        Without what :mod:`colocate_rl.resume` saves a generation batch in use is generated again, by the resumed
        weights, and its remaining micro-batches are trained: each prompt is trained as often as in an unbroken run.
        """
        micro_step = self._rows.micro_steps_at(global_step)
        self._slices.resume_at(micro_step)
        self._moving.forget()
        self._log.begin(global_step)
        self.weight_sync.invalidate()
        folder, self._resumed_from = self._resumed_from, None
        if folder is None:
            return
        state = resume.load(folder, micro_step, self.args, self.collectives, self._rows_of)
        self._log.note_tokens(self.state.num_input_tokens_seen)
        if state is not None:
            self._slices.take(state)

    def set_epoch(self, epoch: int) -> None:
        """Gives each epoch its own order of prompts, the same one after a resume; a stream does so itself."""
        self._rows.set_epoch(epoch)

    def close(self) -> None:
        """Frees the engine and the reward workers of this rank; the trained model stays usable."""
        self._heap.thaw()  # an interrupted run has not
        self.rollout.rewards.close()
        if self.engine is not None:
            self.engine.close()
