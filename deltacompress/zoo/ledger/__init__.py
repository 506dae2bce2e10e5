"""What the bytes of a zoo mean: blobs, manifests, versions, aliases, attachments, and the order they are written in."""
