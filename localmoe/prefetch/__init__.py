"""Which expert should be where, and when: policies behind one protocol, and the scheduler that carries them
out."""
