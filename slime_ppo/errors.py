"""Error types. Each message says what failed, what was found, what was expected, what to do, and where it came from."""


class SlimePpoError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(SlimePpoError):
    """A flag, key or combination of both that cannot run; found before any device is used (exit code 2)."""


class DataError(SlimePpoError):
    """A prompt file, row or tokenizer that cannot be used."""


class CheckpointError(SlimePpoError):
    """A model or checkpoint folder that is missing, incomplete or of another shape."""


class ConversionError(SlimePpoError):
    """A tensor name or shape that the conversion table of the model family does not account for."""


class RewardError(SlimePpoError):
    """A reward function that raised, timed out, or returned something that is not one finite number per sample."""


class RolloutError(SlimePpoError):
    """The engine broke its contract: wrong length, missing log-probs or support, sleeping weights."""


class WeightSyncError(SlimePpoError):
    """A weight push that is incomplete, of wrong shape, or did not reach the engine."""


class ParallelError(SlimePpoError):
    """Ranks, groups or placement that do not fit together, or a rank that died."""


class EchoedError(ParallelError):
    """Another rank found something wrong and says what; this one stops with it instead of waiting in a collective."""


class NumericsError(SlimePpoError):
    """A number that must be finite is not, or a run of skipped steps passed its limit."""
