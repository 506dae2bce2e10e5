"""The processes of one model: the first tells the others what to do, in a form of its own, and hears how they fare."""
