"""Result lines of OpenAI-shaped servers; how they are read stands in ``providers.rowlines``."""

from __future__ import annotations

from batchferry.providers.openai.classes import classify_row
from batchferry.providers.rowlines import LineReader

_reader = LineReader(classify_row)
read_line = _reader.read_line
judge_answer = _reader.judge_answer
