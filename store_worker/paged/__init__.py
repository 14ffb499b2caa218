"""paged package."""
