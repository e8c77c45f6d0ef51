"""From messages to token ids and back: chat templates, incremental detokenising, the reusable prefix of a
conversation."""
