"""OpenAI's and Anthropic's APIs over one engine: what is read, who waits, what is sent. Knows neither the
command line nor the page."""
