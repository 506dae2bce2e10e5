"""The device's part of a step: pieces of prompts, and one token for each row of the running batch."""
