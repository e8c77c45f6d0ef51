"""One file an area of the page. Each makes its widgets first and connects them at the end."""
