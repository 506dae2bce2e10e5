"""What HTTP costs: `bench serve --http`."""
