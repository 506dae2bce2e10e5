"""What is said over HTTP: requests to calls, events to answers and streams, errors in OpenAI's shape. No torch here."""
