"""What the scheduler tells of runs."""

from __future__ import annotations


def events(client, action=None):
    """Return the events of runs, or those of one action, in order; the scheduler forgets old ones."""
    found = [event for _, event in client.get_events("distmm")]
    return found if action is None else [event for event in found if event["action"] == action]


def newest_run(client):
    """Return the number of the newest run that has begun, 0 if there is none."""
    return max((event["run"] for event in events(client)), default=0)


def events_after(client, number, action="done"):
    """Return the events of one action of the runs after one number. (Counting events would miss forgotten ones.)"""
    return [event for event in events(client, action) if event["run"] > number]


def runs_after(client, number):
    """Return how many later runs are done."""
    return len(events_after(client, number))
