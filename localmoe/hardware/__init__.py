"""What the machine has, how a memory budget is divided, and what physics allows. Loads no model."""
