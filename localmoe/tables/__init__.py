"""The papers' tables, measured on this project: what runs for each, the papers' figures beside ours, and the
page that shows both. Sits on the engine; the command line calls it."""
