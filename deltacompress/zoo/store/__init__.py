"""Where the bytes of a zoo lie: one primitive, put_if_absent, on a local directory or an object store."""
