"""What is asked of a model: tasks, their samples, and the token ids they become."""
