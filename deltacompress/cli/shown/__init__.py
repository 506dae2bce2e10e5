"""What the command line shows: results, progress and failures, all of it through `console`."""
