"""Steering: the names that a program of your own needs.

    from flatout.steering import Steering, steered_model

steered_model        a model whose layers add a vector, for the length of a block
Steering             which vector, at which layers, how strong
load_model           a model folder and its tokenizer, ready to run
extract, encode      the residual stream of texts at many layers; texts tokenised before the pass
Question, read_questions, question_of    A/B questions and pairs of texts

`flatout.steer` searches a vector, as `flatout steer search` does.  Names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flatout.ground.lazy_names import lazy_names as _lazy_names

if TYPE_CHECKING:
    from flatout.engines.steering.extract.activations import extract as extract
    from flatout.engines.steering.extract.tokens import encode as encode
    from flatout.engines.steering.load_model import load_model as load_model
    from flatout.engines.steering.questions import Question as Question
    from flatout.engines.steering.questions import question_of as question_of
    from flatout.engines.steering.questions import read_questions as read_questions
    from flatout.engines.steering.trials.steered_model import steered_model as steered_model
    from flatout.engines.steering.trials.steering import Steering as Steering
else:
    __all__, __getattr__, __dir__ = _lazy_names(__name__)
