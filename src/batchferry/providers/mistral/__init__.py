"""Mistral's batch jobs: files, jobs and single calls of its own API.

Must not know batches of ours. What it shares with the OpenAI family (the shape of result lines and files, the walk of
the class tables, connections) stands beside both folders; the words of its jobs and errors stand here.
"""

from batchferry.providers.mistral.account import MistralAccount
from batchferry.providers.mistral.adapter import MistralProvider

__all__ = ["MistralAccount", "MistralProvider"]
