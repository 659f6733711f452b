"""Shows runs to users, during them and afterwards: bars, a page of the dashboard, metrics."""
