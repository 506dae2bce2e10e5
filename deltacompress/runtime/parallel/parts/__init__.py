"""What of a model and of its variants is one rank's."""
