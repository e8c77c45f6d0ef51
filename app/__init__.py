"""The page: a local chat server on the engine. The only package that imports gradio."""
