"""The scheduler's side of all runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["attachments"]

# Called with the scheduler and our plugin when it starts: the dashboard's page and the metrics add themselves here.
attachments: list[Callable[[Any, Any], None]] = []
