"""From a run's models to what generates for it: this rank's engine, the ways to it, and what comes back."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch

from colocate_rl import engines, multiturn, senders, settings
from colocate_rl.collectives import Collectives
from colocate_rl.config import GRPOConfig
from colocate_rl.engine.protocol import Engine
from colocate_rl.metrics import PhaseClock
from colocate_rl.options import dictionary
from colocate_rl.preflight import Checked
from colocate_rl.rollout.collect import Rollout
from colocate_rl.rollout.custom import FreeGenerator
from colocate_rl.rollout.generate import Generator
from colocate_rl.rollout.prompts import PromptCodec, check_prompt_length
from colocate_rl.rollout.stages import Row
from colocate_rl.schedule import OneStepAhead, Schedule, Streamed, Synchronous
from colocate_rl.seeding import SamplingStreams
from colocate_rl.senders import Sender
from colocate_rl.startup import Loaded
from colocate_rl.sync import WeightSync
from colocate_rl.training import adapters, compiling
from colocate_rl.training import policy as policies
from colocate_rl.training.objective import Objective


@dataclass(frozen=True, slots=True)
class Wired:
    """What generates for a rank, joined together."""

    engine: Engine | None
    """Of this rank, or None where it hosts none."""
    generator: Generator
    """Reaches all engines."""
    free_generator: FreeGenerator
    """Answers what a user asks."""
    rollout: Rollout
    weight_sync: WeightSync
    streams: SamplingStreams


@dataclass(frozen=True, slots=True)
class Wiring:
    """What there is before anything can generate; every rank joins it alike."""

    args: GRPOConfig
    collectives: Collectives
    checked: Checked
    loaded: Loaded
    objective: Objective
    """Computes log-probabilities of the policy."""
    clock: PhaseClock
    """Of the phases of a step."""
    autocast: Callable[[], AbstractContextManager[Any]]
    """Makes the mixed-precision context of a forward pass."""

    def join(self, trainer: Any) -> Wired:
        """Builds the engines and what leads to them and back.

        Args:
            trainer: handed to a user's ``rollout_func``; nothing here looks into it.
        """
        args, loaded, collectives, placement = self.args, self.loaded, self.collectives, self.checked.placement
        engine, sender = self._engine()
        window = self._window
        generator = Generator(
            placement,
            engine,
            collectives,
            lambda length, where: check_prompt_length(length, limit=window, where=where),
            engines.shared_capacity(args, placement),
        )
        longer = self.checked.longer
        codec = PromptCodec(self.checked.tokenizer, dictionary(args.chat_template_kwargs), longer.schemas)
        chosen = settings.rollout_settings(args, loaded.pad_token_id, loaded.end_token_ids)
        free = FreeGenerator(codec, generator, collectives, chosen.sampling)
        joint = multiturn.Joint(codec, generator, collectives, chosen.sampling, loaded.end_token_ids, window)
        vocab_size = policies.vocab_size(loaded.policy.config)
        rollout = Rollout(
            codec,
            generator,
            self.checked.rewards,
            collectives,
            chosen,
            self.clock,
            further=joint.tool_loop(longer, args),
            replacement=joint.replacement(longer, trainer, free, vocab_size),
        )
        streams = SamplingStreams(engine, placement, collectives, args.seed, args.vllm_per_request_seeds)
        return Wired(engine, generator, free, rollout, self._weight_sync(engine, sender), streams)

    @property
    def _dtype(self) -> torch.dtype:
        return policies.model_dtype(self.loaded.policy)

    @property
    def _window(self) -> int | None:
        return policies.context_window(self.loaded.policy.config, self.args.vllm_max_model_length)

    def _engine(self) -> tuple[Engine | None, Sender | None]:
        """This rank's engine, and how weights reach it; None: it is the policy, or takes all of them each time."""
        args, policy, placement = self.args, self.loaded.policy, self.checked.placement
        if not args.use_vllm:
            model = adapters.causal_lm(policy)
            rank = self.collectives.rank
            return engines.policy_engine(args, placement, rank, model, self._generating, self._window), None
        number_type = engines.engine_dtype(args, self._dtype)
        with self.collectives.failing_together("choosing how weights reach the engines"):
            slot = senders.lora_slot(args, policy, number_type)
        facts = engines.PolicyFacts(
            policy.config, self._dtype, self._window, self.loaded.longest_prompt, self.checked.tokenizer, slot
        )
        engine = engines.build_engine(args, placement, self.collectives, facts)
        return engine, senders.sender_of(policy, number_type, slot)

    @contextlib.contextmanager
    def _generating(self) -> Iterator[None]:
        """How the policy runs where it generates itself: a token at a time, which layers are not compiled for."""
        with compiling.chosen(False), self.autocast():
            yield

    def _weight_sync(self, engine: Engine | None, sender: Sender | None) -> WeightSync:
        policy: Any = self.loaded.policy
        probe = replace(self.objective, temperature=1.0, compiled=False)  # one short pass, not worth compiling for
        return WeightSync(
            engine,
            policy,
            self.collectives,
            lambda batch: probe.logprobs(policy, batch),
            vocab_size=min(len(self.checked.tokenizer), policy.get_input_embeddings().weight.shape[0]),
            gap_limit=settings.logprob_gap_limit(self.args, self._dtype),
            sender=sender,
        )


def choose_schedule(
    args: GRPOConfig, wired: Wired, clock: PhaseClock, rows_of: Callable[[int], Sequence[Row] | None]
) -> Schedule:
    """When engines generate, as ``overlap`` says.

    Args:
        args: the run's configuration.
        wired: what generates.
        clock: charges the phase "sync".
        rows_of: this rank's rows of any generation batch, or None past the last one that the run trains.
    """
    parts = (wired.rollout, wired.weight_sync, clock, wired.streams.begin_batch)
    if args.overlap == "stream":
        return Streamed(*parts)
    if args.overlap == "one_step":
        return OneStepAhead(*parts, rows_of, args.max_staleness)
    return Synchronous(*parts)
