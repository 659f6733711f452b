"""What a person sees of runs while they go on and afterwards: records, bars, a page of the dashboard, metrics."""
