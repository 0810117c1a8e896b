"""What can be scripted about the Message Batches side alone; all else of a scenario holds for it as well."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class AnthropicScript(BaseModel):
    """Limits and quirks of the Message Batches API. Defaults: Anthropic's guide on batch processing."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    rows_per_batch: Annotated[int, Field(ge=1)] = 100_000
    body_bytes: Annotated[int, Field(ge=1)] = 268_435_456
    """Largest body of a create."""
    versions: Annotated[tuple[str, ...], Field(min_length=1)] = ("2026-10-21", "2023-06-01")
    """Values of ``anthropic-version`` that are taken."""
    unseen_retrieves: Annotated[int, Field(ge=0)] = 0
    """The first n retrieves of each batch answer 404 although it is there; lists show it."""
    unseen_every: Annotated[int, Field(ge=2)] | None = None
    """Every n-th retrieve of all answers 404 although the batch is there."""
    unseen_results: Annotated[int, Field(ge=0)] = 0
    """The first n calls for the results of each ended batch answer 404."""
    results_origin: Annotated[str, Field(pattern=r"^https?://[^/?#]+$")] | None = None
    """Scheme and host that ``results_url`` names instead of the simulator's own: a trap for keys."""
    results_kept_s: Annotated[float, Field(ge=0)] = 29 * 86_400.0
    """Seconds from a batch's creation until its results are archived."""
