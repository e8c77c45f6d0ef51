"""Taking over a transformers Mixture-of-Experts model: skeleton, weights, KV cache, and the pass through
it."""
