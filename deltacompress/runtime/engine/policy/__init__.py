"""Who runs, who waits, who gives way, which variants come and go: a pure function of what is there. No torch here."""
