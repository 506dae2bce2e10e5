"""A long-lived engine: requests come and go, and what becomes of each is told as events."""
