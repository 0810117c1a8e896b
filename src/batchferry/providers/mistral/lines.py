"""Mistral's result lines: of OpenAI's shape, read by ``providers.rowlines`` and judged by Mistral's tables."""

from __future__ import annotations

from batchferry.providers.mistral.classes import classify_row, word_of
from batchferry.providers.rowlines import LineReader

_reader = LineReader(classify_row, word_of)
read_line = _reader.read_line
judge_answer = _reader.judge_answer
