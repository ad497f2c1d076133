"""Reports: numbers and lists as text, and plans as pictures, which are drawn from a plan's dict."""
