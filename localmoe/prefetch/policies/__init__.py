"""One small file a policy; see registry for their names."""
