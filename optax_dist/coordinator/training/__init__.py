"""A replica as its training loop sees it: how it submits gradients, and waits."""
