"""Log lines with times, of fedloom and Flower alike."""

import logging
import sys

from flwr.supercore.logger import FLOWER_LOGGER, update_console_handler

ROUTINE = ("ControlServicer.List", "ControlServicer.RegisterNode")
"""Beginnings of Flower's log lines about status queries, which fedloom sends every few seconds."""


def log_with_times() -> None:
    """Give Flower's log lines and ours a time, and leave out Flower's lines about routine queries."""
    update_console_handler(timestamps=True, colored=False)
    FLOWER_LOGGER.addFilter(lambda record: not record.getMessage().startswith(ROUTINE))
    FLOWER_LOGGER.propagate = False  # it has its own handler; the root logger's would write each line again
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", stream=sys.stdout)
    logging.getLogger("fedloom").setLevel(logging.INFO)
