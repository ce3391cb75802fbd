"""Keeps every engine on the policy's weights, and proves once per run that it really is."""

import logging
from collections.abc import Callable

import torch

from colocate_rl.collectives import Collectives
from colocate_rl.engine.protocol import Completion, Engine, Request, SamplingSpec
from colocate_rl.errors import WeightSyncError
from colocate_rl.rollout.records import RolloutBatch
from colocate_rl.senders import Sender, WholeSender

logger = logging.getLogger(__name__)

PROBE_PROMPTS = 4
PROBE_PROMPT_TOKENS = 6
PROBE_TOKENS = 12

PolicyLogprobs = Callable[[RolloutBatch], torch.Tensor]


class WeightSync:
    """Copies the policy into the engine of this rank whenever the policy's version moved.

    Args:
        engine: the engine (or shard) this rank hosts, or None.
        policy: the unwrapped policy; every rank holds all of it.
        collectives: of the training ranks.
        policy_logprobs: log-probabilities [B, T] of a batch under the policy, at temperature 1, without gradient.
        vocab_size: ids the probe may use.
        gap_limit: largest mean |engine - policy| log-probability on the probe, in nats; 0 switches it off.
        sender: how weights reach the engine; None: all of them each time.
    """

    def __init__(
        self,
        engine: Engine | None,
        policy: torch.nn.Module,
        collectives: Collectives,
        policy_logprobs: PolicyLogprobs,
        *,
        vocab_size: int,
        gap_limit: float,
        sender: Sender | None = None,
    ) -> None:
        self._engine = engine
        self._sender = WholeSender(policy) if sender is None else sender
        self._collectives = collectives
        self._policy_logprobs = policy_logprobs
        self._vocab_size = vocab_size
        self._gap_limit = gap_limit
        self._version: int | None = None
        self._verified = gap_limit == 0

    def invalidate(self) -> None:
        """Says that the policy's weights changed without a step (a checkpoint was loaded)."""
        self._version = None
        self._sender.forget()

    def sync(self, policy_version: int) -> bool:
        """Brings the engines to ``policy_version``; every rank must call it.

        Returns:
            Whether weights were copied.

        Raises:
            WeightSyncError: when an engine did not take the weights over.
        """
        if self._version == policy_version:
            return False
        self._version = None  # unknown until the engines have taken everything over
        with self._collectives.failing_together("copying weights into the engines"):
            if self._engine is not None:
                self._sender.send(self._engine)
        if not self._verified:
            with self._collectives.failing_together("checking the engines' weights"):
                if self._engine is not None:
                    self._verify(self._engine)
            self._verified = True
        self._version = policy_version
        return True

    def _verify(self, engine: Engine) -> None:
        """Compares the engine's log-probabilities of a short sample with the policy's."""
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(self._vocab_size, (PROBE_PROMPTS, PROBE_PROMPT_TOKENS), generator=generator).tolist()
        answers = engine.generate(
            [Request(prompt, 1, seed=number) for number, prompt in enumerate(prompts)],
            SamplingSpec(max_tokens=PROBE_TOKENS),
        )
        completions: list[Completion] = [answer[0] for answer in answers]
        batch = RolloutBatch.from_rows(
            prompts,
            completions,
            torch.zeros(len(prompts)),
            keep=[True] * len(prompts),
            pad_token_id=0,
        )
        policy = self._policy_logprobs(batch).cpu()
        gaps = (policy - batch.sampling_logprobs)[batch.completion_mask].abs()
        mean, largest = float(gaps.mean()), float(gaps.max())
        if not mean <= self._gap_limit:
            raise WeightSyncError(
                f"After the first weight sync the engine's log-probabilities of {gaps.numel()} probe tokens differ "
                f"from the policy's by {mean:.4g} nats on average (largest {largest:.4g}), more than the accepted "
                f"{self._gap_limit:g}. The engine does not compute what the policy computes, so every update would be "
                "wrong. Check that the model's architecture is the same in vLLM and transformers, and that "
                "vllm_dtype fits; if the gap is only the number type's, raise vllm_logprob_gap_limit."
            )
        logger.info("engine verified: mean log-probability gap %.2e on %d probe tokens", mean, gaps.numel())
