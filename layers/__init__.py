"""Pure model maths: no requests, no cache, no clock."""
