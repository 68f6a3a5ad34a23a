"""Weights beside those that are trained, by their norms."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from flatout.tuner.trial.other_weights import all_modules, find_weights, norms_of


@pytest.fixture(autouse=True)
def nothing_is_frozen() -> Iterator[None]:
    gc.unfreeze()  # by an earlier test
    yield
    gc.unfreeze()


def test_weights_of_modules_that_no_optimizer_changes_are_found() -> None:
    old = nn.Linear(2, 2)
    before = all_modules()
    assert old in before
    model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.ReLU())
    average = copy.deepcopy(model)
    loop = nn.Linear(5, 5)
    loop.itself = loop  # garbage that only the collector finds
    del loop
    gc.freeze()
    found = find_weights(before=before, own={id(each) for each in model.parameters()})
    assert [id(each) for each in found] == [id(each) for each in average.parameters()]
    assert norms_of([*found, torch.tensor(3)]) == (float(average[0].weight.detach().double().norm()),)


def test_what_was_frozen_before_is_not_listed_again() -> None:
    before = all_modules()
    model = nn.Linear(2, 2)
    gc.freeze()
    assert find_weights(before=before, own=set(), num_frozen=gc.get_freeze_count()) == []
    found = find_weights(before=before, own=set())
    assert [id(each) for each in found] == [id(each) for each in model.parameters()]
