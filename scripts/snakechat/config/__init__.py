"""The configuration: declarations of its keys, the checks, and recipes with all their settings."""
