"""Parts of every command: options, errors, suggestions for paths."""
