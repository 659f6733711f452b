"""What the scheduler tells of runs."""

from __future__ import annotations

from matrices import until


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


def phases(client):
    """Return the phase and the participants of each run of now."""

    def look(dask_scheduler):
        runs = dask_scheduler.plugins["distmm"].queue.values()
        return [(run.phase, sorted(run.participants)) for run in runs]

    return client.run_on_scheduler(look)


def until_running(client):
    """Wait until the ranks of a run work; return its participants."""
    return until(lambda: [members for phase, members in phases(client) if phase == "running"])[0]


def runs_after(client, moment):
    """Return how many runs are done after a moment."""
    return len(events_after(client, moment))
