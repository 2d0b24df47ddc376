"""Launchers and what they share; every main file is thin."""
