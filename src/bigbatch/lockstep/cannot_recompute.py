"""Why a model cannot run a second time in backward, or may not."""

from bigbatch.errors import ConfigurationError, LossError

_KEEP = 'Options(activations="keep"), or "offload"'


class CannotRecompute(LossError):
    """A model whose activations were to be recomputed would give another gradient, or none."""

    @classmethod
    def because(cls, problem: str, fix: str = "") -> "CannotRecompute":
        """Say what stands against it."""
        return cls(f"activations cannot be recomputed: {problem}.", fix=f"{fix}; or {_KEEP}" if fix else _KEEP)

    @classmethod
    def changes(cls, what: str) -> "CannotRecompute":
        """The first run changes what a second one would have to find."""
        return cls.because(f"the model changes {what} when it runs")

    @classmethod
    def between(cls, what: str) -> "CannotRecompute":
        """Something that the first run found is another thing in backward."""
        return cls.because(
            f"{what} was changed between the model's run and its second run in backward, as where loss_fn sets it for "
            "one call",
            "model(x, condition), an argument of the call",
        )


class MeetsInside(CannotRecompute, ConfigurationError):
    """Micro-batches meet inside of a model that is to be recomputed."""
