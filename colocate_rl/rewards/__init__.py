"""Ready reward functions under TRL's names: plain callables that can be pickled, and light to import.

On the command line their bare names are enough: ``--reward-funcs accuracy_reward think_format_reward``.
"""

from colocate_rl.rewards.accuracy import accuracy_reward, get_cosine_scaled_reward, reasoning_accuracy_reward
from colocate_rl.rewards.shape import get_repetition_penalty_reward, get_soft_overlong_punishment, think_format_reward

__all__ = [
    "accuracy_reward",
    "get_cosine_scaled_reward",
    "get_repetition_penalty_reward",
    "get_soft_overlong_punishment",
    "reasoning_accuracy_reward",
    "think_format_reward",
]
