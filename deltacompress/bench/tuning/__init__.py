"""`bench tuning`: what is worth training of a base for a task, as the same scorer sees it beside the same runtime."""
