"""What the scheduler tells of runs."""

from __future__ import annotations


def events(client, action=None):
    """Return the events of all runs, or those of one action, in order."""
    found = [event for _, event in client.get_events("distmm")]
    return found if action is None else [event for event in found if event["action"] == action]
