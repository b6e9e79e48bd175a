"""Hugging Face and Lightning: record their trainers, and read the folders they write; trackers."""
