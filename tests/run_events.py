"""What the scheduler tells of runs."""

from __future__ import annotations


def events(client, action=None):
    """Return the events of all runs, or those of one action, in order."""
    found = [event for _, event in client.get_events("distmm")]
    return found if action is None else [event for event in found if event["action"] == action]


def newest_run(client):
    """Return the number of the newest run that is done, 0 if there is none."""
    return max((event["run"] for event in events(client, "done")), default=0)


def runs_after(client, number):
    """Return how many later runs are done. (The scheduler forgets old events: their number does not tell.)"""
    return sum(event["run"] > number for event in events(client, "done"))
