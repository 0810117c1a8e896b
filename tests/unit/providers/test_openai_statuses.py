import pytest

from batchferry.domain.provider import ProviderStatus
from batchferry.providers.openai.statuses import STATUSES, read_status


@pytest.mark.parametrize("status", [status for status in ProviderStatus if status is not ProviderStatus.UNKNOWN])
def test_the_fields_own_names_mean_themselves(status):
    """OpenAI's eight words are understood in any case."""
    assert read_status(status.value) is status
    assert read_status(f" {status.value.upper()} ") is status
    assert read_status(status.value.title().replace("_", "-")) is status


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        ("canceling", ProviderStatus.CANCELLING),
        ("CANCELLED", ProviderStatus.CANCELLED),
        ("canceled", ProviderStatus.CANCELLED),
        ("PROGRESS", ProviderStatus.IN_PROGRESS),
        ("queued", ProviderStatus.VALIDATING),
        ("TIMEOUT_EXCEEDED", ProviderStatus.EXPIRED),
    ],
)
def test_dialects(raw, status):
    """Spellings of compatible servers are translated."""
    assert read_status(raw) is status


@pytest.mark.parametrize("raw", ["dreaming", "", "done?", "completed_with_errors"])
def test_an_unknown_word_is_never_an_end(raw):
    """A word nobody told us about is unknown, so the batch is polled on."""
    assert read_status(raw) is ProviderStatus.UNKNOWN
    assert not read_status(raw).is_terminal


def test_the_table_knows_no_unknown():
    """Every line of the table says something."""
    assert ProviderStatus.UNKNOWN not in STATUSES.values()
