"""All configurations, ordered so that a run that is cut short has seen every family.

Those of `families/unseen.py` are a set of their own: the estimator was not made from any of them.
"""

from __future__ import annotations

from itertools import zip_longest

from benchmarks.memory.configuration import Configuration
from benchmarks.memory.families import (
    adapters,
    convolutions,
    decoders,
    image_models,
    plain,
    recurrent,
    sequence_to_sequence,
    text_encoders,
    unseen,
)

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


def unseen_configurations() -> list[Configuration]:
    return list(unseen.CONFIGURATIONS)


def every_configuration() -> list[Configuration]:
    """The first of each family, then the second of each, and so on."""
    families: dict[str, list[Configuration]] = {}
    for module in MODULES:
        for configuration in module.CONFIGURATIONS:
            families.setdefault(configuration.family, []).append(configuration)
    return [each for row in zip_longest(*families.values()) for each in row if each is not None]
