"""What every command says and reads: options, errors with what to do, paths that were meant."""
