"""Parts of every command: options, errors with remedies, suggestions for paths."""
