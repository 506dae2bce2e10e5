"""`bench adapters`: decode steps of many adapters beside one base, and what each takes."""
