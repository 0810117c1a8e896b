"""The demo: real questions go through a real broker, a simulated provider and the service, in under a minute.

``questions`` makes the input, ``stage`` starts and ends the processes around the service, ``live`` shows the work,
``books`` reads the topics afterwards and checks every promise, ``report`` prints the table. ``command`` is the story.
"""

from batchferry.cli.demo.command import demo

__all__ = ["demo"]
