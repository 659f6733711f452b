"""Shows runs to people while they go on and afterwards: bars, a page of the dashboard, metrics."""
