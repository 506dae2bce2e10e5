"""Before the work: what a job is given, opened and checked, and what it will come to."""
