"""Exports of results: tables (CSV, Parquet), Hugging Face datasets, chat messages for SFT, and ATIF."""
