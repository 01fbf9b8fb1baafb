"""The APIs of groups: each a small function from request to response."""
