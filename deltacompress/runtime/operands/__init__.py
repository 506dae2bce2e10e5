"""What a variant brings for one tensor, and what each kind of it does in a forward: a file for each kind."""
