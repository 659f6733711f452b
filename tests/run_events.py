"""What the scheduler tells of runs."""

from __future__ import annotations


def events(client, action=None):
    """Return the events of runs, or those of one action, in order; the scheduler forgets old ones."""
    return events_after(client, -1, action)


def newest_run(client):
    """Return when the newest event of a run was; numbers begin anew with each plugin that is registered."""
    return max((when for when, _ in client.get_events("distmm")), default=0)


def events_after(client, moment, action="done"):
    """Return the events of one action after a moment. (Counting events would miss forgotten ones.)"""
    found = client.get_events("distmm")
    return [event for when, event in found if when > moment and action in (None, event["action"])]


def runs_after(client, moment):
    """Return how many runs are done after a moment."""
    return len(events_after(client, moment))
