from __future__ import annotations

import math
from pathlib import Path

import pytest

from flatout.engines.steering.questions import Question, question_of
from flatout.engines.steering.report.record import Trial
from flatout.engines.steering.search.space import steering_of
from flatout.engines.steering.trials.packed_trials import PackedTrials
from flatout.engines.steering.trials.scoring import (
    Judged,
    MultipleChoice,
    Score,
    TrialRow,
    choices_of,
    encode_prompts,
    find_judge,
)
from flatout.ground.errors import BadInput
from tests.support.multiplex import reference_tokens
from tests.support.steering import model, questions, tokenizer, vectors


def rows() -> list[TrialRow]:
    trial = Trial(number=0, layer=2, method="planted", strength=0.5, where="last-and-generated")
    return [(one, question) for question in questions(5) for one in (None, steering_of(trial, vectors()))]


def scores(scorer: MultipleChoice | Judged, asked: list[TrialRow]) -> list[Score]:
    found: dict[int, Score] = {}
    scorer.score(PackedTrials(model(), slots=4, max_tokens=64), asked, on_score=found.__setitem__)
    return [found[number] for number in range(len(asked))]


def test_the_two_answers_share_a_probability_of_one() -> None:
    toward = scores(MultipleChoice(tokenizer()), rows())
    away = scores(MultipleChoice(tokenizer(), toward="negative"), rows())
    for one, other in zip(toward, away, strict=True):
        assert one.value is not None and other.value is not None
        assert 0 < one.value < 1
        assert one.value + other.value == pytest.approx(1)
    plain, steered = toward[::2], toward[1::2]
    assert all((b.value or 0) > (a.value or 0) for a, b in zip(plain, steered, strict=True))


def test_a_strength_that_overflows_gives_no_number() -> None:
    trial = Trial(number=0, layer=1, method="random", strength=1e38, where="all")
    (score,) = scores(MultipleChoice(tokenizer()), [(steering_of(trial, vectors()), questions(1)[0])])
    assert score.value is None


def test_choices_are_read_as_the_model_reads_them() -> None:
    (question,) = questions(1)
    choice = choices_of([question], tokenizer())[question.key]
    assert choice.prompt == encode_prompts([question.prompt], tokenizer())[0]
    assert (choice.positive, choice.negative) == ((10,), (11,))
    assert choices_of([], tokenizer()) == {} and encode_prompts([], tokenizer()) == []
    unknown = question_of("w4 w5", positive="yes", negative="no")  # both are the unknown word
    with pytest.raises(BadInput, match=r"'w4 w5': both answers of a choice are the same tokens"):
        choices_of([unknown], tokenizer())


def test_a_judge_reads_the_generated_text() -> None:
    def judge(question: Question, text: str) -> float:
        words = text.split()
        if question == questions(2)[1]:
            raise ValueError("no answer")
        return math.inf if question == questions(3)[2] else float(words[0][1:])

    asked: list[TrialRow] = [(None, question) for question in questions(4)]
    found = scores(Judged(tokenizer(), judge, name="first word", max_new_tokens=3), asked)
    for score, prompt in zip(
        found, encode_prompts([one.prompt for one in questions(4)], tokenizer()), strict=True
    ):
        tokens = reference_tokens(model(), prompt, max_new_tokens=3)
        assert score.text == tokenizer().decode(tokens)
    assert [score.value is None for score in found] == [False, True, True, False]


def test_a_judge_is_named_by_its_module_and_bound_to_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    source = (
        "def words(question, text):\n    return len(text.split())\n\n"
        "def broken(question, text):\n    return text.n\n\n"
        "def three(a, b, c):\n    return 1\n\n"
        "class Counts:\n    def __call__(self, question, text):\n        return len(text)\n\n"
        "counts = Counts()\n"
    )
    (tmp_path / "my_judge.py").write_text(source)
    judge, name = find_judge("my_judge:words")
    assert judge(questions(1)[0], "a b c") == 3
    assert name.startswith("my_judge:words ") and len(name) == len("my_judge:words ") + 8
    judge, named = find_judge("my_judge:counts")  # an object that is called is bound to its class
    assert judge(questions(1)[0], "a b") == 3 and named.startswith("my_judge:counts ")
    (tmp_path / "other_judge.py").write_text(source.replace("return len(text)\n", "return -len(text)\n"))
    _, other = find_judge("other_judge:counts")
    assert named.rpartition(" ")[2] != other.rpartition(" ")[2]
    broken, _ = find_judge("my_judge:broken")
    with pytest.raises(BadInput, match=r"the judge broken raised AttributeError") as raised:
        scores(Judged(tokenizer(), broken, name="broken", max_new_tokens=1), [(None, questions(1)[0])])
    assert raised.value.hint == f"at {tmp_path / 'my_judge.py'}:5"
    for wrong, words in (
        ("my_judge", "does not name a judge"),
        ("my_judge:no", "my_judge has no 'no'"),
        ("my_judge:three", r"'my_judge:three' takes \(a, b, c\)"),
    ):
        with pytest.raises(BadInput, match=words):
            find_judge(wrong)


@pytest.mark.parametrize("value", ["good", None, [1.0, 2.0]])
def test_a_judge_that_returns_no_number_is_refused_with_its_place(value: object) -> None:
    def judge(question: Question, text: str) -> float:
        return value  # type: ignore[return-value]

    with pytest.raises(BadInput, match=r"the judge mine returned .*, not a number") as raised:
        scores(Judged(tokenizer(), judge, name="mine", max_new_tokens=1), [(None, questions(1)[0])])
    assert raised.value.hint == f"at {__file__}:{judge.__code__.co_firstlineno}"


def test_a_judge_that_refuses_a_text_says_why() -> None:
    def judge(question: Question, text: str) -> float:
        raise ValueError("too short")

    judged = Judged(tokenizer(), judge, name="mine", max_new_tokens=1)
    assert judged.refusal is None
    assert scores(judged, [(None, questions(1)[0])])[0].value is None
    assert judged.refusal is not None and "too short, at " in judged.refusal and __file__ in judged.refusal


def test_scores_say_what_they_depend_on() -> None:
    assert MultipleChoice(tokenizer()).recipe() != MultipleChoice(tokenizer(), toward="negative").recipe()
    ways = [
        MultipleChoice(tokenizer(), by=by).recipe()["score"] for by in ("whole", "decisive", "first-token")
    ]
    assert len(set(ways)) == 3
    judged = Judged(tokenizer(), lambda question, text: 0.0, name="none", max_new_tokens=3)
    assert judged.recipe() == {"score": "none of 3 tokens, system None"}
    with pytest.raises(BadInput, match="toward 'up'"):
        MultipleChoice(tokenizer(), toward="up")  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="max_new_tokens=0"):
        Judged(tokenizer(), lambda question, text: 0.0, name="none", max_new_tokens=0)
