"""The settings: one frozen tree, read once from a file, the environment and flags, and checked as a whole.

``load_settings`` is the only way in: it gives a tree that can be relied upon, or raises ``ConfigError`` with
every fault at once. ``app`` hands each room its own slice. This room must not know the rooms that use the
settings, nor open anything but the settings file, ``.env`` and the files that secrets are kept in.
"""

from batchferry.config.explain import SettingRow, explain_settings, settings_schema
from batchferry.config.load import example_text, load_settings
from batchferry.config.models import (
    AccountSettings,
    CanarySettings,
    ClockSettings,
    KafkaSettings,
    LimitSettings,
    LogSettings,
    OtelSettings,
    RouteSettings,
    ServerSettings,
    Settings,
    TopicSettings,
)

__all__ = [
    "AccountSettings",
    "CanarySettings",
    "ClockSettings",
    "KafkaSettings",
    "LimitSettings",
    "LogSettings",
    "OtelSettings",
    "RouteSettings",
    "ServerSettings",
    "SettingRow",
    "Settings",
    "TopicSettings",
    "example_text",
    "explain_settings",
    "load_settings",
    "settings_schema",
]
