"""GRPO with K vLLM engines inside the training processes, from one ``accelerate launch``."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["GRPOConfig", "GRPOTrainer", "__version__"]

if TYPE_CHECKING:
    from colocate_rl.config import GRPOConfig
    from colocate_rl.trainer import GRPOTrainer


def __getattr__(name: str) -> Any:
    """Imports the heavy half on first use, so that the command line's help needs none of it."""
    if name == "GRPOConfig":
        from colocate_rl.config import GRPOConfig

        return GRPOConfig
    if name == "GRPOTrainer":
        from colocate_rl.trainer import GRPOTrainer

        return GRPOTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
