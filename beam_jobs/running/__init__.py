"""How a job runs: runners, workers, what they say and how they fail."""
