"""How a job runs: runners, workers, messages and failures."""
