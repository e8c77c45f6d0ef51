"""Types, configuration, events, statistics and errors. Imports no torch and knows no device."""
