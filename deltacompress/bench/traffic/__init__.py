"""Requests for benchmarks of serving: when they come, how long they are, which variant they ask for. No torch here."""
