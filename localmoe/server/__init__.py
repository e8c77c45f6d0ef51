"""An OpenAI-compatible API over one engine: what is read, who waits, what is sent. Knows neither the command
line nor the page."""
