"""Mistral's status words, against those of its official client."""

from __future__ import annotations

from typing import get_args

import pytest
from mistralai.client.models import BatchJobStatus
from mistralai.extra.batch import RUNNING_STATUSES

from batchferry.domain.provider import ProviderStatus
from batchferry.providers.mistral.statuses import STATUSES, read_status

OFFICIAL = {word for part in get_args(BatchJobStatus) for word in get_args(part) if isinstance(word, str)}


def test_every_official_word_is_in_the_table_and_no_other():
    """The table has exactly the words of the official client."""
    assert {word.upper() for word in STATUSES} == OFFICIAL
    assert len(OFFICIAL) == 7


def test_ends_are_those_of_the_official_client():
    """A job is under way for us when it is for the official client."""
    assert {word for word in OFFICIAL if not read_status(word).is_terminal} == set(RUNNING_STATUSES)


@pytest.mark.parametrize("raw", ["queued", " Running ", "CANCELLATION-REQUESTED", "timeout exceeded"])
def test_spelling_does_not_matter(raw):
    """Case, blanks around, and dashes or spaces for underscores are overlooked."""
    assert read_status(raw) is not ProviderStatus.UNKNOWN


@pytest.mark.parametrize("raw", ["", "COMPLETED", "EXPIRED", "PAUSED"])
def test_an_unknown_word_is_never_an_end(raw):
    """A word that Mistral has not, OpenAI's ends among them, is polled on."""
    assert read_status(raw) is ProviderStatus.UNKNOWN
    assert not read_status(raw).is_terminal
