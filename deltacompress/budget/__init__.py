"""A size or a quality in the place of a recipe: what each part of a model costs and loses is measured, then chosen."""
