"""Hugging Face and Lightning: recording their trainers, reading the folders they leave."""
