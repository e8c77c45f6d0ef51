"""Benchmarks of the loaded model, and predictions for other cards: jobs, kept results, exports."""
