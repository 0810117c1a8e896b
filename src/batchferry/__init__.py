"""batchferry: LLM requests on Kafka become half-price provider batches and come back before their deadline."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("batchferry")
except PackageNotFoundError:  # running from a source tree that was never installed
    __version__ = "0.0.0"

__all__ = ["__version__"]
