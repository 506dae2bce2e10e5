"""Methods of the field that `compare` sets beside the recipes."""
