"""Where a run stands within its generation batches: counting, and nothing else."""

from dataclasses import dataclass


@dataclass(slots=True)
class Positions:
    """Counts micro-steps: a generation batch is cut into slices, and each slice is trained ``num_iterations`` times."""

    num_slices: int
    """Slices of a generation batch on each rank (``steps_per_generation``)."""
    micro_steps_per_batch: int
    """How often a slice of one generation batch is trained, slices times iterations."""
    accumulation_steps: int
    """Micro-steps of an optimizer step; an epoch's last one may have fewer."""
    micro_step: int = 0
    """Micro-steps that have begun since the start of the run."""
    since_update: int = 0
    """Those of them since the last optimizer step."""

    @property
    def batch(self) -> int:
        """Number of the generation batch that the next micro-step trains."""
        return self.micro_step // self.micro_steps_per_batch

    @property
    def batch_under_way(self) -> int:
        """Number of the one that the last micro-step to begin trains."""
        return (self.micro_step - 1) // self.micro_steps_per_batch

    @property
    def slice(self) -> int:
        """Number of the slice that it trains."""
        return self.micro_step % self.num_slices

    @property
    def opens_batch(self) -> bool:
        """Whether it is the first one of its generation batch."""
        return self.micro_step % self.micro_steps_per_batch == 0

    @property
    def is_first_iteration(self) -> bool:
        """Whether its slice has not been trained yet."""
        return self.micro_step % self.micro_steps_per_batch < self.num_slices

    @property
    def several_updates(self) -> bool:
        """Whether several optimizer steps share the rows of a generation batch."""
        return self.micro_steps_per_batch > self.accumulation_steps

    def moves_before(self, number: int) -> bool:
        """Whether the policy moves before slice ``number`` has its next turn, counted from the next micro-step."""
        ahead = (number - self.micro_step) % self.num_slices  # a resumed run starts midway
        return ahead >= self.accumulation_steps - self.since_update

    def advance(self) -> None:
        """A micro-step begins."""
        self.micro_step += 1
        self.since_update += 1

    def end_step(self) -> None:
        """An optimizer step has ended."""
        self.since_update = 0

    def resume_at(self, micro_step: int) -> None:
        """A run begins, or goes on, after so many micro-steps and with an optimizer step's first one."""
        self.micro_step = micro_step
        self.since_update = 0
