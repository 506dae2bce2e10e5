"""Keeping a zoo whole and small: verify, repair, removal, collection, usage."""
