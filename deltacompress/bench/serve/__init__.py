"""`bench serve`: traces in real time over the long-lived engine, and how steadily tokens flow meanwhile."""
