"""One run's protocol between client, scheduler and workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Called with the scheduler and our plugin when it starts: the dashboard's page and the metrics add themselves here.
attachments: list[Callable[[Any, Any], None]] = []
