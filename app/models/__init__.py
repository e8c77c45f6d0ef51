"""What the Models tab asks for, behind its widgets: search, download queue, models on this machine, fit."""
