"""An OpenAI-compatible HTTP server over the long-lived engine: two processes, so that no JSON delays a step."""
