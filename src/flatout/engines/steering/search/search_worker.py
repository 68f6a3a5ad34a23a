"""One process of a search: its replica of the model, and what runs the rows of its trials."""

from __future__ import annotations

import math
from collections.abc import Mapping

from flatout.engines.run.fingerprint import model_fingerprint, tokenizer_fingerprint
from flatout.engines.steering.load_model import LoadedModel
from flatout.engines.steering.questions import QuestionSplit
from flatout.engines.steering.search.halved_search import HalvedSearch, OnEvent
from flatout.engines.steering.search.halving import Halving
from flatout.engines.steering.search.space import Space
from flatout.engines.steering.search.study import SearchStudy, open_study
from flatout.engines.steering.settings import SearchSettings, read_layers
from flatout.engines.steering.trials.hooked_trials import HookedTrials
from flatout.engines.steering.trials.packed_trials import PackedTrials
from flatout.engines.steering.trials.scoring import Judged, MultipleChoice, Scorer, encode_prompts, find_judge
from flatout.engines.steering.trials.trial_engine import TrialEngine
from flatout.engines.steering.vectors.steering_vectors import SteeringVectors
from flatout.ground import OnProgress
from flatout.ground.errors import BadInput

GPU_ROWS, CPU_ROWS = 256, 64
FEWEST_BATCH_TRIALS = 32  # halved together where a search has twice as many
TOKENS_PER_ROW = 32  # of a batch of answers; prompts are shared, so a row is a few tokens


class SearchWorker:
    """Everything that a process of a search holds, whichever study it works in."""

    def __init__(
        self,
        settings: SearchSettings,
        split: QuestionSplit,
        loaded: LoadedModel,
        vectors: Mapping[str, SteeringVectors],
        *,
        on_progress: OnProgress,
        on_event: OnEvent,
    ) -> None:
        self.settings, self.split, self.loaded, self.vectors = settings, split, loaded, vectors
        self._on_progress, self._on_event = on_progress, on_event
        self.engine = self.make_engine()
        self._recipe = {
            "model": model_fingerprint(loaded.model),
            "tokenizer": tokenizer_fingerprint(loaded.tokenizer),
        }
        strange = [
            name
            for name, held in vectors.items()
            if held.is_of_another_model(loaded.model, fingerprint=self._recipe["model"])
        ]
        if strange:
            on_progress(f"the vectors of {', '.join(strange)} were fitted on weights other than this model's")

    @property
    def num_rows(self) -> int:
        """How many rows run at a time."""
        on_gpu = any(parameter.device.type == "cuda" for parameter in self.loaded.model.parameters())
        return self.settings.rows or (GPU_ROWS if on_gpu else CPU_ROWS)

    def batch_trials(self, *, num_workers: int) -> int:
        """Choose how many trials are halved together: they fill each rung, but the sampler learns between."""
        halving = Halving(rungs=self.settings.rungs)
        filling = halving.trials_that_fill(self.num_rows, num_questions=len(self.split.search))
        share = math.ceil(self.settings.trials / (2 * num_workers))
        return max(1, min(max(filling, FEWEST_BATCH_TRIALS), share))

    def make_engine(self, *, rows: int | None = None) -> TrialEngine:
        """Make what runs the rows of all trials, as many at a time as the device takes."""
        model = self.loaded.model
        devices = {parameter.device for parameter in model.parameters()}
        slots = rows or self.num_rows
        reason = f"it is on {len(devices)} devices"
        if len(devices) == 1:
            prompts = [question.prompt for question in (*self.split.search, *self.split.fresh)]
            longest = max(map(len, encode_prompts(prompts, self.loaded.tokenizer)))
            try:
                return PackedTrials(
                    model,
                    slots=slots,
                    batch_tokens=slots * TOKENS_PER_ROW,
                    max_tokens=longest + self.settings.max_new_tokens,
                )
            except BadInput as error:  # a family that the packed engine does not read
                reason = error.message
        if rows is None:
            self._on_progress(f"rows run through the model's own forward and share no prompts: {reason}")
        return HookedTrials(model, slots=slots, batch_tokens=slots * TOKENS_PER_ROW)

    def _scorer(self) -> Scorer:
        settings, tokenizer = self.settings, self.loaded.tokenizer
        if settings.judge is None:
            return MultipleChoice(tokenizer, toward=settings.toward, by=settings.score)
        judge, name = find_judge(settings.judge)
        return Judged(tokenizer, judge, name=name, max_new_tokens=settings.max_new_tokens)

    def search_in(self, study: SearchStudy) -> HalvedSearch:
        """Bind a search over this model to a study; a study of another model is refused."""
        low, high = self.settings.strength
        layers = read_layers(self.settings.layers)
        space = Space.of(
            self.vectors,
            layers=None if layers == "all" else layers,
            strength=(low, high),
            where=self.settings.where,
            modes=self.settings.modes,
            spans=self.settings.spans,
        )
        search = HalvedSearch(
            self.engine,
            self.vectors,
            self.split.search,
            study=study,
            scorer=self._scorer(),
            space=space,
            halving=Halving(rungs=self.settings.rungs),
            on_event=self._on_event,
        )
        study.bind({**self._recipe, **search.recipe()})
        return search


def study_of(settings: SearchSettings, *, worker: str) -> SearchStudy:
    """Open the study of a search as a worker sees it."""
    return open_study(
        storage_of(settings),
        name=settings.study_name,
        seed=settings.seed,
        worker=worker,
        sampler=settings.sampler,
        rows=settings.folder / "rows",
    )


def storage_of(settings: SearchSettings) -> str:
    """Return the address of the study's storage, or the path of its journal."""
    return settings.storage or str(settings.folder / "study.journal")
