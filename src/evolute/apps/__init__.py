"""Decisions: what curvature and losses say about what to do next."""
