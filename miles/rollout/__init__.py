"""Sampling responses from engines and scoring them."""
