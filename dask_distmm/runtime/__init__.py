"""One run's protocol between client, scheduler and workers."""
