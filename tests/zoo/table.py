"""Every program of the zoo, and what the library does not do yet."""

from tests.zoo.coupled import COUPLED_LOSSES
from tests.zoo.everyday import EVERYDAY
from tests.zoo.hugging_face import HUGGING_FACE
from tests.zoo.metric import METRIC
from tests.zoo.plain import PLAIN
from tests.zoo.program import Program
from tests.zoo.vision import VISION

PROGRAMS: list[Program] = [*PLAIN, *EVERYDAY, *COUPLED_LOSSES, *HUGGING_FACE, *VISION, *METRIC]
OPEN = {  # by row and entrance, with the reason: strict xfails
    "soft-dtw/accumulator": "data that a difference spreads may be other samples'",
}
