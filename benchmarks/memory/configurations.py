"""All configurations, ordered so that a run that is cut short has seen every family.

Those of `families/unseen.py`, of `families/second_*.py` and of `families/third` to `families/sixth` are sets
of their own: the estimator was not made from any of them when they were first measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

from benchmarks.memory.configuration import Configuration
from benchmarks.memory.families import (
    adapters,
    compiled,
    convolutions,
    decoders,
    image_models,
    plain,
    recurrent,
    second_images,
    second_plain,
    second_text,
    sequence_to_sequence,
    text_encoders,
    unseen,
)
from benchmarks.memory.families.fifth import images as fifth_images
from benchmarks.memory.families.fifth import libraries as fifth_libraries
from benchmarks.memory.families.fifth import others as fifth_others
from benchmarks.memory.families.fifth import text as fifth_text
from benchmarks.memory.families.fourth import graphs, images, libraries, makers, others, sequences, series
from benchmarks.memory.families.sixth import images as sixth_images
from benchmarks.memory.families.sixth import libraries as sixth_libraries
from benchmarks.memory.families.sixth import others as sixth_others
from benchmarks.memory.families.third import images as third_images
from benchmarks.memory.families.third import others as third_others
from benchmarks.memory.families.third import sequences as third_sequences

MODULES = (
    text_encoders,
    decoders,
    sequence_to_sequence,
    image_models,
    convolutions,
    recurrent,
    adapters,
    plain,
)
FOURTH = (libraries, sequences, series, images, makers, graphs, others)
FIFTH = (fifth_libraries, fifth_text, fifth_images, fifth_others)
SIXTH = (sixth_libraries, sixth_images, sixth_others)


def every_configuration() -> list[Configuration]:
    return _by_turns(MODULES)


def _by_turns(modules: Sequence[Any]) -> list[Configuration]:
    """List the first of each family, then the second of each, and so on."""
    families: dict[str, list[Configuration]] = {}
    for module in modules:
        for configuration in module.CONFIGURATIONS:
            families.setdefault(configuration.family, []).append(configuration)
    return [each for row in zip_longest(*families.values()) for each in row if each is not None]


def unseen_configurations() -> list[Configuration]:
    return list(unseen.CONFIGURATIONS)


def second_configurations() -> list[Configuration]:
    """Of families in neither of the other sets."""
    return [
        *second_text.CONFIGURATIONS,
        *second_images.CONFIGURATIONS,
        *second_plain.CONFIGURATIONS,
    ]


def third_configurations() -> list[Configuration]:
    """Of families in none of the other sets."""
    return [
        *third_sequences.CONFIGURATIONS,
        *third_images.CONFIGURATIONS,
        *third_others.CONFIGURATIONS,
    ]


def fourth_configurations() -> list[Configuration]:
    """Of families in none of the other sets."""
    return _by_turns(FOURTH)


def fifth_configurations() -> list[Configuration]:
    """Of families in none of the other sets."""
    return _by_turns(FIFTH)


def sixth_configurations() -> list[Configuration]:
    """Of families in none of the other sets."""
    return _by_turns(SIXTH)


def compiled_configurations() -> list[Configuration]:
    """Some of the others, with the model compiled."""
    return list(compiled.CONFIGURATIONS)


# by the subject that files in results/ begin with
SETS: dict[str, Callable[[], list[Configuration]]] = {
    "measured": every_configuration,
    "unseen": unseen_configurations,
    "unseen-second": second_configurations,
    "unseen-third": third_configurations,
    "unseen-fourth": fourth_configurations,
    "unseen-fifth": fifth_configurations,
    "unseen-sixth": sixth_configurations,
    "compiled": compiled_configurations,
}


def of_sets(names: str) -> list[Configuration]:
    """The configurations of one set or of several, `a,b`."""
    return [each for name in names.split(",") for each in SETS[name]()]
