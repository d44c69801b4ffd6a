"""All-reduces of ours beside those of torch and Gloo."""
