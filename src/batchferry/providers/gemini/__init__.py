"""Gemini's native batch API (the Gemini Developer API): resumable uploads, operations, ``generateContent`` rows.

Must not know of OpenAI's shapes nor of Vertex, which is another API with other files and other keys. A record names
the model in its body's ``model`` member, beside ``contents`` and the rest of a GenerateContentRequest; at the
provider the model stands in the address, so it is taken out of the body.
"""

from batchferry.providers.gemini.account import GeminiAccount
from batchferry.providers.gemini.adapter import GeminiProvider

__all__ = ["GeminiAccount", "GeminiProvider"]
