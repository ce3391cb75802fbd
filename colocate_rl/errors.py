"""The errors that users see, one family, each also a standard error so that ordinary ``except`` clauses work."""


class ColocateError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(ColocateError, ValueError):
    """A setting, or a combination of settings, that cannot work."""


class PlacementError(ConfigError):
    """Ranks, engines and devices that do not fit together."""


class DataError(ColocateError, ValueError):
    """A data set, column or prompt that cannot be used."""


class RewardError(ColocateError, ValueError):
    """A reward function that returned something unusable."""


class RolloutError(ColocateError, ValueError):
    """A rollout function that returned something unusable."""


class EngineError(ColocateError, RuntimeError):
    """An inference engine that could not be built or did not answer as asked."""


class NeedsOwnProcessError(EngineError):
    """An engine that would change classes which the policy in the same process is made of."""


class WeightSyncError(EngineError):
    """Weights that the engine did not take over completely and exactly."""


class PeerError(ColocateError, RuntimeError):
    """Raised on the healthy ranks when another rank failed; that rank shows the traceback."""


def mark_only_here(error: BaseException) -> None:
    """Notes that the ranks have agreed to let only this one raise ``error``; the others stay silent."""
    setattr(error, "_only_here", True)  # noqa: B010  # any error may be marked, and none declares this


def is_only_here(error: BaseException) -> bool:
    """Whether :func:`mark_only_here` has been called."""
    return bool(getattr(error, "_only_here", False))
