"""Train with the batch size you want in the memory you have, with exactly the gradients that the big batch would give."""

from bigbatch import errors
from bigbatch.accumulator import Accumulator
from bigbatch.terms import counted
from bigbatch.update import Update

__all__ = ["Accumulator", "Update", "counted", "errors"]
