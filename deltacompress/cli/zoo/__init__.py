"""The verbs of `deltacompress zoo`: `verbs` puts entries into a zoo and gets them out, and has all others by name."""
