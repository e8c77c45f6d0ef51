"""Pictures beside text: files, what a model's encoder makes of them, and where that stands in a prompt."""
