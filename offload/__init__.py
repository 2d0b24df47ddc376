"""Experts as opaque blocks of bytes: no model, no requests."""
