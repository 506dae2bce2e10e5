"""`bench adapters` and `bench adapter-requests`: many adapters beside one base, step by step and by requests."""
