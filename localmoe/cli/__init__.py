"""The `localmoe` command."""
